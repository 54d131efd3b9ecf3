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
from itertools import compress

from kvtier.control.flow.dirty_rows import ALL_TIERS, DirtyRows
from kvtier.control.flow.eviction_admission import EvictionAdmission
from kvtier.control.flow.lower_transfer import LowerTransfer, pick
from kvtier.control.flow.rejected_rows import RejectedRows
from kvtier.control.jobs import CPU_TIER
from kvtier.control.state import ControlState
from kvtier.control.tiers.breaker import BreakerState
from kvtier.control.tiers.lower_tier import LowerTier
from kvtier.control.tiers.slot_table import READY
from kvtier.types.jobs import STORED, BlockOutcome, DropReason, JobKind, JobResult, SkipReason, dropped
from kvtier.types.keys import OffloadKey

JOB_BLOCKS = 128
GATHER_BLOCKS = 32
"""So many gathered rows go without waiting for more."""


class Demotions:
    """Plans and ends demotions to all lower tiers. In flight and quarantined, a tier holds a quarter of the rows.

    `admits_all`: no tier has an admission.
    """

    def __init__(self, control: ControlState, watermark_rows: int, gather_seconds: float = 0.0) -> None:
        self.control = control
        self.watermark_rows = watermark_rows
        self.closing = False
        self.dirty = DirtyRows(control.cpu)
        self._rejected = RejectedRows(control, self.dirty)
        self._eviction_admission = EvictionAdmission(control, self.dirty, self._rejected)
        self._gather_seconds = gather_seconds
        self._gather_blocks = min(GATHER_BLOCKS, 1 + control.num_rows // 16)
        self.late = 0
        self.list_tiers()

    def list_tiers(self) -> None:
        """Lower tiers were taken in."""
        self._on_evict_bits = sum(lower.bit for lower in self.control.lowers if lower.on_evict)
        self.admits_all = all(lower.admits_all for lower in self.control.lowers)

    @property
    def cleaning(self) -> bool:
        """True if rows will become free once an `on_evict` tier has them, so that waiting a little is worth it."""
        in_flight = any(lower.on_evict and lower.stores_in_flight for lower in self.control.lowers)
        return in_flight or bool(self.dirty.coldest(1, self._on_evict_bits))

    # -- rows come and go ----------------------------------------------------------------------------------------

    def row_ready(self, rows: Sequence[int], source: int, now: float) -> None:
        """These rows became ready, filled by a store (`source` 0) or from the lower tier at position `source`.

        In the lower tiers, too, a parent must not age before its children: `rows` are in order, leaf before root, and
        are queued in that order; the other way round for a policy that follows requests, which takes the front first.
        """
        if not self.admits_all:
            self._rejected.clear(rows)
        for lower in self.control.lowers:
            if lower.position == source:
                continue
            if lower.store_breaker.state is BreakerState.HELD_BACK:  # as `held_back`, without a call
                lower.counters.drop(DropReason.HELD_BACK, len(rows))
            else:
                self._offer(lower, rows, source != CPU_TIER, now)

    def end_fills(self, rows: Sequence[int], whole: Sequence[bool], source: int, now: float) -> list[int]:
        """The fills of these rows, given in prefix order, ended, and left whole blocks or not; `source` as for
        `row_ready`. Returns the rows that are ready: none that a reset has overtaken."""
        control, cpu, state = self.control, self.control.cpu, self.control.cpu.table.state
        good = list(compress(rows, whole))
        cpu.commit(good[::-1])
        ready = [row for row in good if state[row] == READY]
        self.row_ready(ready[::-1], source, now)
        control.end_fill(ready, True, source, now)
        if len(good) < len(rows):
            cpu.abort([row for row, ok in zip(rows, whole, strict=True) if not ok])
        if len(ready) < len(rows):
            control.end_fill([row for row in rows if state[row] != READY], False, source, now)
        return ready

    def end_stores(
        self, rows: list[int], outcomes: Sequence[BlockOutcome], resets: int, now: float
    ) -> Sequence[BlockOutcome]:
        """Copies of GPU blocks into these rows, given in prefix order, ended so; they began after so many resets.

        Returns what became of the blocks: one that a reset has overtaken is dropped.
        """
        control = self.control
        if resets == control.resets and outcomes.count(STORED) == len(outcomes):  # the usual case in a few batch calls
            control.cpu.commit(rows[::-1])
            control.cpu_counters.stored += len(rows)
            self.row_ready(rows[::-1], CPU_TIER, now)
            if control.fills:
                control.end_fill(rows, True, CPU_TIER, now)
            return outcomes
        ready = set(self.end_fills(rows, [outcome.ok for outcome in outcomes], CPU_TIER, now))
        control.cpu_counters.stored += len(ready)
        ended = []
        for row, outcome in zip(rows, outcomes, strict=True):
            control.cpu_counters.count(outcome)
            ended.append(dropped(DropReason.RESET) if outcome.ok and row not in ready else outcome)
        return ended

    def on_use(self, rows: Sequence[int], now: float) -> None:
        """The blocks of these rows were loaded, or stored once more: tiers that did not admit them decide again.

        Call unless `admits_all`. The order of the rows is as in `row_ready`.
        """
        for lower in self.control.lowers:
            again = [row for row in rows if self._rejected.pop(lower, row)]  # they may name a row twice
            if again and not lower.held_back:
                self._offer(lower, again, True, now)

    def _offer(self, lower: LowerTier, rows: Sequence[int], used_again: bool, now: float) -> None:
        """Rows become dirty for a tier that admits them and does not have them."""
        if not lower.queue:
            lower.send_at = now + self._gather_seconds
        needed = self._needed(lower, rows[:: lower.queue_step], now)
        if lower.admission is None:
            self._mark(lower, needed)
        elif lower.late_admission is not None:
            self._eviction_admission.on_offer(lower, needed, used_again)
        else:
            for row in needed:
                self._mark(lower, self._rejected.rows_to_write(lower, row, used_again, now))

    def _needed(self, lower: LowerTier, rows: Sequence[int], now: float) -> Sequence[int]:
        """The rows whose blocks the tier does not have."""
        index, names = lower.index, self.control.cpu.table.keys
        keys: list[OffloadKey] = list(map(names.__getitem__, rows))  # type: ignore[arg-type]  # they hold blocks
        if index.needs_all(keys, now):
            return rows
        needed = [row for row, key in zip(rows, keys, strict=True) if index.needs(key, now)]
        lower.counters.skip(SkipReason.ALREADY_THERE, len(rows) - len(needed))
        return needed

    def _keys(self, rows: Sequence[int]) -> list[OffloadKey]:
        """The keys of rows that hold blocks."""
        return list(map(self.control.cpu.table.keys.__getitem__, rows))  # type: ignore[arg-type]

    def _mark(self, lower: LowerTier, rows: Sequence[int]) -> None:
        """These rows become dirty for a tier."""
        self.dirty.mark(rows, lower.bit)
        if not lower.on_evict:
            lower.queue.extend(zip(rows, map(self.control.cpu.table.generation.__getitem__, rows), strict=True))

    def on_join(self, now: float) -> None:
        """Lower tiers were taken in: what is in rows already is dirty for them, where they need it.

        That are the most recent rows alone, as many as one tier may hold in flight: dirty rows are not free for others.
        """
        self.list_tiers()
        ready = [*self.control.cpu.policy.coldest(), *self.control.cpu.retained.slots]
        self.row_ready(ready[-max(1, self.control.num_rows // 4) :], CPU_TIER, now)

    def write_back(self, row: int, now: float) -> bool:
        """Send the block of this ready row to the lower tiers soon: also to one that gets it before it is evicted, or
        that did not admit it. False if no tier is to get it."""
        (key,) = self._keys((row,))
        entry = row, self.control.cpu.table.generation[row]
        wanted = False
        for lower in self.control.lowers:
            if lower.held_back or self.closing or not lower.may_store(now) or not lower.index.needs(key, now):
                wanted = wanted or bool(self.dirty.bits[row] & lower.bit)
                continue
            if lower.late_admission is not None:
                wanted = self._eviction_admission.write_back(lower, row, now) or wanted
                continue
            queued = (self.dirty.due if lower.on_evict else self.dirty.bits)[row] & lower.bit
            if lower.budgeted is not None:
                lower.budgeted.admit_parent(key)
            self._rejected.pop(lower, row)
            self.dirty.mark((row,), lower.bit)
            if not queued and not self.dirty.sending[row] & lower.bit:
                if lower.on_evict:
                    self.dirty.mark_due((row,), lower.bit)
                lower.queue.append(entry)
                lower.send_at = min(lower.send_at, now + self._gather_seconds)
            wanted = True
        return wanted

    def on_evict_below(self, lower: LowerTier, keys: Sequence[OffloadKey]) -> None:
        """A tier evicted these keys: rows that have them are dirty again if it is `on_evict`, or offered anew once they
        are used if its policy follows requests. Not while closing: a tier smaller than the rows would never be done."""
        if self.closing or lower.held_back or not (lower.on_evict or lower.is_request_aware):
            return
        for row in map(self.control.cpu.ready, keys):
            if row is not None and lower.is_request_aware:
                self._rejected.offer_again(lower, row)
            elif row is not None:
                self.dirty.mark((row,), lower.bit)

    def drop_dirty(self, count: int, patient: bool) -> None:
        """Another request needs rows: make the `count` coldest dirty rows without another pin clean, unwritten.

        While that request is patient, rows that are dirty for an `on_evict` tier are left: their write-back goes on.
        """
        spared = self._on_evict_bits if patient else 0
        rows = self.dirty.coldest(min(count, self.control.num_rows), ALL_TIERS, spared)
        for row in rows:
            for lower in self.control.lowers:
                if self.dirty.bits[row] & lower.bit:
                    lower.counters.drop(DropReason.BACKLOG)
                    self._rejected.on_give_up(lower, (row,))
        self.dirty.clean(rows)

    def reset(self) -> None:
        """Forget all that was queued; jobs in flight end on their own."""
        self.dirty.clean(range(self.control.num_rows))
        for lower in self.control.lowers:
            lower.queue.clear()

    def drop_queued(self, reason: DropReason) -> int:
        """Give up every write-back that is not in flight; returns how many blocks that were."""
        count, bits, sending = 0, self.dirty.bits, self.dirty.sending
        for lower in self.control.lowers:
            rows = [row for row in range(self.control.num_rows) if bits[row] & lower.bit & ~sending[row]]
            self._drop(lower, rows, reason)
            lower.queue.clear()
            count += len(rows)
        return count

    # -- planning ------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> None:
        """Emit the demotions that may start now: queued rows, and cold dirty rows where free rows are short."""
        for lower in self.control.lowers:
            queued = lower.on_evict or lower.queue
            if not queued and lower.store_breaker.state is BreakerState.CLOSED is lower.room_breaker.state:
                continue
            allowed = lower.may_store(now)  # also where nothing is queued: an open breaker becomes half-open by time
            if not queued:
                continue
            if not allowed:
                if lower.refusal is not None:
                    self._give_up(lower, lower.refusal)
            elif lower.late_admission is not None:
                self._eviction_admission.choose(
                    lower, self._rows_needed(lower) - lower.stores_in_flight - len(lower.queue), now
                )
                self._plan_queue(lower, now)
            elif lower.on_evict:
                if lower.queue:
                    self._plan_queue(lower, now)
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
        """The number of blocks that may yet go to this tier: within its share of the rows and its own limit."""
        room = min(lower.rows_max - lower.rows_in_flight, lower.spec.store_blocks - lower.stores_in_flight)
        return min(room, lower.roots.room) if lower.roots.several else room

    def _give_up(self, lower: LowerTier, reason: DropReason) -> None:
        """The tier takes nothing: queued rows become clean unwritten, and as many cold rows as are needed."""
        rows = self.dirty.take(lower.queue, lower.bit, len(lower.queue))
        if lower.on_evict:
            rows = self.dirty.coldest(self._rows_needed(lower), lower.bit)
        self._drop(lower, rows, reason)

    def _drop(self, lower: LowerTier, rows: Sequence[int], reason: DropReason) -> None:
        if rows:
            lower.counters.drop(reason, len(rows))
            self.dirty.clean(rows, lower.bit)
            self._rejected.on_give_up(lower, rows)

    def _plan_queue(self, lower: LowerTier, now: float) -> None:
        queue = lower.queue
        while queue and (room := min(JOB_BLOCKS, self._room(lower))) > 0 and lower.may_store(now):
            rows: list[int] = []
            while queue and len(rows) < room:
                due = self.dirty.take(queue, lower.bit, room - len(rows))
                needed = self._needed(lower, due, now)
                rows += needed
                if len(needed) < len(due):
                    taken = set(needed)
                    self.dirty.clean([row for row in due if row not in taken], lower.bit)
            rows = list(dict.fromkeys(rows))  # one that was cleaned and is dirty again is still queued from before
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

    def _send_cold(self, lower: LowerTier, count: int, now: float) -> None:
        rows = self.dirty.coldest(count, lower.bit)
        for start in range(0, len(rows), JOB_BLOCKS):
            if not lower.may_store(now) or not self._send(lower, rows[start : start + JOB_BLOCKS], now):
                return

    def drain(self, now: float) -> None:
        """Closing: demote rows that are dirty for an `on_evict` tier, as far as the limits allow."""
        for lower in self.control.lowers:
            if lower.late_admission is not None:
                self._eviction_admission.choose(lower, self.dirty.count, now, warmest_first=True)
                self._plan_queue(lower, now)
            elif lower.on_evict:
                self._send_cold(lower, self._room(lower), now)

    def _send(self, lower: LowerTier, rows: list[int], now: float) -> bool:
        """Emit demotion jobs, one for each root; False when the lower tier has no slot at all for now."""
        if lower.budgeted is not None and (over := self._rejected.over_budget(lower, rows, now)):
            self._drop(lower, over, DropReason.WRITE_BUDGET)
            return len(over) == len(rows) or self._send(lower, [row for row in rows if row not in over], now)
        keys = self._keys(rows)
        if lower.owned is None:
            self._emit(DemotionJob(self, lower, keys, rows, ()), now)
            return True
        if lower.owned.request_policy is not None and (
            unwanted := self._rejected.rejected_by_policy(lower.owned, keys)
        ):
            rows = self._rejected.bypass(lower, rows, set(unwanted))
            return not rows or self._send(lower, rows, now)
        if lower.owned.placement.full.regions and not any(self.dirty.retried[row] & lower.bit for row in rows):
            lower.owned.placement.try_full_disks(now)
        limits = lower.roots.limits(len(keys)) if lower.roots.several else None
        slots = lower.owned.reserve(keys, limits)
        if len(slots) < len(rows):
            self._put_off(lower, rows[len(slots) :], limited=limits is not None)
        if slots and not lower.roots.several:
            self._emit(DemotionJob(self, lower, keys[: len(slots)], rows[: len(slots)], slots), now)
        elif slots:
            for at in lower.roots.split(slots):
                self._emit(DemotionJob(self, lower, pick(keys, at), pick(rows, at), pick(slots, at)), now)
        return bool(slots)

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
        lower.store_order.on_send(job)
        self.control.cpu.pin(rows)
        for row in rows:
            self.dirty.sending[row] |= lower.bit
        lower.stores_in_flight += len(rows)
        if lower.budgeted is not None:
            lower.budgeted.on_send(job.keys)
        job.begin()
        deadline = now + lower.spec.timeout_seconds
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
        dirty, retried = self.dirty.bits, self.dirty.retried
        again = [i for i in blocks if dirty[job.rows[i]] & bit & ~retried[job.rows[i]]]
        for i in again:
            retried[job.rows[i]] |= bit
        if not lower.on_evict:
            self._put_back(lower, [job.rows[i] for i in again])
        return set(again)


class DemotionJob(LowerTransfer):
    """A store into a lower tier: pinned rows, filling slots."""

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
        whole = outcomes.count(STORED) == len(outcomes)
        lost = [] if whole else [i for i, outcome in enumerate(outcomes) if not outcome.ok]
        full = [i for i in lost if outcomes[i].reason is DropReason.DISK_FULL] if lost else lost
        again = self.demotions.disk_full(self, full, now) if full else set()
        for i in lost:
            if i not in again:
                self.lower.counters.count(outcomes[i])
        self.judge_room(outcomes, full, len(again) < len(full), now)
        self.lower.store_order.on_end(self)
        self.release()
        self._unpin_rows(again)

    def _unpin_rows(self, again: Collection[int] = ()) -> None:
        """The rows are read no more. They are clean for this tier, except those of blocks that are tried again."""
        demotions, bit = self.demotions, self.lower.bit
        for row in self.rows:
            demotions.dirty.sending[row] &= ~bit
        demotions.dirty.clean([row for i, row in enumerate(self.rows) if i not in again] if again else self.rows, bit)
        self.lower.stores_in_flight -= len(self.rows)
        demotions.control.cpu.unpin(self.rows)

    def on_late(self, now: float) -> None:
        super().on_late(now)
        self.demotions.late += len(self.rows)
        self.lower.store_order.on_end(self)
        if self.lower.on_evict:
            self.lower.counters.drop(DropReason.TIER_DOWN, len(self.rows))
        self.demotions.dirty.clean(self.rows, self.lower.bit)

    def on_end(self, now: float) -> None:
        super().on_end(now)
        self.demotions.late -= len(self.rows)
        self._unpin_rows()
