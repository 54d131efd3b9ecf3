"""Rows whose blocks lower tiers rejected so far. They decide again when the block is used."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvtier.control.flow.dirty_rows import DirtyRows
from kvtier.control.state import ControlState
from kvtier.control.tiers.lower_tier import LowerTier
from kvtier.control.tiers.owned_tier import OwnedTier
from kvtier.types.jobs import SkipReason
from kvtier.types.keys import OffloadKey


class RejectedRows:
    """The tiers of each row, as bits, that decide again once its block is used.

    `dirty` has the tiers that a row's block is to be sent to.
    """

    def __init__(self, control: ControlState, dirty: DirtyRows) -> None:
        self._cpu = control.cpu
        self._dirty = dirty
        self._bits = bytearray(control.num_rows)

    def clear(self, rows: Sequence[int]) -> None:
        """Clear rows that hold other blocks than before."""
        for row in rows:
            self._bits[row] = 0

    def add(self, lower: LowerTier, row: int, reason: SkipReason) -> None:
        """Count that a tier is not sent the block of this row, and offer it again."""
        lower.counters.skip(reason)
        self.offer_again(lower, row)

    def offer_again(self, lower: LowerTier, row: int) -> None:
        """Have a tier decide again about the block of this row once it is used."""
        self._bits[row] |= lower.bit

    def on_give_up(self, lower: LowerTier, rows: Sequence[int]) -> None:
        """Take note that a tier is not sent the blocks of these rows, although they were to be."""
        if lower.budgeted is not None:
            lower.budgeted.on_give_up(list(map(self._cpu.table.keys.__getitem__, rows)))  # type: ignore[arg-type]
        if lower.late_admission is not None:
            for row in rows:
                self.offer_again(lower, row)

    def is_rejected(self, lower: LowerTier, row: int) -> bool:
        """True if this tier is to decide again about the block of this row once it is used."""
        return bool(self._bits[row] & lower.bit)

    def pop(self, lower: LowerTier, row: int) -> bool:
        """Remove the row; True if this tier was to decide again."""
        rejected = self.is_rejected(lower, row)
        self._bits[row] &= ~lower.bit
        return rejected

    def rows_to_write(self, lower: LowerTier, row: int, used_again: bool, now: float) -> list[int]:
        """Rows that are to be written if this one is offered to a tier with an admission: none, or it and those
        before it in its prompt that were not admitted, up to the first that was."""
        key, admission, index = self._cpu.table.keys[row], lower.admission, lower.index
        assert key is not None
        assert admission is not None
        rows: list[int] = []
        if admission.admits(key, used_again, lambda other: not index.needs(other, now)):
            rows.append(row)
            for parent in map(self._cpu.ready, admission.parents(key)):
                if parent is None or not self.pop(lower, parent):
                    break
                rows.append(parent)
                if lower.budgeted is not None:
                    lower.budgeted.admit_parent(self._cpu.table.keys[parent])  # type: ignore[arg-type]
        else:
            self.add(lower, row, SkipReason.NOT_ADMITTED)
        lower.counters.computed_again = admission.computed_again
        return rows

    def rejected_by_policy(self, tier: OwnedTier, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Keys, of these given leaf first, that the tier would not keep. It keeps what is retained."""
        retained = self._cpu.retained.keys
        return tier.keys_to_bypass([key for key in reversed(keys) if key not in retained])

    def bypass(self, lower: LowerTier, rows: list[int], unwanted: Collection[OffloadKey]) -> list[int]:
        """Make rows that the tier would not keep clean, to be offered again when used. Returns the other rows."""
        keys = self._cpu.table.keys
        for row in [row for row in rows if keys[row] in unwanted]:
            self.on_give_up(lower, (row,))
            self.add(lower, row, SkipReason.BYPASSED)
            self._dirty.clean((row,), lower.bit)
        return [row for row in rows if keys[row] not in unwanted]

    def over_budget(self, lower: LowerTier, rows: Sequence[int], now: float) -> list[int]:
        """Rows, of these given leaf first, that a tier may not be sent now, as far as writes are limited."""
        budgeted, index, names = lower.budgeted, lower.index, self._cpu.table.keys
        if budgeted is None:
            return []
        keys: list[OffloadKey] = list(map(names.__getitem__, rows))  # type: ignore[arg-type]

        def waits(other: OffloadKey) -> bool:
            row = self._cpu.ready(other)
            if row is None:
                return False
            if lower.late_admission is not None:
                return bool((self._dirty.due[row] | self._dirty.sending[row]) & lower.bit)
            return bool(self._dirty.bits[row] & lower.bit)

        sent = budgeted.affordable(keys, lambda other: not index.needs(other, now), waits)
        return [row for row, key in zip(rows, keys, strict=True) if key not in sent] if len(sent) < len(keys) else []
