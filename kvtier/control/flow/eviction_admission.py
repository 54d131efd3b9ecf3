"""Rows that an `on_evict` tier with a write budget is sent, or not: decided as the CPU tier is about to evict them.

Until then each row that the tier lacks is dirty. Those before it in its prompt are chosen with a row, although they
are warmer: no block is below without them, and no part of the budget is kept for what is sent hours later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from kvtier.control.flow.dirty_rows import DirtyRows
from kvtier.control.flow.rejected_rows import RejectedRows
from kvtier.control.state import ControlState
from kvtier.control.tiers.lower_tier import LowerTier
from kvtier.types.jobs import SkipReason
from kvtier.types.keys import OffloadKey

if TYPE_CHECKING:
    from kvtier.policy.reuse.admission import BudgetedAdmission


class EvictionAdmission:
    """Choice among the coldest dirty rows for tiers with a `late_admission`."""

    def __init__(self, control: ControlState, dirty: DirtyRows, rejected: RejectedRows) -> None:
        self._cpu = control.cpu
        self._dirty = dirty
        self._rejected = rejected

    def on_offer(self, lower: LowerTier, rows: Sequence[int], used_again: bool) -> None:
        """Mark rows that were filled or used, and whose blocks the tier lacks."""
        self._dirty.mark(rows, lower.bit)
        if not used_again:
            admission = _late_admission(lower)
            admission.on_offer(list(map(self._key, rows)))
            lower.counters.computed_again = admission.computed_again

    def choose(self, lower: LowerTier, count: int, now: float, warmest_first: bool = False) -> None:
        """Decide about the `count` coldest rows that are not decided yet: queue them, or make them clean."""
        if count <= 0:
            return
        due, bit = self._dirty.due, lower.bit
        coldest = self._dirty.coldest(count + len(lower.queue), bit)
        rows = [row for row in coldest if not due[row] & bit][:count]
        chosen: deque[int] = deque()
        among: set[int] = set()
        for row in reversed(rows) if warmest_first else rows:
            if due[row] & bit:
                continue
            if front := self._choose(lower, row, now):
                if self._follows_one_of(lower, front[-1], among):
                    chosen.extendleft(reversed(front))  # leaf before root
                else:
                    chosen.extend(front)
                among.update(front)
            if not due[row] & bit:
                self._dirty.clean((row,), bit)
        if warmest_first:
            warm = dict.fromkeys(row for row in rows if due[row] & bit)
            chosen = deque([*warm, *(row for row in chosen if row not in warm)])
        self._queue(lower, list(chosen))

    def write_back(self, lower: LowerTier, row: int, now: float) -> bool:
        """Queue this row, whatever its expected hits, with those before it. False if not all of those are in rows."""
        if self._dirty.due[row] & lower.bit:
            return True
        admission = _late_admission(lower)
        rows = [row]
        for parent in admission.parents(self._key(row)):
            if self._on_its_way(lower, parent, now):
                break
            found = self._cpu.ready(parent)
            if found is None:
                return False
            rows.append(found)
        for found in reversed(rows):
            self._rejected.pop(lower, found)
            admission.admit_parent(self._key(found))
        self._dirty.mark_due(rows, lower.bit)
        self._queue(lower, rows)
        return True

    def _choose(self, lower: LowerTier, row: int, now: float) -> list[int]:
        """Rows that are to be sent because this one is about to be evicted, leaf before root: it and those before
        it, those alone, or none."""
        key, rejected, followed = self._key(row), self._rejected, lower.owned if lower.is_request_aware else None
        if not lower.index.needs(key, now):
            lower.counters.skip(SkipReason.ALREADY_THERE)
            return []
        if followed is not None and rejected.rejected_by_policy(followed, (key,)):
            rejected.add(lower, row, SkipReason.BYPASSED)
            return []
        admission = _late_admission(lower)
        keys = admission.select_evicted(
            key, lambda other: self._on_its_way(lower, other, now), lambda other: self._cpu.ready(other) is None
        )
        reason = SkipReason.NOT_ADMITTED
        if keys and followed is not None and (unwanted := rejected.rejected_by_policy(followed, keys)):
            admission.on_give_up(unwanted)
            reason = SkipReason.BYPASSED if key in unwanted else reason
            keys = [other for other in keys if other not in unwanted]
        rows = list(map(self._cpu.directory.__getitem__, keys))
        if keys and lower.owned is not None and followed is None:
            held = [lower.owned.ready(parent) for parent in admission.parents(keys[-1])]
            lower.owned.reorder([slot for slot in held if slot is not None])
        self._dirty.mark_due(rows, lower.bit)
        if row not in rows:
            rejected.add(lower, row, reason)
        return rows

    def _follows_one_of(self, lower: LowerTier, row: int, rows: Collection[int]) -> bool:
        """True if one of these rows has the block right before that of `row`."""
        parent = next(iter(_late_admission(lower).parents(self._key(row))), None) if rows else None
        return parent is not None and self._cpu.ready(parent) in rows

    def _queue(self, lower: LowerTier, rows: Sequence[int]) -> None:
        """Queue rows, given leaf before root, that are to be sent now."""
        generations = self._cpu.table.generation
        lower.queue.extend((row, generations[row]) for row in rows[:: lower.queue_step])

    def _key(self, row: int) -> OffloadKey:
        key = self._cpu.table.keys[row]
        assert key is not None
        return key

    def _on_its_way(self, lower: LowerTier, key: OffloadKey, now: float) -> bool:
        """True if the tier has this block or is being sent it. Of a shared tier that is not certain for long, but a
        clean row that it did not reject was sent to it or came from there."""
        if not lower.index.needs(key, now):
            return True
        row, dirty, bit = self._cpu.ready(key), self._dirty, lower.bit
        if row is None:
            return False
        if (dirty.due[row] | dirty.sending[row]) & bit:
            return True
        clean = not dirty.bits[row] & bit and not self._rejected.is_rejected(lower, row)
        return clean and lower.index.presence(key, now) is None


def _late_admission(lower: LowerTier) -> BudgetedAdmission:
    assert lower.late_admission is not None
    return lower.late_admission
