"""The order in which `reuse` evicts: the leaves of the prefix tree, the lowest index first, then the oldest use.

The lowest leaves are put into a heap at once, by one pass over flat arrays, whenever the heap has run out; a segment
that falls below the highest of them meanwhile is added to it. Entries are checked as they are taken: one that was used
since is left out, one whose index has risen as it aged goes back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Generator, Iterator, Sequence, Set
from heapq import heapify, heappop, heappush
from typing import TypeAlias

import numpy as np

from kvtier.policy.reuse.lru_guard import LRUGuard
from kvtier.policy.reuse.prediction.classes import BUCKET_BOUNDS, NUM_BUCKETS
from kvtier.policy.reuse.prediction.model import BOUNDS, ReuseModel
from kvtier.policy.reuse.prediction.segments import NONE, FloatArray
from kvtier.policy.reuse.tree import TierTree
from kvtier.types.arrays import IntArray

FRACTION = 16
AT_LEAST, AT_MOST = 16, 1024
"""The heap is filled with this part of the leaves, within these bounds."""
GROWN = 4
"""Factor by which it may outgrow what it was filled with, or `AT_LEAST`, before it is filled again."""
NOTHING = (-1.0, 0.0)

Entry: TypeAlias = tuple[float, float, int]
"""The index of a segment when it was entered, when it was used last, and which it is."""
NO_ENTRY: Entry = (0.0, 0.0, NONE)


class EvictionOrder:
    """Leaves of one tier from the least worth on. `take` removes the entry; one that stays a leaf is offered again."""

    def __init__(self, num_slots: int, tree: TierTree, model: ReuseModel) -> None:
        segments = tree.segments
        self.guard = LRUGuard(num_slots, segments, model)
        self._tree = tree
        self._segments = segments
        self._model = model
        self._heap: list[Entry] = []
        self._limit = NOTHING
        self._heap_max = 0
        self._held = np.frombuffer(segments.held, np.int32)
        self._kids = np.frombuffer(segments.kids, np.int32)
        self._touched = np.frombuffer(segments.touched, np.float64)
        self._kind = np.frombuffer(segments.kind, np.uint16)

    def value(self, seg: int) -> float:
        """The segment's index now. All are worth the same in LRU's order, which is that of their last use."""
        if not self.guard.follows_model:
            return 0.0
        segments, model = self._segments, self._model
        bucket = bisect_right(BUCKET_BOUNDS, model.now - segments.touched[seg])
        return model.tables.index[segments.kind[seg] * NUM_BUCKETS + bucket]

    def on_request(self, missed: int) -> None:
        """Count a request, and the blocks of it that the tier lacks. The order may change."""
        if self.guard.on_request(missed):
            self._heap, self._limit = [], NOTHING

    def offer(self, seg: int) -> None:
        """Add this segment if it is a leaf that holds blocks and belongs below the end of the heap."""
        segments = self._segments
        if not segments.held[seg] or segments.kids[seg]:
            return
        value, limit = self.value(seg), self._limit
        if value > limit[0]:
            return
        entry = (value, segments.touched[seg], seg)
        if entry[:2] <= limit:
            heappush(self._heap, entry)
            if len(self._heap) > self._heap_max:
                self._heap, self._limit = [], NOTHING

    def take(self, skip: Set[int], aside: list[Entry], pins: Sequence[int] | None = None) -> Entry:
        """The leaf of the lowest index, or NO_ENTRY. Into `aside` go those in `skip` or with a pinned end."""
        segments, deepest, index_of = self._segments, self._tree.deepest, self.value
        touched, held, kids = segments.touched, segments.held, segments.kids
        while self._heap or self._refill(aside):
            heap = self._heap
            entry = heappop(heap)
            value, since, seg = entry
            if since != touched[seg] or not held[seg] or kids[seg]:
                continue
            if seg in skip or (pins is not None and pins[deepest[seg]]):
                aside.append(entry)
                continue
            now = index_of(seg)
            if now > value:
                if (now, since) > self._limit:
                    continue
                if heap and now > heap[0][0]:
                    heappush(heap, (now, since, seg))
                    continue
            return now, since, seg
        return NO_ENTRY

    def give_back(self, aside: list[Entry]) -> None:
        """Give back entries that `take` put aside."""
        for entry in aside:
            heappush(self._heap, entry)

    def lowest(self, skip: Set[int], pins: Sequence[int]) -> Entry:
        """The entry that `take` would return. It stays where it is."""
        if self._heap:
            entry, segments = self._heap[0], self._segments
            value, since, seg = entry
            is_leaf = since == segments.touched[seg] and segments.held[seg] and not segments.kids[seg]
            if is_leaf and seg not in skip and not pins[self._tree.deepest[seg]] and self.value(seg) == value:
                return entry
        aside: list[Entry] = []
        entry = self.take(skip, aside, pins)
        if entry is not NO_ENTRY:
            aside.append(entry)
        self.give_back(aside)
        return entry

    def is_first(self, entry: Entry) -> bool:
        """True if this one, of which the index is that of now, is before all others."""
        return self._heap[0] == entry

    def upcoming(self, skip: Set[int], pins: Sequence[int]) -> Generator[tuple[float, int], None, None]:
        """(index, segment) in the order in which whole segments would go now. Changes nothing once it is closed."""
        segments, aside, seen = self._segments, list[Entry](), set(skip)
        kids: dict[int, int] = {}
        entered: list[Entry] = []
        try:
            while True:
                entry = self.take(seen, aside, pins)
                if entry is not NO_ENTRY:
                    aside.append(entry)
                    seen.add(entry[2])
                    heappush(entered, entry)
                if not entered:
                    return
                value, _, seg = heappop(entered)
                yield value, seg
                parent = self._parent_bared(seg, kids)
                if parent != NONE and parent not in skip:
                    heappush(entered, (self.value(parent), segments.touched[parent], parent))
        finally:
            self.give_back(aside)

    def _refill(self, aside: Sequence[Entry]) -> bool:
        """Put the lowest leaves that are not put aside into the heap, a part of them. False if there are none."""
        leaves = self._leaves([seg for _, _, seg in aside])
        if not len(leaves):
            return False
        touched, values = self._touched[leaves], self._values(leaves)
        order = _first(values, touched, min(max(AT_LEAST, len(leaves) // FRACTION), AT_MOST))
        self._heap = list(zip(values[order].tolist(), touched[order].tolist(), leaves[order].tolist(), strict=True))
        self._limit = self._heap[-1][:2]
        self._heap_max = GROWN * max(AT_LEAST, len(self._heap))
        return True

    def _leaves(self, skip: Sequence[int] = ()) -> IntArray:
        used = self._segments.used
        are_leaves = (self._held[:used] > 0) & (self._kids[:used] == 0)
        are_leaves[list(skip)] = False
        return np.flatnonzero(are_leaves)

    def _parent_bared(self, seg: int, kids: dict[int, int]) -> int:
        """The parent that is a leaf once this segment has gone, or NONE. `kids`: how many are left, where some went."""
        segments = self._segments
        parent = segments.parent[seg]
        if parent == NONE or not segments.held[parent]:
            return NONE
        left = kids[parent] = kids.get(parent, segments.kids[parent]) - 1
        return NONE if left else parent

    def _values(self, segs: IntArray) -> FloatArray:
        if not self.guard.follows_model:
            return np.zeros(len(segs))
        buckets = np.searchsorted(BOUNDS, self._model.now - self._touched[segs], "right")
        values: FloatArray = self._model.tables.values[self._kind[segs], buckets]
        return values

    def coldest_first(self) -> Iterator[int]:
        """All segments that hold blocks in the order they would go if nothing changed."""
        segments, leaves = self._segments, self._leaves()
        columns = (self._values(leaves).tolist(), self._touched[leaves].tolist(), leaves.tolist())
        heap: list[Entry] = list(zip(*columns, strict=True))
        heapify(heap)
        kids: dict[int, int] = {}
        while heap:
            seg = heappop(heap)[2]
            yield seg
            parent = self._parent_bared(seg, kids)
            if parent != NONE:
                heappush(heap, (self.value(parent), segments.touched[parent], parent))


def _first(values: FloatArray, touched: FloatArray, count: int) -> IntArray:
    """The indices of the lowest values in order, `count` at most; of equal ones those touched first."""
    some = np.arange(len(values))
    if count < len(some):
        bound = np.partition(values, count - 1)[count - 1]
        below, equal = np.flatnonzero(values < bound), np.flatnonzero(values == bound)
        rest = count - len(below)
        if rest < len(equal):
            equal = equal[np.argpartition(touched[equal], rest)[:rest]]
        some = np.concatenate([below, equal])
    return some[np.lexsort((touched[some], values[some]))]
