"""Demotions: write-back of rows to the tiers below, each tier by its own write policy.

The source of every demotion is a CPU row, pinned while it is read. A row is dirty for a lower tier until that tier has
its block or the write-back was given up. A dirty row is pinned. `write_through` tiers are served in the order in which
rows became ready. `on_evict` tiers are served from the coldest row on, when free and clean rows are short.

A job costs more than a block, and an engine stores few blocks in a step. So the rows for a `write_through` tier are
gathered over a few steps. They go once they are enough for a job, once the first has waited for `gather_seconds`, and
at once where rows are short, on `flush` and while closing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from kvtier.control.flow.lower_transfer import LowerTransfer
from kvtier.control.flow.refused_rows import RefusedRows
from kvtier.control.state import CPU_TIER, ControlState, LowerTier
from kvtier.control.tiers.breaker import BreakerState
from kvtier.control.tiers.slot_table import READY
from kvtier.types.jobs import DropReason, JobKind, JobResult, SkipReason
from kvtier.types.keys import OffloadKey

JOB_BLOCKS = 128
GATHER_BLOCKS = 32
"""So many gathered rows go without waiting for more."""


class Demotions:
    """Plans and ends demotions to all lower tiers. In flight and quarantined, a tier holds a quarter of the rows.

    `dirty_rows` counts the rows that are dirty for at least one lower tier. `admits_all`: no tier has an admission.
    """

    def __init__(self, control: ControlState, watermark_rows: int, gather_seconds: float = 0.0) -> None:
        self.control = control
        self.watermark_rows = watermark_rows
        self.closing = False
        self.dirty = bytearray(control.num_rows)
        self.demoting = bytearray(control.num_rows)
        self.retried = bytearray(control.num_rows)
        self._refused = RefusedRows(control, self.dirty)
        self._gather_seconds = gather_seconds
        self._gather_blocks = min(GATHER_BLOCKS, 1 + control.num_rows // 16)
        self.late = 0
        self.dirty_rows = 0
        self.list_tiers()

    def list_tiers(self) -> None:
        """Lower tiers were taken in."""
        self._on_evict_bits = sum(lower.bit for lower in self.control.lowers if lower.on_evict)
        self.admits_all = all(lower.admits_all for lower in self.control.lowers)

    @property
    def in_flight(self) -> int:
        """Rows queued for or in flight to lower tiers, those of late transfers included."""
        return sum(len(lower.queue) + lower.stores_in_flight for lower in self.control.lowers)

    @property
    def backlog(self) -> int:
        """Rows that may still reach lower tiers; those of late transfers were given up for good."""
        return self.in_flight - self.late

    @property
    def cleaning(self) -> bool:
        """True if rows will become free once an `on_evict` tier has them, so that waiting a little is worth it."""
        in_flight = any(lower.on_evict and lower.stores_in_flight for lower in self.control.lowers)
        return in_flight or bool(self._cold_rows(1, self._on_evict_bits))

    # -- rows come and go ----------------------------------------------------------------------------------------

    def row_ready(self, rows: Sequence[int], source: int, now: float) -> None:
        """These rows became ready, filled by a store (`source` 0) or from the lower tier at position `source`.

        In the lower tiers, too, a parent must not age before its children: `rows` are in order, leaf before root, and
        are queued in that order; the other way round for a policy that follows requests, which takes the front first.
        """
        if not self.admits_all:
            self._refused.clear(rows)
        for lower in self.control.lowers:
            if lower.position == source:
                continue
            if lower.store_breaker.state is BreakerState.HELD_BACK:  # as `held_back`, without a call
                lower.counters.drop(DropReason.HELD_BACK, len(rows))
            else:
                self._offer(lower, rows, source != CPU_TIER, now)

    def used(self, rows: Sequence[int], now: float) -> None:
        """What these rows hold was loaded, or stored once more: tiers that did not admit it decide anew.

        Call unless `admits_all`. The order of the rows is as in `row_ready`.
        """
        for lower in self.control.lowers:
            again = [row for row in rows if self._refused.take(lower, row)]  # they may name a row twice
            if again and not lower.held_back:
                self._offer(lower, again, True, now)

    def _offer(self, lower: LowerTier, rows: Sequence[int], used_again: bool, now: float) -> None:
        """Rows become dirty for a tier that admits them and does not have them."""
        table, admission = self.control.cpu.table, lower.admission
        if not lower.queue:
            lower.send_at = now + self._gather_seconds
        for row in rows[:: lower.queue_step]:
            key = table.keys[row]
            assert key is not None
            if not lower.index.needs(key, now):
                lower.counters.skip(SkipReason.ALREADY_THERE)
            elif admission is not None:
                self._mark_admitted(lower, row, used_again, now)
            else:
                self._mark_dirty(row, lower)
                if not lower.on_evict:
                    lower.queue.append((row, table.generation[row]))

    def _mark_admitted(self, lower: LowerTier, row: int, used_again: bool, now: float) -> None:
        generation = self.control.cpu.table.generation
        for taken in self._refused.admitted(lower, row, used_again, now):
            self._mark_dirty(taken, lower)
            if not lower.on_evict:
                lower.queue.append((taken, generation[taken]))

    def joined(self, now: float) -> None:
        """Lower tiers were taken in: what is in rows already is dirty for them, where they need it.

        That are the most recent rows alone, as many as one tier may hold in flight: dirty rows are not free for others.
        """
        self.list_tiers()
        ready = list(self.control.cpu.policy.coldest())
        self.row_ready(ready[-max(1, self.control.num_rows // 4) :], CPU_TIER, now)

    def _mark_dirty(self, row: int, lower: LowerTier) -> None:
        if not self.dirty[row]:
            self.control.cpu.pin((row,))
            self.dirty_rows += 1
        self.dirty[row] |= lower.bit

    def mark_clean(self, row: int, lower: LowerTier | None = None) -> None:
        """The row is clean for this tier (for all): the tier has its block, or the write-back was given up."""
        if self.dirty[row]:
            self.dirty[row] &= ~lower.bit if lower is not None else 0
            self.retried[row] &= self.dirty[row]
            if not self.dirty[row]:
                self.control.cpu.unpin((row,))
                self.dirty_rows -= 1

    def evicted_below(self, lower: LowerTier, keys: Sequence[OffloadKey]) -> None:
        """A tier evicted these keys: rows that have them are dirty again if it is `on_evict`, or offered anew once they
        are used if its policy follows requests. Not while closing: a tier smaller than the rows would never be done."""
        if self.closing or lower.held_back or not (lower.on_evict or lower.follows):
            return
        for row in map(self.control.cpu.ready, keys):
            if row is not None and lower.follows:
                self._refused.offer_again(lower, row)
            elif row is not None:
                self._mark_dirty(row, lower)

    def drop_dirty(self, count: int, patient: bool) -> None:
        """Another request needs rows: make the `count` coldest dirty rows without another pin clean, unwritten.

        While that request is patient, rows that are dirty for an `on_evict` tier are left: their write-back goes on.
        """
        spared = self._on_evict_bits if patient else 0
        for row in self._cold_rows(min(count, self.control.num_rows), 0xFF, spared):
            for lower in self.control.lowers:
                if self.dirty[row] & lower.bit:
                    lower.counters.drop(DropReason.BACKLOG)
            self.mark_clean(row)

    def reset(self) -> None:
        """Forget all that was queued; jobs in flight end on their own."""
        for row in range(len(self.dirty)):
            self.mark_clean(row)
        for lower in self.control.lowers:
            lower.queue.clear()

    def drop_queued(self, reason: DropReason) -> int:
        """Give up every write-back that is not in flight; returns how many blocks that were."""
        count = 0
        for row in range(len(self.dirty)):
            for lower in self.control.lowers:
                if self.dirty[row] & lower.bit & ~self.demoting[row]:
                    lower.counters.drop(reason)
                    self.mark_clean(row, lower)
                    count += 1
        for lower in self.control.lowers:
            lower.queue.clear()
        return count

    # -- planning ------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> None:
        """Emit the demotions that may start now: queued rows, and cold dirty rows where free rows are short."""
        for lower in self.control.lowers:
            allowed = lower.may_store(now)
            if not lower.on_evict and not lower.queue:
                continue
            if not allowed:
                if lower.refusal is not None:
                    self._give_up(lower, lower.refusal)
            elif lower.on_evict:
                needed = self._rows_needed(lower) - lower.stores_in_flight
                self._send_cold(lower, min(needed, self._room(lower)), now)
            elif not self._gathering(lower, now):
                self._plan_queue(lower, now)

    def _gathering(self, lower: LowerTier, now: float) -> bool:
        """True while the queued rows wait for more, so that one job takes the rows of several engine steps."""
        if now >= lower.send_at or len(lower.queue) >= self._gather_blocks or self.closing:
            return False
        return not self.control.shortage and self.control.cpu.available >= self.watermark_rows

    def flush(self, now: float) -> None:
        """Send the gathered rows now, as far as the limits allow."""
        for lower in self.control.lowers:
            lower.send_at = -math.inf
        self.plan(now)

    def _room(self, lower: LowerTier) -> int:
        """How many more blocks may be in flight to this tier: within its share of the rows and its own limit."""
        room = min(lower.rows_max - lower.rows_in_flight, lower.setup.inflight_blocks - lower.stores_in_flight)
        return min(room, lower.roots.room) if lower.roots.several else room

    def _give_up(self, lower: LowerTier, reason: DropReason) -> None:
        """The tier takes nothing: queued rows become clean unwritten, and as many cold rows as are needed."""
        rows = [row for row, generation in lower.queue if self._is_dirty(lower, row, generation)]
        lower.queue.clear()
        if lower.on_evict:
            rows = self._cold_rows(self._rows_needed(lower), lower.bit)
        self._drop(lower, rows, reason)

    def _drop(self, lower: LowerTier, rows: Sequence[int], reason: DropReason) -> None:
        for row in rows:
            lower.counters.drop(reason)
            self.mark_clean(row, lower)

    def _is_dirty(self, lower: LowerTier, row: int, generation: int) -> bool:
        table = self.control.cpu.table
        due = self.dirty[row] & lower.bit & ~self.demoting[row]
        return bool(due) and table.state[row] == READY and table.generation[row] == generation

    def _plan_queue(self, lower: LowerTier, now: float) -> None:
        queue, keys = lower.queue, self.control.cpu.table.keys
        while queue and (room := min(JOB_BLOCKS, self._room(lower))) > 0 and lower.may_store(now):
            rows: list[int] = []
            while queue and len(rows) < room:
                row, generation = queue.popleft()
                if not self._is_dirty(lower, row, generation):
                    continue
                key = keys[row]
                assert key is not None
                if lower.index.needs(key, now):
                    rows.append(row)
                else:
                    lower.counters.skip(SkipReason.ALREADY_THERE)
                    self.mark_clean(row, lower)
            if rows and not self._send(lower, rows[:: lower.queue_step], now) and not lower.disk_full:
                break  # the others wait for free slots, but not on a full disk: it may have none for long
        if not queue:
            lower.send_at = math.inf

    def _rows_needed(self, lower: LowerTier) -> int:
        available, watermark = self.control.cpu.available, self.watermark_rows
        if available < watermark and lower.owned is not None:
            # A tier with few slots of a size evicts older copies for what is stored now, and their rows are dirty
            # again. It cannot keep many rows clean, and would be written without end.
            watermark = min(watermark, lower.owned.placement.fewest_slots // 2)
        return max(watermark, min(self.control.shortage, max(1, self.control.num_rows // 4))) - available

    def _cold_rows(self, count: int, mask: int, spared: int = 0) -> list[int]:
        """The at most `count` coldest rows, dirty for a tier in `mask` and for none in `spared`, without other pins."""
        if count <= 0 or not self.dirty_rows:
            return []
        pins, dirty = self.control.cpu.table.pins, self.dirty
        rows = []
        for row in self.control.cpu.policy.coldest():
            if dirty[row] & mask and not dirty[row] & spared and pins[row] == 1 and not self.demoting[row]:
                rows.append(row)
                if len(rows) == count:
                    break
        return rows

    def _send_cold(self, lower: LowerTier, count: int, now: float) -> None:
        rows = self._cold_rows(count, lower.bit)
        for start in range(0, len(rows), JOB_BLOCKS):
            if not lower.may_store(now) or not self._send(lower, rows[start : start + JOB_BLOCKS], now):
                return

    def drain(self, now: float) -> None:
        """Closing: demote rows that are dirty for an `on_evict` tier, as far as the limits allow."""
        for lower in self.control.lowers:
            if lower.on_evict:
                self._send_cold(lower, self._room(lower), now)

    def _send(self, lower: LowerTier, rows: list[int], now: float) -> bool:
        """Emit demotion jobs, one for each root; False when the lower tier has no slot at all for now."""
        if over := self._refused.over_budget(lower, rows, now):
            self._drop(lower, over, DropReason.WRITE_BUDGET)
            return len(over) == len(rows) or self._send(lower, [row for row in rows if row not in over], now)
        keys: list[OffloadKey] = list(map(self.control.cpu.table.keys.__getitem__, rows))  # type: ignore[arg-type]
        if lower.owned is None:
            self._emit(DemotionJob(self, lower, keys, rows, ()), now)
            return True
        if lower.owned.follower is not None and (unwanted := lower.owned.bypassed(keys[::-1])):
            rows = self._bypass(lower, rows, set(unwanted))
            return not rows or self._send(lower, rows, now)
        if lower.disk_full and not any(self.retried[row] & lower.bit for row in rows):
            lower.owned.placement.try_full_disks(now)
        limits = lower.roots.limits(len(keys))
        slots = lower.owned.reserve(keys, limits)
        if len(slots) < len(rows):
            self._put_off(lower, rows[len(slots) :], limited=limits is not None)
        for at in lower.roots.split(slots) if slots else ():
            job = DemotionJob(self, lower, [keys[i] for i in at], [rows[i] for i in at], [slots[i] for i in at])
            self._emit(job, now)
        return bool(slots)

    def _bypass(self, lower: LowerTier, rows: list[int], unwanted: Collection[OffloadKey]) -> list[int]:
        """What the tier would not keep is clean, and offered again when it is used. Returns the other rows."""
        keys = self.control.cpu.table.keys
        for row in [row for row in rows if keys[row] in unwanted]:
            self._refused.add(lower, row, SkipReason.BYPASSED)
            self.mark_clean(row, lower)
        return [row for row in rows if keys[row] not in unwanted]

    def _put_off(self, lower: LowerTier, rows: list[int], limited: bool) -> None:
        """No slot was to be had for these rows. Where only some roots may be used they wait for those, else they go."""
        if not limited or lower.disk_full or lower.rows_in_flight == lower.rows_late:
            self._drop(lower, rows, lower.no_slot_reason)
        elif not lower.on_evict:
            self._put_back(lower, rows)

    def _put_back(self, lower: LowerTier, rows: Sequence[int]) -> None:
        """Queue rows again, before the others and without gathering."""
        generation = self.control.cpu.table.generation
        lower.queue.extendleft((row, generation[row]) for row in rows[:: -lower.queue_step])
        lower.send_at = -math.inf

    def _emit(self, job: DemotionJob, now: float) -> None:
        lower, rows = job.lower, job.rows
        lower.store_order.sent(job)
        self.control.cpu.pin(rows)
        for row in rows:
            self.demoting[row] |= lower.bit
        lower.stores_in_flight += len(rows)
        if lower.admission is not None:
            lower.admission.sent(job.keys)
        job.begin()
        deadline = now + lower.setup.timeout_seconds
        self.control.emit(lower.position, JobKind.STORE, job.groups, deadline, job, job.formats)

    def disk_full(self, job: DemotionJob, blocks: Sequence[int], now: float) -> set[int]:
        """The disk had no room for these blocks of a job. Returns those that are tried once more, in other places.

        That is where blocks are evicted for them. None while it is being tried whether there is room again.
        """
        lower, bit = job.lower, job.lower.bit
        if lower.owned is None:
            return set()
        lower.owned.placement.disk_full([job.slots[i] for i in blocks], now)
        if lower.room_breaker.state is not BreakerState.CLOSED:
            return set()
        again = [i for i in blocks if self.dirty[job.rows[i]] & bit & ~self.retried[job.rows[i]]]
        for i in again:
            self.retried[job.rows[i]] |= bit
        if not lower.on_evict:
            self._put_back(lower, [job.rows[i] for i in again])
        return set(again)


class DemotionJob(LowerTransfer):
    """One store into a lower tier: pinned rows, filling slots."""

    def __init__(
        self, demotions: Demotions, lower: LowerTier, keys: list[OffloadKey], rows: list[int], slots: Sequence[int]
    ) -> None:
        super().__init__(lower, JobKind.STORE, keys, rows, slots)
        self.demotions = demotions
        self.stored: list[tuple[int, int]] = []
        self.over = False
        self.resets = demotions.control.resets

    def finish(self, result: JobResult, now: float) -> None:
        outcomes = self.outcomes_of(result)
        current = self.resets == self.demotions.control.resets
        self.stored = self.finish_store(outcomes, result.bytes_moved, now, current)
        full = [i for i, outcome in enumerate(outcomes) if outcome.reason is DropReason.DISK_FULL]
        again = self.demotions.disk_full(self, full, now) if full else set()
        for i, outcome in enumerate(outcomes):
            if not outcome.ok and i not in again:
                self.lower.counters.count(outcome)
        self.judge_room(outcomes, len(again) < len(full), now)
        self.lower.store_order.ended(self)
        self.release()
        self._unpin_rows(again)

    def _unpin_rows(self, again: Collection[int] = ()) -> None:
        """The rows are read no more. They are clean for this tier, except those of blocks that are tried again."""
        demotions, bit = self.demotions, self.lower.bit
        for i, row in enumerate(self.rows):
            demotions.demoting[row] &= ~bit
            if i not in again:
                demotions.mark_clean(row, self.lower)
        self.lower.stores_in_flight -= len(self.rows)
        demotions.control.cpu.unpin(self.rows)

    def late(self, now: float) -> None:
        super().late(now)
        self.demotions.late += len(self.rows)
        self.lower.store_order.ended(self)
        if self.lower.on_evict:
            self.lower.counters.drop(DropReason.TIER_DOWN, len(self.rows))
        for row in self.rows:
            self.demotions.mark_clean(row, self.lower)

    def ended(self, now: float) -> None:
        super().ended(now)
        self.demotions.late -= len(self.rows)
        self._unpin_rows()
