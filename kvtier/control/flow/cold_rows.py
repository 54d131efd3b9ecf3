"""Rows that an `on_evict` tier with a write budget is sent, or not: decided as the CPU tier is about to evict them.

Until then each row that the tier lacks is dirty. A row that is chosen takes those before it in its prompt along, which
are warmer: no block is below without them, and no part of the budget is kept for what is sent hours later.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.control.flow.dirty_rows import DirtyRows
from kvtier.control.flow.refused_rows import RefusedRows
from kvtier.control.state import ControlState, LowerTier
from kvtier.types.jobs import SkipReason
from kvtier.types.keys import OffloadKey


class ColdRows:
    """Chooses among the coldest dirty rows for tiers that do (`LowerTier.chooses`)."""

    def __init__(self, control: ControlState, dirty: DirtyRows, refused: RefusedRows) -> None:
        self._cpu = control.cpu
        self._dirty = dirty
        self._refused = refused

    def offered(self, lower: LowerTier, rows: Sequence[int], used_again: bool) -> None:
        """The tier lacks the blocks of these rows, which were filled or used."""
        admission, keys = lower.admission, self._cpu.table.keys
        assert admission is not None
        self._dirty.mark(rows, lower.bit)
        if not used_again:
            for row in rows:
                admission.offered(keys[row])  # type: ignore[arg-type]
            lower.counters.computed_again = admission.computed_again

    def choose(self, lower: LowerTier, count: int, now: float, warmest_first: bool = False) -> None:
        """Decide about the `count` coldest rows that nothing was decided about: queue them, or make them clean."""
        dirty, due, bit = self._dirty, self._dirty.due, lower.bit
        rows = dirty.coldest(count + len(lower.queue), bit) if count > 0 else []
        rows = [row for row in rows if not due[row] & bit][:count]
        chosen: dict[int, None] = {}
        for row in reversed(rows) if warmest_first else rows:
            if not due[row] & bit and not self._choose(lower, row, chosen, now):
                dirty.clean((row,), bit)
        if warmest_first:
            order = [row for row in rows if row in chosen]
            chosen = dict.fromkeys([*order, *chosen])
        self.queue(lower, list(chosen))

    def queue(self, lower: LowerTier, rows: Sequence[int]) -> None:
        """These rows, given leaf before root, are to be sent now."""
        generations = self._cpu.table.generation
        self._dirty.mark_due(rows, lower.bit)
        lower.queue.extend((row, generations[row]) for row in rows[:: lower.queue_step])

    def with_parents(self, lower: LowerTier, row: int, now: float) -> list[int]:
        """This row, and those before it in its prompt that the tier lacks and that are in rows."""
        key, admission = self._cpu.table.keys[row], lower.admission
        assert key is not None
        assert admission is not None
        rows = [row]
        for parent in admission.parents(key):
            found = self._cpu.ready(parent)
            if found is None or self._on_its_way(lower, parent, now):
                break
            rows.append(found)
        return rows

    def _choose(self, lower: LowerTier, row: int, chosen: dict[int, None], now: float) -> bool:
        """True if the row is sent, or need not be; it and those before it are added to the `chosen` ones then."""
        key, admission = self._cpu.table.keys[row], lower.admission
        assert key is not None
        assert admission is not None
        if not lower.index.needs(key, now):
            lower.counters.skip(SkipReason.ALREADY_THERE)
            return False
        if lower.owned is not None and lower.follows and self._refused.bypassed(lower.owned, (key,)):
            self._refused.add(lower, row, SkipReason.BYPASSED)
            return False
        keys = admission.evicting(
            key,
            lambda other: self._on_its_way(lower, other, now),
            lambda other: self._cpu.ready(other) is None,
        )
        reason = SkipReason.NOT_ADMITTED
        if keys and lower.owned is not None and lower.follows:
            unwanted = dict.fromkeys(self._refused.bypassed(lower.owned, keys))
            admission.given_up(list(unwanted))
            keys = [other for other in keys if other not in unwanted]
            if key in unwanted:
                reason = SkipReason.BYPASSED
        rows = list(map(self._cpu.directory.__getitem__, keys))
        self._dirty.mark_due(rows, lower.bit)
        chosen.update(dict.fromkeys(rows))
        if row not in chosen:
            self._refused.add(lower, row, reason)
        return row in chosen

    def _on_its_way(self, lower: LowerTier, key: OffloadKey, now: float) -> bool:
        """True if the tier has this block or is being sent it, as far as that is known: of a shared tier it is not for
        long, but a clean row that it did not refuse was sent to it or came from there."""
        if not lower.index.needs(key, now):
            return True
        row, dirty, bit = self._cpu.ready(key), self._dirty, lower.bit
        if row is None:
            return False
        if (dirty.due[row] | dirty.sending[row]) & bit:
            return True
        clean = not dirty.bits[row] & bit and not self._refused.refused(lower, row)
        return clean and lower.index.presence(key, now) is None
