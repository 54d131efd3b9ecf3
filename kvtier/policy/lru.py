"""Least recently used: the textbook list, eight bytes a slot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtier.policy.base import EvictionPolicy
from kvtier.policy.slot_lists import SlotLists
from kvtier.types.keys import OffloadKey


class LRU(EvictionPolicy):
    """Evicts the slot whose last insert or touch is longest ago."""

    __slots__ = ("_lists",)

    def __init__(self, num_slots: int, keys: Sequence[OffloadKey | None]) -> None:
        self._lists = SlotLists(num_slots, 1)

    def admit(self, keys: Sequence[OffloadKey]) -> None:
        pass

    def insert(self, slots: Sequence[int]) -> None:
        self._lists.append(0, slots)

    def touch(self, slots: Sequence[int]) -> None:
        self._lists.move_to_end(0, slots)

    def renew(self, slots: Sequence[int]) -> None:
        self._lists.move_to_end(0, slots)

    def remove(self, slots: Sequence[int]) -> None:
        self._lists.unlink(slots)

    def forget(self, slots: Sequence[int]) -> None:
        self._lists.unlink(slots)

    def evict(self, count: int, pins: Sequence[int]) -> list[int] | None:
        return self._lists.take(0, count, pins)

    def coldest(self) -> Iterator[int]:
        return self._lists.from_coldest(0)
