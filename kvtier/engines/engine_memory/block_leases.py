"""Blocks that were found and are kept for the loads that follow, each for a bounded time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.control.tiers.tier_index import TierIndex
from kvtier.types.keys import OffloadKey


@dataclass(slots=True, eq=False)
class _Lease:
    key: OffloadKey
    slots: Sequence[int]
    until: float
    ended: bool = False


class BlockLeases:
    """Pins in the slots of one tier: a leased block is not evicted. A shared tier evicts by itself, and has none.

    A lease ends when it is released, or `seconds` after it was taken. There are at most `count_max`: a further one ends
    the oldest.
    """

    def __init__(self, index: TierIndex, seconds: float, count_max: int) -> None:
        self._index = index
        self._seconds = seconds
        self._count_max = count_max
        self._in_order: deque[_Lease] = deque()
        self._of_key: dict[OffloadKey, deque[_Lease]] = {}

    def take(self, key: OffloadKey, now: float) -> None:
        """Keep a block that is here."""
        slots = self._index.slots((key,))
        if not slots:
            return
        self.expire(now)
        while len(self._in_order) >= self._count_max:
            self._end(self._in_order.popleft())
        self._index.pin(slots)
        lease = _Lease(key, slots, now + self._seconds)
        self._in_order.append(lease)
        self._of_key.setdefault(key, deque()).append(lease)

    def release(self, keys: Sequence[OffloadKey]) -> None:
        """End the oldest lease of each of these keys, where there is one."""
        for key in keys:
            if key in self._of_key:
                self._end(self._of_key[key][0])
        while self._in_order and self._in_order[0].ended:
            self._in_order.popleft()

    def release_all(self) -> None:
        """End every lease."""
        for lease in self._in_order:
            self._end(lease)
        self._in_order.clear()

    def expire(self, now: float) -> None:
        """End the leases whose time has passed."""
        while self._in_order and (self._in_order[0].ended or self._in_order[0].until <= now):
            self._end(self._in_order.popleft())

    def _end(self, lease: _Lease) -> None:
        if lease.ended:
            return
        lease.ended = True
        others = self._of_key[lease.key]
        others.remove(lease)
        if not others:
            del self._of_key[lease.key]
        self._index.unpin(lease.slots)
