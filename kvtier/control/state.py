"""What the parts of the control plane share: the tiers, the jobs in flight, and who waits for which fill."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from kvtier.control.tiers.aged_tier import AgedTier
from kvtier.control.tiers.breaker import Breaker, BreakerState
from kvtier.control.tiers.counters import TierCounters
from kvtier.control.tiers.load_speed import LoadSpeed
from kvtier.control.tiers.owned_tier import OwnedTier
from kvtier.control.tiers.prefix_probe import ProbedTier
from kvtier.control.tiers.roots import Roots
from kvtier.control.tiers.shared_tier import SharedTier
from kvtier.control.tiers.store_order import StoreOrder
from kvtier.control.tiers.tier_index import TierIndex
from kvtier.control.tiers.use_ages import UseTime
from kvtier.errors import UsageError
from kvtier.options import AdmissionName
from kvtier.policy import EvictionPolicy, JournaledPolicy, RequestModels
from kvtier.policy.admission import LateAdmission
from kvtier.policy.reuse.admission import make_admission
from kvtier.policy.write_allowance import WriteAllowance
from kvtier.policy.write_pace import WritePace
from kvtier.tier.contract import Opened
from kvtier.types.jobs import BlockStatus, DropReason, GPUGroup, JobKind, JobResult, RegionFormat, RowGroup, TransferJob
from kvtier.types.keys import GroupIndex, JobId, Medium, OffloadKey
from kvtier.types.values import job_value

REFUSED = (BlockStatus.CORRUPT, BlockStatus.FAILED, BlockStatus.MISSING)
"""What a load says of an entry that is not to be tried again."""
MAX_HINTS = 1 << 20
"""Keys of a shared tier about which something is believed, at most."""
CPU_TIER = 0
"""The CPU tier's position in a stack's list of tiers below the GPU."""


@dataclass(frozen=True, slots=True)
class TierSetup:
    """What the control plane must know of one tier: its name and medium, what it offers, and its limits.

    `inflight_blocks` bounds blocks of transfers in flight; `timeout_seconds` is the deadline of one transfer. Where
    transfers are not `by_root`, each may reach several roots, and a late one counts against all of them. A tier that is
    `held_back` is not open yet: it neither loads nor stores, and `opened` says nothing of it. `probed_groups` are those
    of which a shared tier is asked for few keys of a prefix (`ProbedTier`), in calls of more than `probed_from` keys.
    `admit: predicted` keeps to `write_bytes_per_day`; a block counts as `block_bytes`. The tier keeps a token in
    `token_bytes`, with its share of each group's slots. `kind` is the tier's type, and `eviction` what its policy is
    called, for people. An owned tier retains blocks of `retained_bytes_max` at most.
    """

    name: str
    medium: Medium
    opened: Opened
    policy: str | type[EvictionPolicy] = "lru"
    write_policy: Literal["write_through", "on_evict"] = "write_through"
    inflight_blocks: int = 1024
    timeout_seconds: float = 30.0
    hit_hint_seconds: float = 30.0
    miss_hint_seconds: float = 5.0
    lookup_timeout_seconds: float = 1.0
    by_root: bool = True
    held_back: bool = False
    admit: AdmissionName = "always"
    probed_groups: frozenset[GroupIndex] = frozenset()
    probed_from: int = 0
    write_bytes_per_day: int | None = None
    block_bytes: int = 1
    token_bytes: float = 0.0
    kind: str = ""
    eviction: str = ""
    retained_bytes_max: int = 0


class LowerTier:
    """A tier below the CPU: its index, limits, health and counts.

    `owned` is the index of an owned tier, for what only slots have: reservation, eviction, room on disk. `direct` is
    the same, unless more than a key's slot decides whether the key is present.
    Its transfers hold at most `rows_max` CPU rows at once (`rows_in_flight`), those whose job is late and has
    not really ended included (`rows_late`). So a frozen tier never takes more of the CPU tier than that.
    `admission` decides which blocks the tier takes; None: every one. `chooser`: the same, if it decides as blocks are
    about to be evicted from their rows, because writes are limited. `follows`: its policy follows requests. Then rows,
    given leaf before root, are queued root first: `queue_step` is how they are walked.
    Of its write-back: `queue` has the (row, generation) of dirty rows that wait, `send_at` is when they go at the
    latest, `stores_in_flight` are the blocks that were sent, in an order that `store_order` keeps.
    `room_breaker` opens when even the places of evicted blocks are refused because the disk is full.
    What a tier recovered of an epoch before `epoch` is not reachable. `models` are those of its stack.
    """

    def __init__(
        self, position: int, plan: TierSetup, rows_max: int, epoch: int = 0, models: RequestModels | None = None
    ) -> None:
        self.position = position
        self.bit = 1 << (position - 1)
        self.setup = plan
        self.name = plan.name
        self.on_evict = plan.write_policy == "on_evict"
        self.rows_max = rows_max
        self.rows_in_flight = 0
        self.rows_late = 0
        self.roots = Roots(plan.opened.space if plan.by_root else None, rows_max)
        self.owned: OwnedTier | None = None
        if plan.opened.space is not None:
            ages = plan.opened.ages
            tier_class = OwnedTier if ages is None or ages.max_age_seconds is None else AgedTier
            self.owned = tier_class(plan.name, plan.opened.space, plan.policy, models, ages)
            self.owned.retained.max_bytes = plan.retained_bytes_max
            self.owned.restore(plan.opened.recovered)
            if plan.opened.epoch < epoch:
                self.owned.reset()
                self.owned.take_changes()  # they were never published
        self.direct = None if isinstance(self.owned, AgedTier) else self.owned
        self.follows = self.owned is not None and self.owned.follower is not None
        self.queue_step = -1 if self.follows else 1
        self.index: TierIndex = self.owned or _shared_tier(plan)
        self.allowance: WriteAllowance | None = None
        if plan.write_bytes_per_day is not None:
            self.allowance = WriteAllowance(WritePace(plan.write_bytes_per_day), plan.block_bytes)
        limited = self.on_evict and self.allowance is not None
        self.admission = make_admission(
            plan.admit, models or RequestModels(), self.allowance, 4 * rows_max if limited else 0, self.follows
        )
        self.chooser = self.admission if limited and isinstance(self.admission, LateAdmission) else None
        self.queue: deque[tuple[int, int]] = deque()
        self.send_at = math.inf
        self.stores_in_flight = 0
        self.store_order = StoreOrder(self.owned)
        self.load_breaker = Breaker()
        self.store_breaker = Breaker()
        self.room_breaker = Breaker(threshold=1)
        self.counters = TierCounters()
        self.speed = LoadSpeed()
        if plan.held_back:
            self.hold_back()

    def hold_back(self) -> None:
        """From here on the tier neither loads nor stores."""
        self.load_breaker.hold_back()
        self.store_breaker.hold_back()

    def evicted(self, keys: Sequence[OffloadKey]) -> None:
        """The tier has these blocks no more."""
        if self.admission is not None:
            self.admission.evicted(keys)

    @property
    def held_back(self) -> bool:
        """True if the tier neither loads nor stores, whatever its health."""
        return self.store_breaker.state is BreakerState.HELD_BACK

    @property
    def admits_all(self) -> bool:
        """True if every block is written: there is no admission, and a policy that does not follow requests."""
        return self.admission is None and not self.follows

    @property
    def stuck(self) -> bool:
        """True while late transfers hold all the rows this tier may hold: until one ends it counts as down."""
        return self.rows_late >= self.rows_max

    def may_load(self, now: float) -> bool:
        """True if the tier may be asked for blocks, as far as its health goes."""
        if self.rows_late >= self.rows_max:
            return False
        return self.load_breaker.state is BreakerState.CLOSED or self.load_breaker.allows(now)

    def may_store(self, now: float) -> bool:
        """True if the tier may be sent blocks, as far as its health and the room on its disk go."""
        if self.rows_late >= self.rows_max:
            return False
        if self.store_breaker.state is BreakerState.CLOSED is self.room_breaker.state:
            return True
        healthy, roomy = self.store_breaker.allows(now), self.room_breaker.allows(now)
        return healthy and roomy

    @property
    def refusal(self) -> DropReason | None:
        """Why stores are given up at once; None if they may go, or wait for one that tries the tier out."""
        if self.held_back:
            return DropReason.HELD_BACK
        if self.rows_late >= self.rows_max or self.store_breaker.state is BreakerState.OPEN:
            return DropReason.TIER_DOWN
        return DropReason.DISK_FULL if self.room_breaker.state is BreakerState.OPEN else None

    @property
    def disk_full(self) -> bool:
        """True while some disk of the tier has no room for more regions or slots."""
        return self.owned is not None and self.owned.placement.full.any

    def holds_key(self, key: OffloadKey, now: float) -> bool:
        """True if a load of this key from here may be tried."""
        if self.index.presence(key, now) is False:
            return False
        return not (self.roots.any_silent and self.silent(key))

    def silent(self, key: OffloadKey) -> bool:
        """True if the key, which is here, lies in a root that is left alone."""
        return self.roots.any_silent and any(map(self.roots.silent, self.index.slots((key,))))

    @property
    def no_slot_reason(self) -> DropReason:
        """Why no slot is to be had in an owned tier."""
        if self.disk_full:
            return DropReason.DISK_FULL
        one_size = self.owned is None or self.owned.placement.one_size
        return DropReason.NO_SLOT if one_size else DropReason.NO_REGION


def _shared_tier(plan: TierSetup) -> SharedTier:
    """What is believed about the keys of a shared tier."""
    seconds = (plan.hit_hint_seconds, plan.miss_hint_seconds, plan.lookup_timeout_seconds)
    if plan.probed_groups:
        tier = ProbedTier(plan.name, *seconds, MAX_HINTS, plan.probed_groups)
        tier.probed_from = plan.probed_from
        return tier
    return SharedTier(plan.name, *seconds, MAX_HINTS)


def lower_tiers(
    setups: Sequence[TierSetup], num_rows: int, epoch: int, models: RequestModels | None = None
) -> list[LowerTier]:
    """The tiers below a CPU tier of `num_rows` rows, in the namespace's `epoch`. Takes long for a large tier.

    `models` are those of the stack, which may be in use in another thread (see `RequestPolicy`).
    """
    rows_max = max(1, num_rows // 4)
    return [LowerTier(position, setup, rows_max, epoch, models) for position, setup in enumerate(setups, start=1)]


class AwaitedKeys:
    """The blocks that loads wait for without a transfer under way: one for each load, which its age names.

    `on_change` is called for a key that enters the CPU tier, and when other lower tiers have it than before.
    """

    def __init__(self) -> None:
        self.ages: dict[OffloadKey, dict[int, None]] = {}
        self._keys: dict[int, OffloadKey] = {}
        self._changed: dict[int, None] = {}

    def add(self, key: OffloadKey, age: int) -> None:
        """A load waits for this block."""
        self._keys[age] = key
        self.ages.setdefault(key, {})[age] = None

    def discard(self, age: int) -> None:
        """A load waits no more."""
        key = self._keys.pop(age)
        ages = self.ages[key]
        del ages[age]
        if not ages:
            del self.ages[key]
        self._changed.pop(age, None)

    def on_change(self, keys: Iterable[OffloadKey]) -> None:
        """Something became of these blocks. Call it only if there are any `ages`."""
        for key in keys:
            if key in self.ages:
                self._changed.update(self.ages[key])

    def take_changed(self) -> list[int]:
        """The ages of loads for whose blocks something has changed."""
        if not self._changed:
            return []
        changed, self._changed = list(self._changed), {}
        return changed


class FillWaiter(ABC):
    """Waits for filling rows."""

    @abstractmethod
    def filled(self, index: int, row: int | None, position: int, now: float) -> None:
        """The fill for the block at `index` ended, once: in this row, or with None if it failed.

        `position` is the lower tier that filled it, 0 for a store.
        """


class InFlight(ABC):
    """A job handed to the data plane. Exactly one of: `finish`; or `late`, later followed by `ended`."""

    @abstractmethod
    def finish(self, result: JobResult, now: float) -> None:
        """The job ended in time."""

    def late(self, now: float) -> None:
        """The job passed its deadline; its I/O goes on and its slots must not be reused."""
        raise AssertionError(f"a {type(self).__name__} has no deadline")

    def ended(self, now: float) -> None:
        """The I/O of a late job has really ended."""
        raise AssertionError(f"a {type(self).__name__} has no deadline")


@job_value
class Emission:
    """A job for the tier at `position` (0: CPU)."""

    position: int
    job: TransferJob


OwnerT = TypeVar("OwnerT", bound=InFlight)


class JobTable(Generic[OwnerT]):
    """Jobs handed to the data plane, and the owner of each until its I/O has ended."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.outbox: list[Emission] = []
        self.running: dict[JobId, OwnerT] = {}
        self.late_jobs: dict[JobId, OwnerT] = {}
        self._next_job = 1

    def emit(
        self,
        position: int,
        kind: JobKind,
        groups: tuple[GPUGroup | RowGroup, ...],
        deadline: float | None,
        owner: OwnerT,
        formats: tuple[RegionFormat, ...] = (),
    ) -> JobId:
        """Hand a job to the data plane; `owner` is called when it ends."""
        job = TransferJob(JobId(self._next_job), kind, groups, deadline, self.epoch, formats)
        self._next_job += 1
        self.running[job.job_id] = owner
        self.outbox.append(Emission(position, job))
        return job.job_id

    def take_jobs(self) -> list[Emission]:
        """The jobs to run, each once."""
        jobs, self.outbox = self.outbox, []
        return jobs

    def finish(self, result: JobResult, now: float) -> OwnerT:
        """A job ended in time; returns its owner."""
        owner = self.running.pop(result.job_id, None)
        if owner is None:
            raise self._unknown(result.job_id)
        owner.finish(result, now)
        return owner

    def late(self, job_id: JobId, now: float) -> OwnerT:
        """A job passed its deadline; `ended` follows when its I/O has ended. Returns its owner."""
        owner = self.running.pop(job_id, None)
        if owner is None:
            raise self._unknown(job_id)
        self.late_jobs[job_id] = owner
        owner.late(now)
        return owner

    def ended(self, job_id: JobId, now: float) -> None:
        """The I/O of a late job has ended, however it ended."""
        owner = self.late_jobs.pop(job_id, None)
        if owner is None:
            raise self._unknown(job_id)
        owner.ended(now)

    @staticmethod
    def _unknown(job_id: JobId) -> UsageError:
        return UsageError(f"job {job_id} is not in flight")


class ControlState(JobTable[InFlight]):
    """State shared by loads, stores, promotions, demotions and reservations. No logic of its own beyond bookkeeping.

    `epoch` is the namespace's, which the jobs carry; `resets` counts those of this session. `ended_ages` are those of
    the engine's jobs of which every block got an outcome since the last step, `filled_ages` those of requests for which
    a fill ended, or that were stopped. `awaited` are the blocks that loads wait for. `joining`: the lower tiers are
    held back and may join yet. `indexes` are those of the tiers that are not held back. `models` are what the
    tiers' policies learn from requests; there are none if no policy follows them. `followers`: the owned tiers, and
    their policies, that do.
    """

    def __init__(self, cpu: TierSetup, lowers: Sequence[TierSetup]) -> None:
        assert cpu.opened.space is not None
        self.cpu_setup = cpu
        self.models = RequestModels([setup.policy for setup in (cpu, *lowers)])
        self.cpu = OwnedTier(cpu.name, cpu.opened.space, cpu.policy, self.models)
        self.cpu.placement.format_all()
        rows = len(self.cpu.table) * 3 // 4  # the others are enough for loads and stores to go on
        self.cpu.retained.max_bytes = min(cpu.retained_bytes_max, rows * cpu.opened.space.slot_bytes[0])
        self.cpu_counters = TierCounters()
        self.use_time = UseTime()
        super().__init__(max((plan.opened.epoch for plan in lowers), default=0))
        self.resets = 0
        self.fills: dict[int, list[tuple[FillWaiter, int]]] = {}
        self.shortage = 0
        self.filled_ages: list[int] = []
        self.ended_ages: list[int] = []
        self.awaited = AwaitedKeys()
        self.num_rows = len(self.cpu.table)
        self.num_groups = len(cpu.opened.space.slot_bytes)
        self.joining = any(plan.held_back for plan in lowers)
        self.lowers = lower_tiers(lowers, self.num_rows, self.epoch, self.models)
        self.indexes: list[TierIndex] = []
        self.owned_tiers: list[OwnedTier] = []
        self.followers: list[tuple[OwnedTier, JournaledPolicy]] = []
        self.all_owned = True
        self.aged_tiers: list[AgedTier] = []
        self.reclaim_at = math.inf
        self.list_indexes()

    def list_indexes(self) -> None:
        """Lower tiers were taken in or are held back."""
        self.indexes = [self.cpu, *(lower.index for lower in self.lowers if not lower.held_back)]
        self.owned_tiers = [index for index in self.indexes if isinstance(index, OwnedTier)]
        self.followers = [(tier, tier.follower) for tier in self.owned_tiers if tier.follower is not None]
        for tier in self.owned_tiers:
            tier.uses.time = self.use_time
        self.all_owned = len(self.owned_tiers) == len(self.indexes)
        self.aged_tiers = [index for index in self.indexes if isinstance(index, AgedTier)]
        self.reclaim_at = -math.inf if self.aged_tiers else math.inf

    def reclaim(self, now: float) -> None:
        """Free slots of blocks that are too old, in tiers for which it is time for that. `reclaim_at` is the next."""
        for tier in self.aged_tiers:
            tier.reclaim(now)
        self.reclaim_at = min((tier.reclaim_at for tier in self.aged_tiers), default=math.inf)

    def join(self, lowers: list[LowerTier], epoch: int) -> None:
        """The lower tiers are open: these take the places of those that were held back."""
        for held_back, lower in zip(self.lowers, lowers, strict=True):
            lower.counters = held_back.counters
        self.lowers, self.epoch, self.joining = lowers, epoch, False
        self.list_indexes()

    def hold_back(self) -> None:
        """No lower tier loads or stores from here on, and none will join. What they hold is not reachable."""
        self.joining = False
        for lower in self.lowers:
            lower.hold_back()
            lower.index.reset()
        self.list_indexes()

    def counters(self, position: int) -> TierCounters:
        return self.cpu_counters if position == CPU_TIER else self.lowers[position - 1].counters

    def wait_for_fill(self, row: int, waiter: FillWaiter, index: int) -> None:
        """Have `waiter.filled` called when the fill of this row ends."""
        self.fills.setdefault(row, []).append((waiter, index))

    def fill_ended(self, rows: Sequence[int], success: bool, position: int, now: float) -> None:
        """Call all waiters of these rows. Rows that succeeded are READY when this is called."""
        for row in rows:
            for waiter, index in self.fills.pop(row, ()):
                waiter.filled(index, row if success else None, position, now)
