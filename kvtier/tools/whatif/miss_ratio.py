"""The exact miss-ratio curve of LRU from one walk over a trace, for all sizes at once; other policies at some sizes.

Blocks that were always used together form a *segment*: a run of one request's ids, split where a later prompt parts.
Every use of a segment takes the next place in the order of recency, the leaf's before its parent's, so that no parent
ages before its child. A Fenwick tree over the places holds the blocks of each. The stack distance of a block is the
number of blocks in more recent places, and of its own segment up to it: a tier of that many blocks or more holds it.

A request is atomic: it hits its longest prefix of held blocks, then all its blocks are used. Only whole blocks of the
prompt are counted as used; the last one, if it is partial, is never stored.

Another policy is replayed on metadata alone, in the index of a running tier. As in a stack a request's hits are used,
its other blocks are placed in one batch, and then all of it is used from leaf to root. A request-aware policy is given
the requests, and the length of an output once that many tokens have been generated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from kvtier.control.request_tracker import RequestTracker
from kvtier.control.state import ControlState
from kvtier.control.tiers.lower_tier import TierSpec
from kvtier.control.tiers.slot_table import READY
from kvtier.policy import EvictionPolicy
from kvtier.tier.contract import Opened, SlotSpace
from kvtier.traces.requests import KeyChain, Request, RequestSource, common_prefix, group_keys
from kvtier.types.arrays import IntArray
from kvtier.types.keys import CPU, OffloadKey, RequestId
from kvtier.types.requests import NO_INFO

PLACES_LEAST = 1 << 10


@dataclass(slots=True, eq=False)
class _Segment:
    """A run of ids, the children by their first id, and the place of the last use."""

    ids: IntArray
    place: int = -1
    children: dict[int, _Segment] = field(default_factory=dict)


class _Places:
    """Blocks by place in the order of recency. Places are given out once, and numbered again when they run out."""

    def __init__(self) -> None:
        self._tree = [0] * (PLACES_LEAST + 1)
        self._segments: list[_Segment | None] = [None] * PLACES_LEAST
        self._next = 0
        self.total = 0

    def above(self, place: int) -> int:
        """Blocks in more recent places."""
        below, index, tree = 0, place + 1, self._tree
        while index:
            below += tree[index]
            index &= index - 1
        return self.total - below

    def _add(self, place: int, blocks: int) -> None:
        index, tree, size = place + 1, self._tree, len(self._tree)
        while index < size:
            tree[index] += blocks
            index += index & -index

    def forget(self, segment: _Segment) -> None:
        """The segment leaves its place."""
        if segment.place >= 0:
            self._add(segment.place, -len(segment.ids))
            self.total -= len(segment.ids)
            self._segments[segment.place] = None
            segment.place = -1

    def use(self, segment: _Segment) -> None:
        """The segment becomes the most recent."""
        self.forget(segment)
        if self._next == len(self._segments):
            self._renew()
        self._take(segment)

    def _take(self, segment: _Segment) -> None:
        segment.place = self._next
        self._segments[self._next] = segment
        self._next += 1
        self._add(segment.place, len(segment.ids))
        self.total += len(segment.ids)

    def shorten(self, segment: _Segment, blocks: int) -> None:
        """The first blocks of a segment were split off; the rest stays in its place."""
        segment.ids = segment.ids[blocks:]
        self._add(segment.place, -blocks)
        self.total -= blocks

    def _renew(self) -> None:
        """Close the gaps, and make as many places again as are taken."""
        held = [segment for segment in self._segments if segment is not None]
        size = max(PLACES_LEAST, 2 * len(held))
        self._tree = [0] * (size + 1)
        self._segments = [None] * size
        self._next = self.total = 0
        for segment in held:
            self._take(segment)


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Blocks hit at every size of one tier. `references` counts the blocks of all prompts, partial ones included;
    `working_set` the different whole blocks, beyond which nothing more is hit."""

    references: int
    working_set: int
    prompt_tokens: int
    block_tokens: int
    cumulative: npt.NDArray[np.int64]

    def hits(self, blocks: int) -> int:
        """Blocks hit by a tier of this many blocks."""
        return int(self.cumulative[min(blocks, len(self.cumulative) - 1)])

    def hit_rate(self, blocks: int) -> float:
        """Share of the references."""
        return self.hits(blocks) / self.references if self.references else 0.0

    def knee(self) -> int:
        """The size at which the curve is farthest above the straight line from nothing to the working set."""
        size = len(self.cumulative) - 1
        line = np.arange(size + 1) * (self.cumulative[-1] / max(1, size))
        return int(np.argmax(self.cumulative - line))


class StackDistances:
    """Takes the requests of a trace one by one; `curve` is that of what was taken so far."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._roots: dict[str, _Segment] = {}
        self._places = _Places()
        self._above: list[int] = []
        self._blocks: list[int] = []
        self._references = self._prompt_tokens = self._distinct = 0

    def use(self, request: Request) -> None:
        """Record that a request uses the whole blocks of its prompt."""
        whole = min(request.prompt_blocks, request.prompt_tokens // self._block_tokens)
        self._references += request.prompt_blocks
        self._prompt_tokens += request.prompt_tokens
        root = self._roots.setdefault(request.root, _Segment(request.ids[:0]))
        path = self._walk(root, request.ids[:whole])
        for segment in reversed(path):
            self._places.use(segment)

    def _walk(self, parent: _Segment, ids: IntArray) -> list[_Segment]:
        """The segments of a prompt, root first: what is known of it counts as used at its distance, the rest is new."""
        path: list[_Segment] = []
        while len(ids):
            first = int(ids[0])
            segment = parent.children.get(first)
            if segment is None:
                segment = parent.children[first] = _Segment(ids)
                self._distinct += len(ids)
            else:
                self._above.append(self._places.above(segment.place))
                common = common_prefix(segment.ids, ids)
                self._blocks.append(common)
                if common < len(segment.ids):
                    segment = parent.children[first] = self._split(segment, common)
            path.append(segment)
            ids = ids[len(segment.ids) :]
            parent = segment
        return path

    def _split(self, segment: _Segment, blocks: int) -> _Segment:
        """A new segment of the first blocks, above the rest, which keeps its place and its children."""
        front = _Segment(segment.ids[:blocks])
        self._places.shorten(segment, blocks)
        front.children[int(segment.ids[0])] = segment
        return front

    def curve(self) -> Curve:
        """Hits at every size up to the working set."""
        size = self._distinct
        steps = np.zeros(size + 2, np.int64)
        above, blocks = np.array(self._above, np.int64), np.array(self._blocks, np.int64)
        np.add.at(steps, above + 1, 1)
        np.add.at(steps, above + blocks + 1, -1)
        cumulative = np.cumsum(np.cumsum(steps))[: size + 1]
        return Curve(self._references, size, self._prompt_tokens, self._block_tokens, cumulative)


def lru_curve(source: RequestSource, progress: Callable[[], None] = lambda: None) -> Curve:
    """The curve of a whole trace."""
    distances = StackDistances(source.block_tokens)
    requests: Iterator[Request] = source.requests()
    for request in requests:
        distances.use(request)
        progress()
    return distances.curve()


OUTPUT_TOKENS_PER_SECOND = 50.0


class PolicyReplay:
    """A tier of `num_blocks` blocks. `hits` and `references` count blocks."""

    def __init__(self, num_blocks: int, policy: str | type[EvictionPolicy]) -> None:
        self.hits = 0
        self.references = 0
        self._num_blocks = num_blocks
        space = SlotSpace.of_slots(num_blocks)
        self._control = ControlState(TierSpec("shadow", CPU, Opened(num_blocks, space), policy), ())
        self._uses = RequestTracker(self._control, None) if list(self._control.models) else None
        self._ends: list[tuple[float, RequestId, int]] = []

    @property
    def hit_rate(self) -> float:
        """Share of the references."""
        return self.hits / self.references if self.references else 0.0

    def use(self, request_id: RequestId, request: Request, keys: Sequence[OffloadKey]) -> None:
        """Serve a request, with the keys of the whole blocks of its prompt."""
        if self._uses is not None:
            self._end_until(math.inf if request.arrived is None else request.arrived)
            self._uses.begin(request_id, keys, 0.0, request.arrived, request.info or NO_INFO)
        self.hits += self._place(keys)
        self.references += request.prompt_blocks
        if self._uses is not None:
            ends_at = (request.arrived or 0.0) + request.output_tokens / OUTPUT_TOKENS_PER_SECOND
            heappush(self._ends, (ends_at, request_id, request.output_tokens))

    def _end_until(self, time: float) -> None:
        """End the requests whose output is generated by then; in a trace without times, all before the next one."""
        while self._uses is not None and self._ends and self._ends[0][0] <= time:
            _, ended, output_tokens = heappop(self._ends)
            self._uses.end(ended, output_tokens)

    def _place(self, keys: Sequence[OffloadKey]) -> int:
        """Use and place the blocks of a request. Returns how many of them it hits."""
        tier = self._control.cpu
        slots = [tier.directory.get(key) for key in keys]
        hits = slots.index(None) if None in slots else len(slots)
        absent = [key for key, slot in zip(keys, slots, strict=True) if slot is None]
        if self._uses is None:
            tier.touch([slot for slot in reversed(slots) if slot is not None])
        else:
            left_out = set(tier.keys_to_bypass(absent))
            absent = [key for key in absent if key not in left_out]
        room = self._num_blocks - (len(slots) - slots.count(None))
        tier.commit(tier.reserve(absent[:room])[::-1])
        if self._uses is None:  # what was there: to `arc` two uses would be those of two requests
            there = [key for key, slot in zip(keys, slots, strict=True) if slot is not None]
            found = map(tier.directory.get, reversed(there))
            tier.touch([slot for slot in found if slot is not None and tier.table.state[slot] == READY])
        tier.take_changes()
        return hits


def shadow_rates(
    source: RequestSource,
    policy: str | type[EvictionPolicy],
    sizes: Sequence[int],
    progress: Callable[[], None] = lambda: None,
) -> list[float]:
    """The hit rate of the policy in a tier of each size."""
    tiers, chain = [PolicyReplay(size, policy) for size in sizes], KeyChain()
    for number, request in enumerate(source.requests()):
        whole = min(request.prompt_blocks, request.prompt_tokens // source.block_tokens)
        keys = group_keys(chain.digests(request)[:whole], 0)
        for tier in tiers:
            tier.use(RequestId(str(number)), request, keys)
        progress()
    return [tier.hit_rate for tier in tiers]


def shadow_sizes(num_blocks: int) -> list[int]:
    """Half, one, two and four times a size, in blocks."""
    return [max(1, num_blocks // 2), num_blocks, 2 * num_blocks, 4 * num_blocks]
