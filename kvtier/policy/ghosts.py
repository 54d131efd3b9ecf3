"""Ghosts: the keys of evicted slots, remembered in order without keeping the keys.

A key is remembered by its 64-bit fingerprint in a hash table made of flat arrays: 25 bytes a ghost, where a dict of
keys needs about 170. Two keys of one fingerprint would count as one: a wrong guess of a policy about recency,
once in about 2^64 / capacity lookups, and never a wrong block.
"""

from __future__ import annotations

from array import array

from xxhash import xxh3_64_intdigest

from kvtier.policy.slot_lists import SlotLists
from kvtier.types.keys import OffloadKey

NONE = -1


class GhostLists:
    """Several lists of ghosts, each from oldest to newest, that share room for `capacity` ghosts.

    Free ghosts are chained through `_bucket_next`. Everything is allocated at once, so the memory does not depend on
    what happens later.
    """

    __slots__ = ("_bucket_next", "_buckets", "_fingerprints", "_free", "_list", "_order", "sizes")

    def __init__(self, capacity: int, num_lists: int) -> None:
        self._fingerprints = array("Q", [0]) * capacity
        self._buckets = array("i", [NONE]) * max(1, capacity)
        self._bucket_next = array("i", [NONE]) * capacity
        for free in range(capacity):
            self._bucket_next[free] = free + 1
        self._list = bytearray(capacity)
        self._order = SlotLists(capacity, num_lists)
        self._free = 0
        self.sizes = [0] * num_lists

    def pop(self, key: OffloadKey) -> int:
        """Forget a key. Returns the list it was in, or NONE if it was not remembered."""
        fingerprint = xxh3_64_intdigest(key)
        ghost = self._buckets[fingerprint % len(self._buckets)]
        while ghost != NONE and self._fingerprints[ghost] != fingerprint:
            ghost = self._bucket_next[ghost]
        return NONE if ghost == NONE else self._drop(ghost)

    def push(self, which: int, key: OffloadKey) -> None:
        """Remember a key as the newest of a list. There must be room: `sum(sizes) < capacity`."""
        ghost = self._free
        self._free = self._bucket_next[ghost]
        fingerprint = xxh3_64_intdigest(key)
        self._fingerprints[ghost] = fingerprint
        bucket = fingerprint % len(self._buckets)
        self._bucket_next[ghost] = self._buckets[bucket]
        self._buckets[bucket] = ghost
        self._list[ghost] = which
        self._order.append(which, (ghost,))
        self.sizes[which] += 1

    def pop_oldest(self, which: int) -> None:
        """Forget the oldest ghost of a list that is not empty."""
        self._drop(next(self._order.from_coldest(which)))

    def _drop(self, ghost: int) -> int:
        self._order.unlink((ghost,))
        bucket = self._fingerprints[ghost] % len(self._buckets)
        following = self._bucket_next[ghost]
        if self._buckets[bucket] == ghost:
            self._buckets[bucket] = following
        else:
            before = self._buckets[bucket]
            while self._bucket_next[before] != ghost:
                before = self._bucket_next[before]
            self._bucket_next[before] = following
        self._bucket_next[ghost] = self._free
        self._free = ghost
        which = self._list[ghost]
        self.sizes[which] -= 1
        return which
