"""Segmented LRU: slots that were used again are protected from those that were used once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtier.policy.base import EvictionPolicy
from kvtier.policy.slot_lists import SlotLists
from kvtier.types.keys import OffloadKey

ONCE, PROTECTED = 0, 1


class SegmentedLRU(EvictionPolicy):
    """Evicts slots that were used once, then protected ones, each from the least recently used on.

    At most three quarters of the slots are protected. Nine bytes a slot.
    """

    __slots__ = ("_lists", "_num_protected", "_protected", "_protected_max")

    def __init__(self, num_slots: int, keys: Sequence[OffloadKey | None]) -> None:
        self._lists = SlotLists(num_slots, 2)
        self._protected = bytearray(num_slots)
        self._num_protected = 0
        self._protected_max = num_slots * 3 // 4

    def admit(self, keys: Sequence[OffloadKey]) -> None:
        pass  # for policies that remember evicted keys

    def insert(self, slots: Sequence[int]) -> None:
        self._lists.append(ONCE, slots)

    def touch(self, slots: Sequence[int]) -> None:
        self._lists.move_to_end(PROTECTED, slots)
        for slot in slots:
            self._num_protected += not self._protected[slot]
            self._protected[slot] = 1
        while self._num_protected > self._protected_max:
            coldest = next(self._lists.from_coldest(PROTECTED))
            self._lists.move_to_end(ONCE, (coldest,))
            self._unprotect((coldest,))

    def renew(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._lists.move_to_end(self._protected[slot], (slot,))

    def remove(self, slots: Sequence[int]) -> None:
        self._lists.unlink(slots)
        self._unprotect(slots)

    def forget(self, slots: Sequence[int]) -> None:
        self.remove(slots)

    def evict(self, count: int, holds: Sequence[int]) -> list[int] | None:
        chosen: list[int] = []
        slots = self.coldest()
        while len(chosen) < count:
            slot = next(slots, None)
            if slot is None:
                return None
            if not holds[slot]:
                chosen.append(slot)
        self.remove(chosen)
        return chosen

    def coldest(self) -> Iterator[int]:
        yield from self._lists.from_coldest(ONCE)
        yield from self._lists.from_coldest(PROTECTED)

    def _unprotect(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._num_protected -= self._protected[slot]
            self._protected[slot] = 0
