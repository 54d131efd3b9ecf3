"""The exact miss-ratio curve of LRU from one walk over a trace, for all sizes at once.

Blocks that were always used together form a *segment*: a run of one request's ids, split where a later prompt parts.
Every use of a segment takes the next place in the order of recency, the leaf's before its parent's, so that no parent
ages before its child. A Fenwick tree over the places holds the blocks of each. The stack distance of a block is the
number of blocks in more recent places, and of its own segment up to it: a tier of that many blocks or more holds it.

A request is atomic: it hits its longest prefix of held blocks, then all its blocks are used. Only whole blocks of the
prompt are counted as used; the last one, if it is partial, is never stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtier.traces.requests import Request, RequestSource, common_prefix
from kvtier.types.arrays import IntArray

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
