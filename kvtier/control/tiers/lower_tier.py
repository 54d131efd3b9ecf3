"""A tier below the CPU: its index, limits, health and counts, and its transfers by root.

Several roots share the rows their tier may hold, so that one that hangs never takes those of the others. A root with a
late transfer is *silent* until that has really ended: nothing is stored there, and what it holds counts as not there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from kvtier.control.tiers.aged_tier import AgedTier
from kvtier.control.tiers.breaker import Breaker, BreakerState
from kvtier.control.tiers.owned_tier import OwnedTier
from kvtier.control.tiers.tier_index import TierIndex
from kvtier.options import AdmissionName
from kvtier.policy import EvictionPolicy, RequestModels, make_admission, make_budgeted_admission
from kvtier.tier.contract import Opened, SlotSpace
from kvtier.types.jobs import BlockOutcome, BlockStatus, DropReason, SkipReason
from kvtier.types.keys import GroupIndex, Medium, OffloadKey

if TYPE_CHECKING:
    from kvtier.control.tiers.shared_tier import SharedTier
    from kvtier.policy.admission import Admission
    from kvtier.policy.reuse.admission import BudgetedAdmission

MAX_HINTS = 1 << 20
"""Keys of a shared tier about which something is believed, at most."""
WORST_FIRST = (BreakerState.HELD_BACK, BreakerState.OPEN, BreakerState.HALF_OPEN)
ORDER_JOBS = 16
"""Stores of one tier that are kept in the order they were sent."""
SPEED_WEIGHT = 0.5
"""The weight of earlier jobs beside one more."""


@dataclass(frozen=True, slots=True)
class TierSpec:
    """A tier as the control plane needs it: its name and medium, what it opened with, and its limits.

    `inflight_blocks` bounds blocks of transfers in flight, `store_blocks` those of stores among them; `timeout_seconds`
    is the deadline of one transfer. Where transfers are not `by_root`, each may reach several roots, and a late one
    counts against all of them. A tier that is `held_back` is not open yet: it neither loads nor stores, and `opened`
    says nothing of it. `probed_groups` are those of which a shared tier is asked for few keys of a prefix
    (`ProbedTier`), in calls of more than `probed_from` keys.
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

    @property
    def store_blocks(self) -> int:
        """Stores leave a quarter to loads, so that a load does not wait for the end of a store."""
        return self.inflight_blocks - self.inflight_blocks // 4


@dataclass(slots=True)
class TierCounters:
    """Counts by outcome since the stack opened; bytes are payload.

    `looked_up` blocks were looked up in the tier because no tier above has them, and `missed` are those of them that it
    does not have either. `written_bytes` is the room on the tier's device of what was stored in it, with headers and
    padding. `skipped` blocks were not sent to the tier, and are not lost by it: `not_admitted` counts a
    block each time it was ready and not admitted, also one that was written later. `computed_sooner` blocks were found
    and not loaded, because the tier is slower than the engine computes them. `computed_again` blocks came from the
    engine once more after they were not admitted: hits that the admission cost.
    """

    looked_up: int = 0
    missed: int = 0
    hits: int = 0
    loaded: int = 0
    load_bytes: int = 0
    stored: int = 0
    store_bytes: int = 0
    written_bytes: int = 0
    failed: int = 0
    corrupt: int = 0
    missing: int = 0
    late: int = 0
    computed_sooner: int = 0
    computed_again: int = 0
    dropped: dict[DropReason, int] = field(default_factory=dict)
    skipped: dict[SkipReason, int] = field(default_factory=dict)

    def look_up(self, looked_up: int, missed: int) -> None:
        """Count the blocks of one lookup."""
        self.looked_up += looked_up
        self.missed += missed

    def drop(self, reason: DropReason, count: int = 1) -> None:
        """Count blocks that were not stored."""
        self.dropped[reason] = self.dropped.get(reason, 0) + count

    def skip(self, reason: SkipReason, count: int = 1) -> None:
        """Count blocks that need not be stored."""
        self.skipped[reason] = self.skipped.get(reason, 0) + count

    def count(self, outcome: BlockOutcome) -> None:
        """Count one block's outcome by reason, unless it succeeded or was cancelled."""
        match outcome.status:
            case BlockStatus.FAILED:
                self.failed += 1
            case BlockStatus.CORRUPT:
                self.corrupt += 1
            case BlockStatus.MISSING:
                self.missing += 1
            case BlockStatus.LATE:
                self.late += 1
            case BlockStatus.DROPPED:
                self.drop(outcome.reason or DropReason.BACKLOG)
            case _:
                pass


class LoadSpeed:
    """Seconds a block of the loads that ended, later ones counting more. Jobs count as served one after another.

    A job that was slower than the one before it counts as fast as that one: one that a busy machine has held up says
    nothing, two in a row do.
    """

    def __init__(self) -> None:
        self._blocks = 0.0
        self._seconds = 0.0
        self._ended_at = 0.0
        self._last = math.inf

    def on_end(self, blocks: int, sent_at: float, now: float) -> None:
        """A load of this number of blocks was sent and has ended, or is late."""
        each = max(0.0, now - max(sent_at, self._ended_at)) / blocks
        self._seconds = self._seconds * SPEED_WEIGHT + min(each, self._last) * blocks
        self._blocks = self._blocks * SPEED_WEIGHT + blocks
        self._ended_at, self._last = now, each

    def seconds(self, blocks: int) -> float:
        """The time for this number of blocks, those in flight included; 0 before any load has ended."""
        return blocks * self._seconds / self._blocks if self._blocks else 0.0


class SentStore(Protocol):
    """A store as its order needs it: the (slot, generation) of what it stored so far, and whether it is over."""

    stored: list[tuple[int, int]]
    over: bool


class StoreOrder:
    """The last stores sent to one tier."""

    def __init__(self, owned: OwnedTier | None) -> None:
        self._owned = owned
        self._line: deque[SentStore] = deque()

    def on_send(self, job: SentStore) -> None:
        self._line.append(job)
        if len(self._line) > ORDER_JOBS:
            self._line.popleft()

    def on_end(self, job: SentStore) -> None:
        """The job is over. Jobs that were sent after it and ended before it hold what is more recent all the same."""
        line, owned = self._line, self._owned
        if owned is not None and job in line:
            for later in list(line)[line.index(job) + 1 :]:
                owned.reorder([slot for slot, generation in later.stored if owned.has(slot, generation)])
        job.over = True
        while line and line[0].over:
            line.popleft()


class Roots:
    """Rows held and late by root. A tier with one root, or without slots, has one that is never silent."""

    def __init__(self, space: SlotSpace | None, rows_max: int) -> None:
        counts = space.regions_by_root if space is not None else (1,)
        self._per_region = space.slots_per_region if space is not None else 1
        self._root_of_region = [root for root, count in enumerate(counts) for _ in range(count)]
        self.several = len(counts) > 1
        self.share = max(1, rows_max // len(counts))
        self.held = [0] * len(counts)
        self.late = [0] * len(counts)
        self.any_silent = False

    def of(self, slot: int) -> int:
        """The root a slot lies in."""
        return self._root_of_region[slot // self._per_region] if self.several else 0

    def silent(self, slot: int) -> bool:
        """True if the root of this slot is left alone."""
        return self.any_silent and self.late[self.of(slot)] > 0

    @property
    def speaks(self) -> bool:
        """True if lateness in one root says nothing about the tier: another root is not silent."""
        return self.several and not all(self.late)

    def rooms(self) -> list[int]:
        """The rows that transfers of each root may yet hold."""
        return [0 if late else self.share - held for late, held in zip(self.late, self.held, strict=True)]

    @property
    def room(self) -> int:
        """The rows that transfers of all roots may yet hold."""
        return sum(self.rooms())

    def limits(self, count: int) -> list[int] | None:
        """The rooms of the roots if they keep any of `count` blocks from going to any root, else None."""
        if not self.several:
            return None
        rooms = self.rooms()
        return rooms if min(rooms) < count else None

    def split(self, slots: Sequence[int]) -> list[list[int]]:
        """Positions of slots by root, without the roots that have none: a transfer is one root's alone."""
        if not self.several:
            return [list(range(len(slots)))]
        parts: list[list[int]] = [[] for _ in self.held]
        for i, slot in enumerate(slots):
            parts[self.of(slot)].append(i)
        return [part for part in parts if part]

    def begin_late(self, root: int, count: int) -> None:
        """A transfer is late."""
        self.late[root] += count
        self.any_silent = self.several

    def end_late(self, root: int, count: int) -> None:
        """A late transfer has really ended."""
        self.late[root] -= count
        self.any_silent = self.several and any(self.late)


class LowerTier:
    """A tier below the CPU: its index, limits, health and counts.

    `owned` is the index of an owned tier, for what only slots have: reservation, eviction, room on disk. `direct` is
    the same, unless more than a key's slot decides whether the key is present.
    Its transfers hold at most `rows_max` CPU rows at once (`rows_in_flight`), those whose job is late and has
    not really ended included (`rows_late`). So a frozen tier never takes more of the CPU tier than that.
    `admission` decides which blocks the tier takes; None: every one. `budgeted`: the same, if writes are limited, and
    `late_admission` if it then decides as blocks are about to be evicted from their rows. `is_request_aware`: its
    policy follows requests. Then rows, given leaf first, are queued root first: `queue_step` is how they are walked.
    Of its write-back: `queue` has the (row, generation) of dirty rows that wait, `send_at` is when they go at the
    latest, `stores_in_flight` are the blocks that were sent, in an order that `store_order` keeps.
    `room_breaker` opens when even the places of evicted blocks are refused because the disk is full.
    What a tier recovered of an epoch before `epoch` is not reachable. `models` are those of its stack.
    """

    def __init__(
        self, position: int, spec: TierSpec, rows_max: int, epoch: int = 0, models: RequestModels | None = None
    ) -> None:
        self.position = position
        self.bit = 1 << (position - 1)
        self.spec = spec
        self.name = spec.name
        self.on_evict = spec.write_policy == "on_evict"
        self.rows_max = rows_max
        self.rows_in_flight = 0
        self.rows_late = 0
        self.roots = Roots(spec.opened.space if spec.by_root else None, rows_max)
        self.owned = _owned_tier(spec, epoch, models)
        self.direct = None if isinstance(self.owned, AgedTier) else self.owned
        self.is_request_aware = self.owned is not None and self.owned.request_policy is not None
        self.queue_step = -1 if self.is_request_aware else 1
        self.lookup_breaker: Breaker | None = None
        if self.owned is not None:
            self.index: TierIndex = self.owned
        else:
            shared = _shared_tier(spec)
            self.index, self.lookup_breaker = shared, shared.lookup_breaker
        self.admission: Admission | None = None
        self.budgeted: BudgetedAdmission | None = None
        models, daily = models or RequestModels(), spec.write_bytes_per_day
        if spec.admit == "predicted" and daily is not None:
            late_rows = 4 * rows_max if self.on_evict else 0
            self.admission = self.budgeted = make_budgeted_admission(models, daily, spec.block_bytes, late_rows)
        else:
            self.admission = make_admission(spec.admit, models, self.is_request_aware)
        self.late_admission = self.budgeted if self.on_evict else None
        self.queue: deque[tuple[int, int]] = deque()
        self.send_at = math.inf
        self.stores_in_flight = 0
        self.store_order = StoreOrder(self.owned)
        self.load_breaker = Breaker()
        self.store_breaker = Breaker()
        self.room_breaker = Breaker(threshold=1)
        self.counters = TierCounters()
        self.speed = LoadSpeed()
        if spec.held_back:
            self.hold_back()

    def hold_back(self) -> None:
        """From here on the tier neither loads nor stores."""
        self.load_breaker.hold_back()
        self.store_breaker.hold_back()

    def take_over(self, held_back: LowerTier) -> None:
        """Go on with the counts and the write budget of the tier that was held back in the place of this one."""
        self.counters = held_back.counters
        if self.budgeted is not None and held_back.budgeted is not None:
            self.budgeted.budget = held_back.budgeted.budget

    @property
    def held_back(self) -> bool:
        """True if the tier neither loads nor stores, whatever its health."""
        return self.store_breaker.state is BreakerState.HELD_BACK

    @property
    def admits_all(self) -> bool:
        """True if every block is written: there is no admission, and a policy that does not follow requests."""
        return self.admission is None and not self.is_request_aware

    @property
    def stuck(self) -> bool:
        """True while late transfers hold all the rows this tier may hold: until one ends it counts as down."""
        return self.rows_late >= self.rows_max

    @property
    def breakers(self) -> dict[str, Breaker]:
        """The breakers by what they refuse: `load`, `store`, and `lookup` of a shared tier."""
        found = {"load": self.load_breaker, "store": self.store_breaker}
        if self.lookup_breaker is not None and not self.held_back:
            found["lookup"] = self.lookup_breaker
        return found

    @property
    def health(self) -> BreakerState:
        """The worst of the breakers: held back, open, half-open, closed. I/O that is stuck counts as open."""
        if self.stuck and not self.held_back:
            return BreakerState.OPEN
        states = {breaker.state for breaker in self.breakers.values()}
        return next((state for state in WORST_FIRST if state in states), BreakerState.CLOSED)

    @property
    def health_text(self) -> str:
        """The state of all breakers, or that of each: `load closed, store closed, lookup open`."""
        if self.stuck and not self.held_back:
            return f"{BreakerState.OPEN}: I/O is stuck"
        states = {what: breaker.state.value for what, breaker in self.breakers.items()}
        return states["load"] if len(set(states.values())) == 1 else ", ".join(map(" ".join, states.items()))

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


def _owned_tier(spec: TierSpec, epoch: int, models: RequestModels | None) -> OwnedTier | None:
    if spec.opened.space is None:
        return None
    ages = spec.opened.ages
    tier_class = OwnedTier if ages is None or ages.max_age_seconds is None else AgedTier
    owned = tier_class(spec.name, spec.opened.space, spec.policy, models, ages)
    owned.retained.max_bytes = spec.retained_bytes_max
    owned.restore(spec.opened.recovered)
    if spec.opened.epoch < epoch:
        owned.reset()
        owned.take_changes()  # they were never published
    return owned


def _shared_tier(spec: TierSpec) -> SharedTier:
    """The index of a shared tier."""
    seconds = (spec.hit_hint_seconds, spec.miss_hint_seconds, spec.lookup_timeout_seconds)
    if spec.probed_groups:
        from kvtier.control.tiers.prefix_probe import ProbedTier

        tier = ProbedTier(spec.name, *seconds, MAX_HINTS, spec.probed_groups)
        tier.probed_from = spec.probed_from
        return tier
    from kvtier.control.tiers.shared_tier import SharedTier

    return SharedTier(spec.name, *seconds, MAX_HINTS)


def lower_tiers(
    specs: Sequence[TierSpec], num_rows: int, epoch: int, models: RequestModels | None = None
) -> list[LowerTier]:
    """The tiers below a CPU tier of `num_rows` rows, in the namespace's `epoch`. Takes long for a large tier.

    `models` are those of the stack, which may be in use in another thread (see `RequestPolicy`).
    """
    rows_max = max(1, num_rows // 4)
    return [LowerTier(position, spec, rows_max, epoch, models) for position, spec in enumerate(specs, start=1)]
