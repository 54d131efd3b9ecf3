"""Rows that lower tiers have yet to receive."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from kvtier.control.tiers.owned_tier import OwnedTier
from kvtier.control.tiers.slot_table import READY
from kvtier.errors import IntegrityError

ALL_TIERS = 0xFF


class DirtyRows:
    """For each row the tiers, as `bits`, that lack its block and are to have it. A dirty row has one pin, for all of
    them. `count` is how many rows are dirty.

    `sending` are the tiers that are being sent it, `retried` those that are sent it a second time. `due` are those that
    choose among cold rows and chose this one: it waits in their queue.
    """

    def __init__(self, cpu: OwnedTier) -> None:
        self._cpu = cpu
        self.bits = bytearray(len(cpu.table))
        self.sending = bytearray(len(cpu.table))
        self.retried = bytearray(len(cpu.table))
        self.due = bytearray(len(cpu.table))
        self.count = 0

    def mark(self, rows: Iterable[int], tier: int) -> None:
        """These rows are dirty for this tier."""
        bits, fresh = self.bits, []
        for row in rows:
            if not bits[row]:
                fresh.append(row)
            bits[row] |= tier
        if fresh:
            self._cpu.pin(fresh)
            self.count += len(fresh)

    def mark_due(self, rows: Sequence[int], tier: int) -> None:
        """These rows are dirty for this tier, and were chosen."""
        self.mark(rows, tier)
        for row in rows:
            self.due[row] |= tier

    def clean(self, rows: Iterable[int], tiers: int = ALL_TIERS) -> None:
        """These rows are clean for these tiers: they have their blocks, or the write-back was given up."""
        bits, cleaned = self.bits, []
        for row in rows:
            if bits[row]:
                left = bits[row] & ~tiers
                bits[row] = left
                self.retried[row] &= left
                self.due[row] &= left
                if not left:
                    cleaned.append(row)
        if cleaned:
            self._cpu.unpin(cleaned)
            self.count -= len(cleaned)

    def take(self, queue: deque[tuple[int, int]], tier: int, count: int) -> list[int]:
        """Take from the front of a queue of (row, generation) up to `count` rows that this tier still is to be sent.

        Others are taken out too: they were cleaned, or hold other blocks now.
        """
        state, generations = self._cpu.table.state, self._cpu.table.generation
        bits, sending, due = self.bits, self.sending, self.due
        rows: list[int] = []
        while queue and len(rows) < count:
            row, generation = queue.popleft()
            due[row] &= ~tier
            if bits[row] & tier & ~sending[row] and state[row] == READY and generations[row] == generation:
                rows.append(row)
        return rows

    def coldest(self, count: int, tiers: int, spared: int = 0) -> list[int]:
        """The at most `count` coldest rows, dirty for one of `tiers` and for none of `spared`, without other pins."""
        if count <= 0 or not self.count:
            return []
        pins, bits = self._cpu.table.pins, self.bits
        rows = []
        for row in self._cpu.policy.coldest():
            if bits[row] & tiers and not bits[row] & spared and pins[row] == 1 and not self.sending[row]:
                rows.append(row)
                if len(rows) == count:
                    break
        return rows

    def check(self) -> None:
        """Raise IntegrityError unless each dirty row is counted and has a pin."""
        dirty = [row for row, bits in enumerate(self.bits) if bits]
        if len(dirty) != self.count or not all(self._cpu.table.pins[row] for row in dirty):
            raise IntegrityError(f"{len(dirty)} rows are dirty, counted {self.count}, or some have no pin")
        if any(due & ~bits for due, bits in zip(self.due, self.bits, strict=True)):
            raise IntegrityError("a row is due that is not dirty")
