"""Demotions: rows that are to be stored in the tiers below, each tier by its own write policy.

The source of every demotion is a CPU row, pinned while it is read. A row that owes itself to a lower tier has a
*duty*, a hold that keeps it until that tier acknowledged or gave up. `write_through` tiers are served in the order
rows became ready, `on_evict` tiers from the coldest row on, when clean rows are short. A slow tier never holds up the
CPU tier for long: stores that waited long enough make duties give way (`backlog`), loads at once where the tier is
`write_through`, and after the same patience where it is `on_evict`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from kvtier.control.board import Board, InFlight, LowerTier
from kvtier.control.breaker import BreakerState
from kvtier.control.order import StoreOrder
from kvtier.control.slots import READY
from kvtier.jobs import (
    BlockOutcome,
    DropReason,
    GroupTransfer,
    JobKind,
    JobResult,
    RegionCut,
    int_array,
)
from kvtier.keys import OffloadKey, key_group

JOB_BLOCKS = 128


class Demotions:
    """Plans and ends demotions to all lower tiers. In flight and quarantined, a tier holds a quarter of the rows."""

    def __init__(self, board: Board, watermark_rows: int) -> None:
        self.board = board
        self.watermark_rows = watermark_rows
        self.closing = False
        self.duty = bytearray(board.num_rows)
        self.demoting = bytearray(board.num_rows)
        self.retried = bytearray(board.num_rows)
        self.queues: list[deque[tuple[int, int]]] = [deque() for _ in board.lowers]
        self.orders = [StoreOrder(lower.owned) for lower in board.lowers]
        self.inflight = [0] * len(board.lowers)
        self.late = 0
        self._num_owing = 0
        self._on_evict_bits = sum(lower.bit for lower in board.lowers if lower.on_evict)

    @property
    def under_way(self) -> int:
        """Rows queued for or under way to lower tiers, those of late transfers included."""
        return sum(len(queue) for queue in self.queues) + sum(self.inflight)

    @property
    def backlog(self) -> int:
        """Rows that may still reach lower tiers; those of late transfers were given up for good."""
        return self.under_way - self.late

    @property
    def owing(self) -> int:
        """Rows that owe themselves to some lower tier."""
        return self._num_owing

    @property
    def cleaning(self) -> bool:
        """True if rows will become free once an `on_evict` tier has them, so that waiting a little is worth it."""
        under_way = any(lower.on_evict and self.inflight[lower.position - 1] for lower in self.board.lowers)
        return under_way or bool(self._cold_rows(1, self._on_evict_bits))

    # -- rows come and go ----------------------------------------------------------------------------------------

    def row_ready(self, rows: Sequence[int], source: int, now: float) -> None:
        """These rows became ready, filled by a store (`source` 0) or from the lower tier at position `source`.

        Told leaf before root and queued so: below, too, a parent must not age before its children.
        """
        table = self.board.cpu.table
        for lower in self.board.lowers:
            if lower.position == source:
                continue
            queue = self.queues[lower.position - 1]
            for row in rows:
                key = table.keys[row]
                assert key is not None
                if not self._already_below(lower, key, now):
                    self._put_duty(row, lower)
                    if not lower.on_evict:
                        queue.append((row, table.generation[row]))

    def _already_below(self, lower: LowerTier, key: OffloadKey, now: float) -> bool:
        if lower.owned is not None:
            return key in lower.owned.directory
        assert lower.shared is not None
        return lower.shared.presence(key, now) is True

    def _put_duty(self, row: int, lower: LowerTier) -> None:
        if not self.duty[row]:
            self.board.cpu.hold((row,))
            self._num_owing += 1
        self.duty[row] |= lower.bit

    def end_duty(self, row: int, lower: LowerTier | None = None) -> None:
        """The row owes nothing to this tier (to any) any more: it is below, or was given up."""
        if self.duty[row]:
            self.duty[row] &= ~lower.bit if lower is not None else 0
            self.retried[row] &= self.duty[row]
            if not self.duty[row]:
                self.board.cpu.release((row,))
                self._num_owing -= 1

    def evicted_below(self, lower: LowerTier, keys: Sequence[OffloadKey]) -> None:
        """An `on_evict` tier let keys go: rows that relied on that copy have their duty again.

        Not while closing: each row is written once, or a tier smaller than the rows would never be done.
        """
        if not lower.on_evict or self.closing:
            return
        for key in keys:
            row = self.board.cpu.ready(key)
            if row is not None:
                self._put_duty(row, lower)

    def give_way(self, count: int, patient: bool) -> None:
        """Let the `count` coldest rows with nothing but a duty go without: somebody needs the rows more.

        While that somebody is patient, rows that owe themselves to an `on_evict` tier wait for it all the same.
        """
        spared = self._on_evict_bits if patient else 0
        for row in self._cold_rows(min(count, self.board.num_rows), 0xFF, spared):
            for lower in self.board.lowers:
                if self.duty[row] & lower.bit:
                    lower.counters.drop(DropReason.BACKLOG)
            self.end_duty(row)

    def reset(self) -> None:
        """Forget all that was queued; jobs under way end on their own."""
        for row in range(len(self.duty)):
            self.end_duty(row)
        for queue in self.queues:
            queue.clear()

    def drop_queued(self, reason: DropReason) -> int:
        """Give up everything that is owed and not under way; returns how many blocks that were."""
        count = 0
        for row in range(len(self.duty)):
            for lower in self.board.lowers:
                if self.duty[row] & lower.bit & ~self.demoting[row]:
                    lower.counters.drop(reason)
                    self.end_duty(row, lower)
                    count += 1
        for queue in self.queues:
            queue.clear()
        return count

    # -- planning ------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> None:
        """Emit what may go now: queued rows, and cold rows with a duty where free rows are short."""
        for lower in self.board.lowers:
            allowed = lower.may_store(now)
            if lower.refusal is not None:
                self._give_up(lower, lower.refusal)
            elif allowed and lower.on_evict:
                self._plan_cold(lower, now)
            elif allowed:
                self._plan_queue(lower, now)

    def _room(self, lower: LowerTier) -> int:
        """How many more blocks may be under way to this tier: within its share of the rows and its own limit."""
        room = min(lower.rows_max - lower.rows_held, lower.plan.inflight_blocks - self.inflight[lower.position - 1])
        return min(room, lower.roots.room) if lower.roots.several else room

    def _give_up(self, lower: LowerTier, reason: DropReason) -> None:
        """The tier takes nothing: what waits in line goes without, and of the cold rows as many as are needed."""
        queue = self.queues[lower.position - 1]
        rows = [row for row, generation in queue if self._owes(lower, row, generation)]
        queue.clear()
        if lower.on_evict:
            rows = self._cold_rows(self._rows_needed(lower), lower.bit)
        for row in rows:
            lower.counters.drop(reason)
            self.end_duty(row, lower)

    def _owes(self, lower: LowerTier, row: int, generation: int) -> bool:
        table = self.board.cpu.table
        due = self.duty[row] & lower.bit & ~self.demoting[row]
        return bool(due) and table.state[row] == READY and table.generation[row] == generation

    def _plan_queue(self, lower: LowerTier, now: float) -> None:
        queue = self.queues[lower.position - 1]
        while queue and (room := min(JOB_BLOCKS, self._room(lower))) > 0 and lower.may_store(now):
            rows: list[int] = []
            while queue and len(rows) < room:
                row, generation = queue.popleft()
                if not self._owes(lower, row, generation):
                    continue
                if self._already_below(lower, self._key(row), now):
                    self.end_duty(row, lower)
                else:
                    rows.append(row)
            if rows and not self._send(lower, rows, now) and not lower.disk_full:
                return  # the others wait until slots are free: nobody knows when a full disk has some

    def _key(self, row: int) -> OffloadKey:
        key = self.board.cpu.table.keys[row]
        assert key is not None
        return key

    def _rows_needed(self, lower: LowerTier) -> int:
        # A small tier lets go of older copies for what is stored now: it cannot keep many rows clean.
        small = lower.owned.placement.fewest_slots // 2 if lower.owned is not None else self.watermark_rows
        wanted = max(min(self.watermark_rows, small), min(self.board.shortage, max(1, self.board.num_rows // 4)))
        return wanted - self.board.cpu.available

    def _cold_rows(self, count: int, mask: int, spared: int = 0) -> list[int]:
        """The coldest rows, at most `count`, that nothing holds but a duty to a tier in `mask` and none in `spared`."""
        if count <= 0 or not self._num_owing:
            return []
        holds, duty = self.board.cpu.table.holds, self.duty
        rows = []
        for row in self.board.cpu.policy.coldest():
            if duty[row] & mask and not duty[row] & spared and holds[row] == 1 and not self.demoting[row]:
                rows.append(row)
                if len(rows) == count:
                    break
        return rows

    def _plan_cold(self, lower: LowerTier, now: float) -> None:
        needed = self._rows_needed(lower) - self.inflight[lower.position - 1]
        self._send_cold(lower, min(needed, self._room(lower)), now)

    def _send_cold(self, lower: LowerTier, count: int, now: float) -> None:
        rows = self._cold_rows(count, lower.bit)
        for start in range(0, len(rows), JOB_BLOCKS):
            if not lower.may_store(now) or not self._send(lower, rows[start : start + JOB_BLOCKS], now):
                return

    def flush(self, now: float) -> None:
        """Closing: demote rows that owe themselves to an `on_evict` tier, as far as the limits allow."""
        for lower in self.board.lowers:
            if lower.on_evict:
                self._send_cold(lower, self._room(lower), now)

    def _send(self, lower: LowerTier, rows: list[int], now: float) -> bool:
        """Emit demotion jobs, one for each root; False when the lower tier has no slot at all for now."""
        keys = [self._key(row) for row in rows]
        if lower.owned is None:
            self._emit(DemotionJob(self, lower, rows, keys, None), now)
            return True
        if not any(self.retried[row] & lower.bit for row in rows):
            lower.owned.placement.try_full_disks(now)
        limits = lower.roots.limits(len(keys))
        slots = lower.owned.reserve(keys, limits)
        if len(slots) < len(rows):
            self._put_off(lower, rows[len(slots) :], limited=limits is not None)
        for part in lower.roots.split(slots) if slots else ():
            chosen = [slots[i] for i in part]
            job = DemotionJob(self, lower, [rows[i] for i in part], [keys[i] for i in part], chosen)
            job.root = lower.root_of(chosen)
            job.cuts = lower.owned.placement.cuts_for(chosen)
            self._emit(job, now)
        return bool(slots)

    def _put_off(self, lower: LowerTier, rows: list[int], limited: bool) -> None:
        """No slot was to be had for these rows. Where only some roots may be used they wait for those, else they go."""
        if not limited or lower.disk_full or lower.rows_held == lower.rows_stuck:
            self._no_slot(lower, rows)
        elif not lower.on_evict:
            generation = self.board.cpu.table.generation
            self.queues[lower.position - 1].extendleft((row, generation[row]) for row in reversed(rows))

    def _emit(self, job: DemotionJob, now: float) -> None:
        lower, rows, keys, slots = job.lower, job.rows, job.keys, job.slots
        self.orders[lower.position - 1].sent(job)
        groups: dict[int, list[int]] = {}
        for i, key in enumerate(keys):
            groups.setdefault(key_group(key), []).append(i)
        job.order = [i for members in groups.values() for i in members]
        transfers = [
            GroupTransfer(
                key_group(keys[members[0]]),
                tuple(keys[i] for i in members),
                int_array([rows[i] for i in members]),
                int_array([slots[i] for i in members] if slots else ()),
                int_array([lower.owned.table.generation[slots[i]] for i in members] if slots and lower.owned else ()),
            )
            for members in groups.values()
        ]
        self.board.cpu.hold(rows)
        for row in rows:
            self.demoting[row] |= lower.bit
        self.inflight[lower.position - 1] += len(rows)
        lower.begin_in(job.root, len(rows))
        lower.store_sent()
        deadline = now + lower.plan.timeout_seconds
        self.board.emit(lower.position, JobKind.STORE, transfers, deadline, job, job.cuts)

    def disk_full(self, job: DemotionJob, blocks: Sequence[int], now: float) -> set[int]:
        """The disk had no room for these blocks of a job. Returns those that are tried once more, in other places.

        That is where blocks are evicted for them. None while it is being tried whether there is room again.
        """
        lower, bit, table = job.lower, job.lower.bit, self.board.cpu.table
        if lower.owned is None or job.slots is None or not blocks:
            return set()
        lower.owned.placement.disk_full([job.slots[i] for i in blocks], now)
        if lower.room_breaker.state is not BreakerState.CLOSED:
            return set()
        again = [i for i in blocks if self.duty[job.rows[i]] & bit & ~self.retried[job.rows[i]]]
        for i in again:
            self.retried[job.rows[i]] |= bit
        if not lower.on_evict:
            line = ((job.rows[i], table.generation[job.rows[i]]) for i in reversed(again))
            self.queues[lower.position - 1].extendleft(line)
        return set(again)

    def _no_slot(self, lower: LowerTier, rows: Sequence[int]) -> None:
        assert lower.owned is not None
        reason = DropReason.NO_SLOT if lower.owned.placement.one_size else DropReason.NO_REGION
        reason = DropReason.DISK_FULL if lower.disk_full else reason
        lower.counters.drop(reason, len(rows))
        for row in rows:
            self.end_duty(row, lower)


class DemotionJob(InFlight):
    """One store into a lower tier: pinned rows, filling slots."""

    def __init__(
        self,
        demotions: Demotions,
        lower: LowerTier,
        rows: list[int],
        keys: list[OffloadKey],
        slots: list[int] | None,
    ) -> None:
        self.demotions = demotions
        self.lower = lower
        self.rows = rows
        self.keys = keys
        self.slots = slots
        self.root = 0
        self.order: list[int] = []
        self.cuts: tuple[RegionCut, ...] = ()
        self.stored: list[tuple[int, int]] = []
        self.over = False
        self.epoch = demotions.board.epoch

    def finish(self, result: JobResult, now: float) -> None:
        lower, board = self.lower, self.demotions.board
        outcomes = [outcome for group in result.outcomes for outcome in group]
        good: list[int] = []
        bad: dict[int, BlockOutcome] = {}
        for i, outcome in zip(self.order, outcomes, strict=True):
            if outcome.ok:
                good.append(i)
            else:
                bad[i] = outcome
        if lower.shared is not None and self.epoch == board.epoch:
            for i in good:
                lower.shared.learn(self.keys[i], True, now)
        if lower.owned is not None and self.slots is not None:
            stored = [self.slots[i] for i in sorted(good)]
            lower.owned.commit(stored)
            lower.owned.abort([self.slots[i] for i in bad])
            generation = lower.owned.table.generation
            self.stored = [(slot, generation[slot]) for slot in stored]
            if stored:
                lower.owned.placement.told(self.cuts)
        full = sorted(i for i, outcome in bad.items() if outcome.reason is DropReason.DISK_FULL)
        again = self.demotions.disk_full(self, full, now)
        for i, outcome in bad.items():
            if i not in again:
                board.count(lower.position, outcome)
        if good or not full:
            lower.room_breaker.succeeded()
        elif lower.owned is not None and len(again) < len(full):
            lower.room_breaker.failed(now)
        self.demotions.orders[self.lower.position - 1].ended(self)
        lower.counters.stored += len(good)
        lower.counters.store_bytes += result.bytes_moved
        lower.judge(lower.store_breaker, outcomes, now)
        self._let_go(again)

    def _let_go(self, again: Collection[int] = ()) -> None:
        """The rows are read no more, and owe nothing any more but those of blocks that are tried again."""
        demotions, bit = self.demotions, self.lower.bit
        for i, row in enumerate(self.rows):
            demotions.demoting[row] &= ~bit
            if i not in again:
                demotions.end_duty(row, self.lower)
        demotions.inflight[self.lower.position - 1] -= len(self.rows)
        self.lower.end_in(self.root, len(self.rows))
        demotions.board.cpu.release(self.rows)

    def late(self, now: float) -> None:
        self.lower.counters.late += len(self.rows)
        self.lower.late_in(self.lower.store_breaker, self.root, len(self.rows), now)
        self.lower.room_breaker.succeeded()  # whatever it was, it says nothing of room
        self.demotions.late += len(self.rows)
        self.demotions.orders[self.lower.position - 1].ended(self)
        if self.lower.on_evict:
            self.lower.counters.drop(DropReason.TIER_DOWN, len(self.rows))
        if self.lower.owned is not None and self.slots is not None:
            self.lower.owned.quarantine(self.slots)
        for row in self.rows:
            self.demotions.end_duty(row, self.lower)

    def ended(self, now: float) -> None:
        self.lower.ended_in(self.root, len(self.rows))
        self.demotions.late -= len(self.rows)
        if self.lower.owned is not None and self.slots is not None:
            self.lower.owned.release(self.slots)
        self._let_go()
