"""Promotions: blocks of lower tiers read into CPU rows, each key once however many wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.control.board import Board, FillWaiter, InFlight, LowerTier
from kvtier.control.breaker import BreakerState
from kvtier.control.demotion import JOB_BLOCKS, Demotions
from kvtier.control.slots import READY
from kvtier.jobs import BlockOutcome, BlockStatus, GroupTransfer, JobKind, JobResult, int_array
from kvtier.keys import OffloadKey, key_group

REFUSED = (BlockStatus.CORRUPT, BlockStatus.FAILED, BlockStatus.MISSING)


@dataclass(frozen=True, slots=True)
class Want:
    """A key that somebody wants in a row, from a lower tier that has it."""

    key: OffloadKey
    lower: LowerTier
    waiter: FillWaiter
    index: int


class Rooms:
    """How many blocks each lower tier may be asked for now, and each of its roots where it has several.

    `waits`: some block found no room in its root although its tier has some.
    """

    def __init__(self, tiers: list[int], roots: list[list[int] | None]) -> None:
        self._tiers = tiers
        self._roots = roots
        self.waits = False

    @staticmethod
    def none(lowers: Sequence[LowerTier]) -> Rooms:
        """No room at all."""
        return Rooms([0] * len(lowers), [None] * len(lowers))

    def __bool__(self) -> bool:
        """True if more can be asked for, as far as the tiers go."""
        return not self.waits and any(self._tiers)

    def take(self, lower: LowerTier, key: OffloadKey) -> bool:
        """Use up the room of one block that this tier holds. False if there is none."""
        position = lower.position - 1
        if self._tiers[position] <= 0:
            return False
        rooms = self._roots[position]
        if rooms is not None and lower.owned is not None:
            root = lower.roots.of(lower.owned.directory[key])
            if rooms[root] <= 0:
                self.waits = True
                return False
            rooms[root] -= 1
        self._tiers[position] -= 1
        return True


class Promotions:
    """Starts promotions in batches and ends them block by block: partial success is kept."""

    def __init__(self, board: Board, demotions: Demotions) -> None:
        self.board = board
        self.demotions = demotions

    def source(self, key: OffloadKey, tried: int, now: float) -> LowerTier | None:
        """The highest lower tier that may be asked for this key and was not tried (`tried` is a mask of bits)."""
        for lower in self.board.lowers:
            if not tried & lower.bit and lower.holds_key(key, now) and lower.may_load(now):
                return lower
        return None

    def rooms(self, now: float) -> Rooms:
        """How many blocks each lower tier may be asked for now; one job's worth from a tier that is being probed."""
        rooms = []
        for lower in self.board.lowers:
            probing = lower.load_breaker.allows(now) and lower.load_breaker.state is BreakerState.HALF_OPEN
            room = lower.rows_max - lower.rows_held
            rooms.append(min(room, JOB_BLOCKS, lower.plan.inflight_blocks) if probing else room)
        return Rooms(rooms, [lower.roots.rooms() if lower.roots.several else None for lower in self.board.lowers])

    def start(self, wants: Sequence[Want], now: float) -> int:
        """Reserve rows for the front of `wants` (distinct keys, none in the CPU tier) and emit the jobs.

        The wants are within `rooms`. Returns how many were started; the rest found no row.
        """
        rows = self.board.cpu.reserve([want.key for want in wants])
        by_tier: dict[int, list[int]] = {}
        for i in range(len(rows)):
            by_tier.setdefault(wants[i].lower.position, []).append(i)
            self.board.wait_for_fill(rows[i], wants[i].waiter, wants[i].index)
        for position, members in by_tier.items():
            lower = self.board.lowers[position - 1]
            size = min(JOB_BLOCKS, lower.plan.inflight_blocks)
            for part in self._by_root(lower, wants, members):
                for start in range(0, len(part), size):
                    self._send(lower, [(wants[i].key, rows[i]) for i in part[start : start + size]], now)
        return len(rows)

    @staticmethod
    def _by_root(lower: LowerTier, wants: Sequence[Want], members: list[int]) -> list[list[int]]:
        if lower.owned is None or not lower.roots.several:
            return [members]
        parts = lower.roots.split([lower.owned.directory[wants[i].key] for i in members])
        return [[members[i] for i in part] for part in parts]

    def _send(self, lower: LowerTier, blocks: list[tuple[OffloadKey, int]], now: float) -> None:
        groups: dict[int, list[tuple[OffloadKey, int]]] = {}
        for key, row in blocks:
            groups.setdefault(key_group(key), []).append((key, row))
        job = PromotionJob(self, lower, [row for members in groups.values() for _, row in members])
        transfers = []
        for members in groups.values():
            keys = tuple(key for key, _ in members)
            slots: list[int] = []
            generations: list[int] = []
            if lower.owned is not None:
                slots = [lower.owned.directory[key] for key in keys]
                generations = [lower.owned.table.generation[slot] for slot in slots]
                lower.owned.hold(slots)
                job.slots += slots
                job.generations += generations
            rows = int_array([row for _, row in members])
            transfers.append(GroupTransfer(key_group(keys[0]), keys, rows, int_array(slots), int_array(generations)))
        job.keys = [key for transfer in transfers for key in transfer.keys]
        lower.load_breaker.sent()
        job.root = lower.root_of(job.slots)
        lower.begin_in(job.root, len(blocks))
        self.board.emit(lower.position, JobKind.LOAD, transfers, now + lower.plan.timeout_seconds, job)


class PromotionJob(InFlight):
    """One load from a lower tier: filling rows, pinned slots."""

    def __init__(self, promotions: Promotions, lower: LowerTier, rows: list[int]) -> None:
        self.promotions = promotions
        self.board = promotions.board
        self.lower = lower
        self.rows = rows
        self.keys: list[OffloadKey] = []
        self.slots: list[int] = []
        self.root = 0
        self.generations: list[int] = []
        self.epoch = promotions.board.epoch

    def finish(self, result: JobResult, now: float) -> None:
        lower = self.lower
        outcomes = [outcome for group in result.outcomes for outcome in group]
        good = [i for i, outcome in enumerate(outcomes) if outcome.ok]
        bad = [i for i, outcome in enumerate(outcomes) if not outcome.ok]
        for outcome in outcomes:
            self.board.count(lower.position, outcome)
        lower.end_in(self.root, len(self.rows))
        lower.counters.loaded += len(good)
        lower.counters.load_bytes += result.bytes_moved
        lower.judge(lower.load_breaker, outcomes, now)
        self._forget_bad(outcomes, bad, now)
        if lower.owned is not None:
            lower.owned.release(self.slots)
        leaf_to_root = [self.rows[i] for i in reversed(good)]
        self.board.cpu.commit(leaf_to_root)
        ready = [row for row in leaf_to_root if self.board.cpu.table.state[row] == READY]
        self.promotions.demotions.row_ready(ready, lower.position, now)
        ready_rows = set(ready)
        self.board.fill_ended([self.rows[i] for i in good if self.rows[i] in ready_rows], True, lower.position, now)
        failed_rows = [self.rows[i] for i in range(len(outcomes)) if self.rows[i] not in ready_rows]
        self.board.cpu.abort([self.rows[i] for i in bad])
        self.board.fill_ended(failed_rows, False, lower.position, now)

    def _forget_bad(self, outcomes: Sequence[BlockOutcome], bad: Sequence[int], now: float) -> None:
        """Entries that were refused or could not be read go; a job that never ran says nothing about its entries."""
        for i in bad:
            if self.lower.owned is not None:
                if outcomes[i].status in REFUSED:
                    self.lower.owned.discard(self.slots[i], self.generations[i])
            elif self.lower.shared is not None and outcomes[i].status is BlockStatus.MISSING and not self._outdated:
                self.lower.shared.learn(self.keys[i], False, now)

    @property
    def _outdated(self) -> bool:
        return self.epoch != self.board.epoch

    def late(self, now: float) -> None:
        """What waited goes on without; the entry stays, the rows wait for their I/O."""
        self.lower.counters.late += len(self.rows)
        self.lower.late_in(self.lower.load_breaker, self.root, len(self.rows), now)
        self.board.cpu.quarantine(self.rows)
        self.board.fill_ended(self.rows, False, self.lower.position, now)

    def ended(self, now: float) -> None:
        self.lower.ended_in(self.root, len(self.rows))
        self.lower.end_in(self.root, len(self.rows))
        if self.lower.owned is not None:
            self.lower.owned.release(self.slots)
        self.board.cpu.release(self.rows)
