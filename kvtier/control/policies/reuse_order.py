"""The order in which `reuse` evicts: the leaves of the prefix tree, the lowest index first, then the oldest use.

The lowest leaves are put into a heap at once, by one pass over flat arrays, whenever the heap has run out; a segment
that falls below the highest of them meanwhile is added to it. Entries are checked as they are taken: one that was used
since is left out, one whose index has risen as it aged goes back.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Generator
from heapq import heappop, heappush

import numpy as np

from kvtier.control.policies.order_choice import OrderChoice
from kvtier.control.policies.prediction.classes import NUM_BUCKETS, bucket_of
from kvtier.control.policies.prediction.model import BOUNDS, ReuseModel
from kvtier.control.policies.prediction.segments import NONE, Segments

FRACTION = 16

AT_LEAST = 1
AT_MOST = 64
AT_MOST_FRACTION = 8
NOTHING = (-1.0, 0.0)


class EvictionOrder:
    """Leaves of one tier from the least worth on. `take` removes the entry; who leaves it a leaf offers it again."""

    def __init__(self, num_slots: int, segments: Segments, model: ReuseModel) -> None:
        self.choice = OrderChoice(num_slots, segments, model)
        self._segments = segments
        self._model = model
        self._heap: list[tuple[float, float, int]] = []
        self._limit = NOTHING

    def value(self, seg: int) -> float:
        """The segment's index now. All are worth the same in LRU's order, which is that of their last use."""
        if not self.choice.learned:
            return 0.0
        bucket = bucket_of(self._model.now - self._segments.touched[seg])
        return self._model.tables.index[self._segments.kind[seg] * NUM_BUCKETS + bucket]

    def asked(self, blocks: int, missed: int) -> None:
        """A request asked for so many blocks; the tier lacks some of them. The order may change."""
        if self.choice.asked(blocks, missed):
            self._heap, self._limit = [], NOTHING

    def offer(self, seg: int) -> None:
        """This segment is a leaf that holds blocks; it counts if it belongs below the end of the heap."""
        entry = (self.value(seg), self._segments.touched[seg], seg)
        if entry[:2] <= self._limit:
            heappush(self._heap, entry)
            if len(self._heap) > max(AT_MOST, self._segments.used // AT_MOST_FRACTION):
                self._heap, self._limit = [], NOTHING

    def take(self, skip: Collection[int], passed: set[int]) -> int:
        """The leaf of the lowest index that is not in `skip`, or NONE. What was skipped is added to `passed`."""
        segments, heap = self._segments, self._heap
        touched, held, kids = segments.touched, segments.held, segments.kids
        refills = 0
        while True:
            if not heap:
                if refills == 2:
                    return NONE
                self._refill(everything=refills > 0)
                heap, refills = self._heap, refills + 1
                continue
            value, since, seg = heappop(heap)
            if since != touched[seg] or not held[seg] or kids[seg]:
                continue
            if seg in skip:
                passed.add(seg)
                continue
            now = self.value(seg)
            if now > value:
                if (now, since) > self._limit and refills < 2:
                    continue
                if heap and now > heap[0][0]:
                    heappush(heap, (now, since, seg))
                    continue
            return seg

    def upcoming(self, skip: Collection[int]) -> Generator[tuple[float, int], None, None]:
        """(index, segment) in the order in which whole segments would go now. Changes nothing once it is closed."""
        segments, taken, seen = self._segments, set[int](), set(skip)
        kids: dict[int, int] = {}
        entered: list[tuple[float, float, int]] = []
        try:
            while True:
                seg = self.take(seen, taken)
                if seg != NONE:
                    taken.add(seg)
                    seen.add(seg)
                    heappush(entered, (self.value(seg), segments.touched[seg], seg))
                if not entered:
                    return
                value, _, seg = heappop(entered)
                yield value, seg
                parent = segments.parent[seg]
                if parent != NONE and segments.held[parent]:
                    left = kids[parent] = kids.get(parent, segments.kids[parent]) - 1
                    if not left and parent not in skip:
                        heappush(entered, (self.value(parent), segments.touched[parent], parent))
        finally:
            for seg in sorted(taken):
                self.offer(seg)

    def _refill(self, everything: bool) -> None:
        segments, used = self._segments, self._segments.used
        if not used:
            return
        held = np.frombuffer(segments.held, np.int32, used)
        kids = np.frombuffer(segments.kids, np.int32, used)
        leaves = np.flatnonzero((held > 0) & (kids == 0))
        touched = np.frombuffer(segments.touched, np.float64, used)[leaves]
        values = np.zeros(len(leaves))
        if self.choice.learned:
            kinds = np.frombuffer(segments.kind, np.uint16, used)[leaves].astype(np.int64)
            buckets = np.searchsorted(BOUNDS, self._model.now - touched, "right")
            values = self._model.tables.values[kinds, buckets]
        order = np.lexsort((touched, values))
        wanted = max(AT_LEAST, len(leaves) // FRACTION)
        if len(order):
            last = order[min(wanted, len(order)) - 1]
            self._limit = (float(values[last]), float(touched[last]))
        if not everything:
            order = order[:wanted]
        self._heap = list(zip(values[order].tolist(), touched[order].tolist(), leaves[order].tolist(), strict=True))

    def coldest_first(self) -> list[int]:
        """All segments that hold blocks in the order they would go if nothing changed."""
        segments = self._segments
        kids = array("i", segments.kids)
        heap = [
            (self.value(s), segments.touched[s], s) for s in range(segments.used) if segments.held[s] and not kids[s]
        ]
        heap.sort()
        order: list[int] = []
        while heap:
            seg = heappop(heap)[2]
            order.append(seg)
            parent = segments.parent[seg]
            if parent != NONE and segments.held[parent]:
                kids[parent] -= 1
                if not kids[parent]:
                    heappush(heap, (self.value(parent), segments.touched[parent], parent))
        return order
