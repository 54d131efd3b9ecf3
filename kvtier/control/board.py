"""What the parts of the control plane share: the tiers, the jobs under way, and who waits for which fill."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from kvtier.control.breaker import Breaker, BreakerState
from kvtier.control.roots import Roots
from kvtier.control.shared import SharedTier
from kvtier.control.tier import OwnedTier
from kvtier.jobs import BlockOutcome, BlockStatus, DropReason, GroupTransfer, JobKind, JobResult, RegionCut, TransferJob
from kvtier.keys import JobId, Medium, OffloadKey
from kvtier.loadstore import Opened

CPU_TIER = 0
"""The CPU tier's position in a stack's list of tiers below the GPU."""


@dataclass(frozen=True, slots=True)
class TierPlan:
    """What the control plane must know of one tier: its name and medium, what it offers, and its limits.

    `inflight_blocks` bounds blocks of transfers under way; `timeout_seconds` is the deadline of one transfer.
    """

    name: str
    medium: Medium
    opened: Opened
    policy: str = "lru"
    write_policy: Literal["write_through", "on_evict"] = "write_through"
    inflight_blocks: int = 1024
    timeout_seconds: float = 30.0
    hint_seconds: float = 30.0
    lookup_timeout_seconds: float = 1.0


@dataclass(slots=True)
class TierCounters:
    """Counts by outcome since the stack opened; bytes are payload."""

    hits: int = 0
    loaded: int = 0
    load_bytes: int = 0
    stored: int = 0
    store_bytes: int = 0
    failed: int = 0
    corrupt: int = 0
    missing: int = 0
    late: int = 0
    dropped: dict[DropReason, int] = field(default_factory=dict)

    def drop(self, reason: DropReason, count: int = 1) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + count


class LowerTier:
    """A tier below the CPU: an owned one with its slots, or a shared one with hints.

    Its transfers hold at most `rows_max` CPU rows at once: under way (`rows_held`), those whose job is late and has
    not really ended included (`rows_stuck`). So a frozen tier never takes more of the CPU tier than that.
    `room_breaker` opens when even the places of evicted blocks are refused because the disk is full.
    """

    def __init__(self, position: int, plan: TierPlan, rows_max: int) -> None:
        self.position = position
        self.bit = 1 << (position - 1)
        self.plan = plan
        self.name = plan.name
        self.on_evict = plan.write_policy == "on_evict"
        self.rows_max = rows_max
        self.rows_held = 0
        self.rows_stuck = 0
        self.roots = Roots(plan.opened.space, rows_max)
        self.owned: OwnedTier | None = None
        self.shared: SharedTier | None = None
        if plan.opened.space is None:
            self.shared = SharedTier(plan.name, plan.hint_seconds, plan.lookup_timeout_seconds, max_hints=1 << 20)
        else:
            self.owned = OwnedTier(plan.name, plan.opened.space, plan.policy)
            self.owned.restore(plan.opened.recovered)
        self.load_breaker = Breaker()
        self.store_breaker = Breaker()
        self.room_breaker = Breaker(threshold=1)
        self.counters = TierCounters()

    @property
    def stuck(self) -> bool:
        """True while late transfers hold all the rows this tier may hold: until one ends it counts as down."""
        return self.rows_stuck >= self.rows_max

    def may_load(self, now: float) -> bool:
        """True if the tier may be asked for blocks, as far as its health goes."""
        return not self.stuck and self.load_breaker.allows(now)

    def may_store(self, now: float) -> bool:
        """True if the tier may be sent blocks, as far as its health and the room on its disk go."""
        healthy, roomy = self.store_breaker.allows(now), self.room_breaker.allows(now)
        return healthy and roomy and not self.stuck

    @property
    def refusal(self) -> DropReason | None:
        """Why stores are given up at once; None if they may go, or wait for one that tries the tier out."""
        if self.stuck or self.store_breaker.state is BreakerState.OPEN:
            return DropReason.TIER_DOWN
        return DropReason.DISK_FULL if self.room_breaker.state is BreakerState.OPEN else None

    @property
    def disk_full(self) -> bool:
        """True while some disk of the tier has no room for more regions or slots."""
        return self.owned is not None and self.owned.placement.full.any

    def store_sent(self) -> None:
        """A store was sent."""
        self.store_breaker.sent()
        self.room_breaker.sent()

    def holds_key(self, key: OffloadKey, now: float) -> bool:
        """True if a load of this key from here may be tried."""
        if self.owned is not None:
            slot = self.owned.ready(key)
            return slot is not None and not self.roots.silent(slot)
        assert self.shared is not None
        return self.shared.presence(key, now) is not False

    def root_of(self, slots: Sequence[int] | None) -> int:
        """The root that a transfer over these slots belongs to: all of them lie in one."""
        return self.roots.of(slots[0]) if slots else 0

    def late_in(self, breaker: Breaker, root: int, count: int, now: float) -> None:
        """A transfer is late. That speaks against the tier unless another of its roots is not silent."""
        self.rows_stuck += count
        self.roots.begin_late(root, count)
        if not self.roots.speaks:
            breaker.failed(now)

    def ended_in(self, root: int, count: int) -> None:
        """A late transfer has really ended."""
        self.rows_stuck -= count
        self.roots.end_late(root, count)

    def begin_in(self, root: int, count: int) -> None:
        """A transfer begins to hold rows."""
        self.rows_held += count
        self.roots.begin(root, count)

    def end_in(self, root: int, count: int) -> None:
        """A transfer no longer holds its rows."""
        self.rows_held -= count
        self.roots.end(root, count)

    def judge(self, breaker: Breaker, outcomes: Sequence[BlockOutcome], now: float) -> None:
        """Tell a breaker how a job ended: errors, and lateness before it even began, speak against the tier."""
        if any(outcome.status in (BlockStatus.FAILED, BlockStatus.LATE) for outcome in outcomes):
            breaker.failed(now)
        else:
            breaker.succeeded()


class FillWaiter(Protocol):
    """Somebody who waits for a filling row: told once, with success or not, and by which lower tier (0: a store)."""

    def filled(self, index: int, row: int | None, position: int, now: float) -> None: ...


class InFlight(ABC):
    """A job handed to the data plane. Exactly one of: `finish`; or `late`, later followed by `ended`."""

    @abstractmethod
    def finish(self, result: JobResult, now: float) -> None:
        """The job ended in time."""

    @abstractmethod
    def late(self, now: float) -> None:
        """The job passed its deadline; its I/O goes on and its slots must not be reused."""

    @abstractmethod
    def ended(self, now: float) -> None:
        """The I/O of a late job has really ended."""


@dataclass(frozen=True, slots=True)
class Emission:
    """A job for the tier at `position` (0: CPU)."""

    position: int
    job: TransferJob


class Board:
    """State shared by loads, stores, promotions, demotions and reservations. No logic of its own beyond bookkeeping."""

    def __init__(self, cpu: TierPlan, lowers: Sequence[TierPlan]) -> None:
        assert cpu.opened.space is not None
        self.cpu_plan = cpu
        self.cpu = OwnedTier(cpu.name, cpu.opened.space, cpu.policy)
        self.cpu.placement.cut_all()
        rows_max = max(1, len(self.cpu.table) // 4)
        self.lowers = [LowerTier(position, plan, rows_max) for position, plan in enumerate(lowers, start=1)]
        self.cpu_counters = TierCounters()
        self.epoch = max((plan.opened.epoch for plan in lowers), default=0)
        self.outbox: list[Emission] = []
        self.running: dict[JobId, InFlight] = {}
        self.late_jobs: dict[JobId, InFlight] = {}
        self.finished: list[JobResult] = []
        self.fills: dict[int, list[tuple[FillWaiter, int]]] = {}
        self.shortage = 0
        self._next_job = 1

    @property
    def num_rows(self) -> int:
        return len(self.cpu.table)

    def next_job_id(self) -> JobId:
        job_id = JobId(self._next_job)
        self._next_job += 1
        return job_id

    def emit(
        self,
        position: int,
        kind: JobKind,
        groups: Sequence[GroupTransfer],
        deadline: float | None,
        owner: InFlight,
        cuts: tuple[RegionCut, ...] = (),
    ) -> None:
        """Hand a job to the data plane; `owner` will be told how it ended."""
        job = TransferJob(self.next_job_id(), kind, tuple(groups), deadline, self.epoch, cuts)
        self.running[job.job_id] = owner
        self.outbox.append(Emission(position, job))

    def counters(self, position: int) -> TierCounters:
        return self.cpu_counters if position == CPU_TIER else self.lowers[position - 1].counters

    def wait_for_fill(self, row: int, waiter: FillWaiter, index: int) -> None:
        """Be told when a filling row ends its fill."""
        self.fills.setdefault(row, []).append((waiter, index))

    def fill_ended(self, rows: Sequence[int], success: bool, position: int, now: float) -> None:
        """Tell everybody who waits for these rows. Rows that succeeded are READY when this is called."""
        for row in rows:
            for waiter, index in self.fills.pop(row, ()):
                waiter.filled(index, row if success else None, position, now)

    def count(self, position: int, outcome: BlockOutcome) -> None:
        """Count one block's outcome by place and reason."""
        counters = self.counters(position)
        match outcome.status:
            case "failed":
                counters.failed += 1
            case "corrupt":
                counters.corrupt += 1
            case "missing":
                counters.missing += 1
            case "late":
                counters.late += 1
            case "dropped":
                counters.drop(outcome.reason or DropReason.BACKLOG)
            case _:
                pass
