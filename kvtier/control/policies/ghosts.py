"""Ghosts: the keys of evicted slots, remembered in order without keeping the keys.

A key is remembered by its 64-bit fingerprint in a hash table made of flat arrays: 25 bytes a ghost, where a dict of
keys would take about 170. Two keys of one fingerprint would count as one: a wrong guess of a policy about recency,
once in about 2^64 / capacity lookups, and never a wrong block.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from xxhash import xxh3_64_intdigest

from kvtier.types.keys import OffloadKey

NONE = -1


class GhostLists:
    """Several lists of ghosts, each from oldest to newest, that share room for `capacity` ghosts.

    List i is closed into a ring by its sentinel `capacity + i`; free ghosts are chained through `_next`. Everything is
    allocated at once, so the memory does not depend on what happens later.
    """

    __slots__ = (
        "_bucket_next",
        "_buckets",
        "_capacity",
        "_fingerprints",
        "_free",
        "_list",
        "_next",
        "_num_buckets",
        "_prev",
        "sizes",
    )

    def __init__(self, capacity: int, num_lists: int) -> None:
        self._capacity = capacity
        self._fingerprints = array("Q", [0]) * capacity
        self._num_buckets = max(1, capacity)
        self._buckets = array("i", [NONE]) * self._num_buckets
        self._bucket_next = array("i", [NONE]) * capacity
        self._list = bytearray(capacity)
        self._prev = array("i", [NONE]) * (capacity + num_lists)
        self._next = array("i", [NONE]) * (capacity + num_lists)
        for free in range(capacity):
            self._next[free] = free + 1
        for end in range(capacity, capacity + num_lists):
            self._next[end] = self._prev[end] = end
        self._free = 0
        self.sizes = [0] * num_lists

    def pop(self, key: OffloadKey) -> int:
        """Forget a key. Returns the list it was in, or NONE if it was not remembered."""
        fingerprint = xxh3_64_intdigest(key)
        ghost = self._buckets[fingerprint % self._num_buckets]
        while ghost != NONE and self._fingerprints[ghost] != fingerprint:
            ghost = self._bucket_next[ghost]
        return NONE if ghost == NONE else self._drop(ghost)

    def push(self, which: int, key: OffloadKey) -> None:
        """Remember a key as the newest of a list. There must be room: `sum(sizes) < capacity`."""
        ghost = self._free
        self._free = self._next[ghost]
        fingerprint = xxh3_64_intdigest(key)
        self._fingerprints[ghost] = fingerprint
        bucket = fingerprint % self._num_buckets
        self._bucket_next[ghost] = self._buckets[bucket]
        self._buckets[bucket] = ghost
        self._list[ghost] = which
        end = self._capacity + which
        newest = self._prev[end]
        self._next[newest] = self._prev[end] = ghost
        self._prev[ghost] = newest
        self._next[ghost] = end
        self.sizes[which] += 1

    def pop_oldest(self, which: int) -> None:
        """Forget the oldest ghost of a list that is not empty."""
        self._drop(self._next[self._capacity + which])

    def fingerprints(self, which: int) -> Iterator[int]:
        """The fingerprints of a list's ghosts, the oldest first."""
        end = self._capacity + which
        ghost = self._next[end]
        while ghost != end:
            yield self._fingerprints[ghost]
            ghost = self._next[ghost]

    def _drop(self, ghost: int) -> int:
        older, newer = self._prev[ghost], self._next[ghost]
        self._next[older] = newer
        self._prev[newer] = older
        bucket = self._fingerprints[ghost] % self._num_buckets
        following = self._bucket_next[ghost]
        if self._buckets[bucket] == ghost:
            self._buckets[bucket] = following
        else:
            before = self._buckets[bucket]
            while self._bucket_next[before] != ghost:
                before = self._bucket_next[before]
            self._bucket_next[before] = following
        self._next[ghost] = self._free
        self._free = ghost
        which = self._list[ghost]
        self.sizes[which] -= 1
        return which
