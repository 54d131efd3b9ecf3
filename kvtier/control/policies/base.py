"""The contract of eviction policies: order only, no bytes and no keys of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from kvtier.types.keys import OffloadKey


class EvictionPolicy(ABC):
    """Decides which ready slot goes first. Works on slot numbers in batches; knows no state, no time, no randomness.

    `keys[slot]` is the tier's own list: valid for a slot from `insert` until after `evict` or `remove` returned.
    Slots are given in access order, the leaf of a request before its root, so a parent never ages before its children.
    """

    @abstractmethod
    def __init__(self, num_slots: int, keys: Sequence[OffloadKey | None]) -> None: ...

    @abstractmethod
    def admit(self, keys: Sequence[OffloadKey]) -> None:
        """These keys missed and are about to be placed, in access order. Called before `evict` makes room for them."""

    @abstractmethod
    def insert(self, slots: Sequence[int]) -> None:
        """These slots became ready; the last one is the most recent."""

    @abstractmethod
    def touch(self, slots: Sequence[int]) -> None:
        """These ready slots were used; the last one is the most recent."""

    @abstractmethod
    def renew(self, slots: Sequence[int]) -> None:
        """These ready slots are the most recent after all, the last one most of all; this is no use of them."""

    @abstractmethod
    def remove(self, slots: Sequence[int]) -> None:
        """These slots' content is gone for good (corrupt, reset): nothing about it is remembered."""

    @abstractmethod
    def forget(self, slots: Sequence[int]) -> None:
        """These slots were evicted by the tier's own choice along `coldest`, as if `evict` had chosen them."""

    @abstractmethod
    def evict(self, count: int, pins: Sequence[int]) -> list[int] | None:
        """Choose and forget exactly `count` slots with `pins[slot] == 0`, or change nothing and return None."""

    @abstractmethod
    def coldest(self) -> Iterator[int]:
        """Ready slots from the coldest on, without changing anything; the policy must not change while it runs."""
