"""Segments: a radix tree of prompts whose nodes are runs of blocks, in flat arrays by segment id.

A segment is a run of blocks that one request created; it is split where a later prompt leaves it. It is found by
the fingerprint of its first key: keys are chained hashes, so one key names everything before it. Segments none of
whose blocks is in the tier are ghosts: kept for their life tables until as many blocks as `ghost_blocks_max` became
ghosts after them, or their id is needed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvtier.policy.reuse.prediction.classes import LEFT, OUTPUT_LEVELS, USES_MAX, class_of
from kvtier.policy.slot_lists import SlotLists
from kvtier.types.arrays import IntArray
from kvtier.types.keys import OffloadKey

FloatArray = npt.NDArray[np.float64]

NONE = -1
PRINT_BITS = 16
"""Bits of each of the last two keys of a segment: one wrong guess in 65,536 prompts that leave one before its end."""
PRINT_MASK = (1 << PRINT_BITS) - 1


class Segments:
    """Arrays by segment id. `length[s] == 0` marks an id that is free; `stamp` differs for each segment that had an id.

    `held` counts its blocks in the tier, `kids` its children that hold some. `uses`, `touched` and `kind` describe its
    last use: how many there were, when, and its class. `counts[s]` marks the lives that are counted: segments of one
    class that are used together, each below the other, come back together, and count as one.
    """

    def __init__(self, capacity: int, ghost_blocks_max: int) -> None:
        self.capacity = capacity
        self.parent = array("i", [NONE]) * capacity
        self.first = array("i", [0]) * capacity
        self.length = array("i", [0]) * capacity
        self.held = array("i", [0]) * capacity
        self.kids = array("i", [0]) * capacity
        self.uses = bytearray(capacity)
        self.counts = bytearray(capacity)
        self.kind = array("H", [0]) * capacity
        self.touched = array("d", [0.0]) * capacity
        self.head = array("Q", [0]) * capacity
        self.ends = array("I", [0]) * capacity
        self.stamp = array("I", [0]) * capacity
        self.used = 0
        self._stamps = 0
        self.ghost_blocks = 0
        self.ghost_blocks_max = ghost_blocks_max
        self.ghosts = SlotLists(capacity, 1)
        self._bucket_next = array("i", [NONE]) * capacity
        self._buckets = array("i", [NONE]) * max(1, capacity)
        self._free = NONE

    def lives(self, now: float) -> tuple[IntArray, FloatArray]:
        """The classes and ages of the segments whose lives count, in the order of their ids."""
        lengths = np.frombuffer(self.length, np.int32, self.used)
        used = np.flatnonzero((lengths > 0) & (np.frombuffer(self.counts, np.uint8, self.used) > 0))
        kinds = np.frombuffer(self.kind, np.uint16, self.used)[used].astype(np.int64)
        return kinds, now - np.frombuffer(self.touched, np.float64, self.used)[used]

    # -- uses ----------------------------------------------------------------------------------------------------

    def use(
        self, path: Sequence[int], level: int, now: float, count_ended: Callable[[Segments, int, float], None]
    ) -> float:
        """Use these segments, from the root on. Returns the gap since the last use of the deepest, -1 if there is none.

        `level`: that of the new blocks of the request. `count_ended` is called for each life that ends here.
        """
        touched, uses, kind, counts = self.touched, self.uses, self.kind, self.counts
        gap, above, last = -1.0, NONE, NONE
        for seg in path:
            gap = now - touched[seg]
            count_ended(self, seg, gap)
            count = uses[seg]
            if count < USES_MAX:
                count = uses[seg] = count + 1
            found = kind[seg] = class_of(count, gap, level)
            touched[seg] = now
            counts[seg] = 1
            if found == last:
                counts[above] = 0
            above, last = seg, found
        return gap

    def set_output(self, path: Sequence[int], time: float, level: int) -> list[int]:
        """Set the level of output of the request that used these segments then; returns those that changed."""
        changed = list[int]()
        for seg in path:
            if self.touched[seg] == time and not self.kind[seg] % OUTPUT_LEVELS:
                self.kind[seg] += level
                changed.append(seg)
        return changed

    # -- by fingerprint ------------------------------------------------------------------------------------------

    def find(self, key: OffloadKey) -> int:
        """The segment that begins with this key, or NONE."""
        head, heads, after = xxh3_64_intdigest(key), self.head, self._bucket_next
        seg = self._buckets[head % self.capacity]
        while seg != NONE and heads[seg] != head:
            seg = after[seg]
        return seg

    def agreed(self, seg: int, keys: Sequence[OffloadKey], position: int) -> int:
        """Number of blocks of a segment that a prompt has whose key at this position is the segment's first.

        By the last two keys of the segment: all, all but the last one, or 1 where the prompt left it before those.
        """
        length, ends, last = self.length[seg], self.ends[seg], position + self.length[seg] - 1
        if last < len(keys) and ends & PRINT_MASK == xxh3_64_intdigest(keys[last]) & PRINT_MASK:
            return length
        if length > 2 and last <= len(keys) and ends >> PRINT_BITS == xxh3_64_intdigest(keys[last - 1]) & PRINT_MASK:
            return length - 1
        return 1

    # -- ids -----------------------------------------------------------------------------------------------------

    def add(self, parent: int, first: int, keys: Sequence[OffloadKey]) -> int:
        """A new segment for these keys, a ghost until it holds a block. NONE if every id holds blocks."""
        seg = self._take()
        if seg == NONE:
            return NONE
        self.parent[seg] = parent
        self.first[seg] = first
        self.length[seg] = len(keys)
        self.held[seg] = self.kids[seg] = self.uses[seg] = 0
        self.ends[seg] = _ends_of(keys)
        self._link(seg, xxh3_64_intdigest(keys[0]))
        self.bury(seg)
        return seg

    def split_front(self, seg: int, keys: Sequence[OffloadKey], rest: OffloadKey) -> int:
        """Give the front of a segment, the blocks of `keys`, an id of its own; `rest` is the first key left to it.

        The front holds nothing yet, and its life goes on as that of the whole. The rest is of the class `LEFT` from
        here on. NONE if every id holds blocks; then nothing has changed.
        """
        front = self._take()
        if front == NONE:
            return NONE
        self._unlink(seg)
        self.parent[front], self.parent[seg] = self.parent[seg], front
        self.first[front] = self.first[seg]
        self.length[front] = len(keys)
        self.held[front] = self.kids[front] = 0
        self.uses[front], self.touched[front] = self.uses[seg], self.touched[seg]
        self.kind[front] = self.kind[seg]
        self.counts[front], self.kind[seg] = self.counts[seg], LEFT
        self.ends[front] = _ends_of(keys)
        self._link(front, self.head[seg])
        self.first[seg] += len(keys)
        self.length[seg] -= len(keys)
        self._link(seg, xxh3_64_intdigest(rest))
        return front

    def cut(self, seg: int, keys: Sequence[OffloadKey]) -> None:
        """Shorten a segment to these keys, its front. The other blocks are in no segment any more."""
        self._stamp(seg)
        if self._is_ghost(seg):
            self.ghost_blocks -= self.length[seg] - len(keys)
        self.length[seg] = len(keys)
        self.ends[seg] = _ends_of(keys)

    def extend(self, seg: int, position: int, touched: float, keys: Sequence[OffloadKey]) -> bool:
        """Add keys behind the last one of a segment, at this position.

        False, and nothing changes, unless it ends there and only the request that made it then has used it.
        """
        length = self.length[seg]
        if (
            self.first[seg] + length != position
            or self.touched[seg] != touched
            or self.uses[seg] != 1
            or self.kids[seg]
        ):
            return False
        if not self.held[seg] and self._is_ghost(seg):
            self.ghost_blocks += len(keys)
        self.length[seg] = length + len(keys)
        self.ends[seg] = _ends_of(keys, self.ends[seg])
        return True

    def is_parent(self, parent: int, seg: int) -> bool:
        """True if a segment hangs on this one: the id may have been another's when that was noted."""
        length = self.length[parent]
        return length > 0 and self.first[parent] + length == self.first[seg]

    def bury(self, seg: int) -> None:
        """A segment without blocks in the tier becomes the newest ghost."""
        self.ghosts.append(0, (seg,))
        self.ghost_blocks += self.length[seg]

    def revive(self, seg: int) -> None:
        """A ghost holds blocks again."""
        if self._is_ghost(seg):
            self.ghosts.unlink((seg,))
            self.ghost_blocks -= self.length[seg]

    def oldest_ghost(self) -> int:
        """The ghost to drop next, or NONE. A ghost above a segment that holds blocks becomes the newest instead."""
        for seg in self.ghosts.from_coldest(0):
            if not self.kids[seg]:
                return seg
        return NONE

    def drop(self, seg: int) -> None:
        """Forget a ghost."""
        self.revive(seg)
        self._unlink(seg)
        self.length[seg] = 0
        self.parent[seg] = self._free
        self._free = seg

    def is_full(self) -> bool:
        """True if there is no id for a new segment, and no ghost to drop for one."""
        return self._free == NONE and self.used == self.capacity and self.oldest_ghost() == NONE

    def _take(self) -> int:
        if self._free == NONE and self.used < self.capacity:
            seg = self.used
            self.used += 1
        else:
            seg = self._free
            if seg == NONE:
                return NONE
            self._free = self.parent[seg]
        self._stamp(seg)
        return seg

    def _stamp(self, seg: int) -> None:
        self._stamps = self.stamp[seg] = (self._stamps + 1) & 0xFFFFFFFF

    def _is_ghost(self, seg: int) -> bool:
        return self.ghosts.next[seg] >= 0

    def _link(self, seg: int, head: int) -> None:
        bucket = head % self.capacity
        self.head[seg] = head
        self._bucket_next[seg] = self._buckets[bucket]
        self._buckets[bucket] = seg

    def _unlink(self, seg: int) -> None:
        bucket, after = self.head[seg] % self.capacity, self._bucket_next
        if self._buckets[bucket] == seg:
            self._buckets[bucket] = after[seg]
            return
        before = self._buckets[bucket]
        while after[before] != seg:
            before = after[before]
        after[before] = after[seg]


def _ends_of(keys: Sequence[OffloadKey], before: int = 0) -> int:
    """Fingerprints of the last two of these keys, which follow what ended with `before`; the last in the low bits."""
    last = xxh3_64_intdigest(keys[-1]) & PRINT_MASK
    second = xxh3_64_intdigest(keys[-2]) if len(keys) > 1 else before
    return (second & PRINT_MASK) << PRINT_BITS | last
