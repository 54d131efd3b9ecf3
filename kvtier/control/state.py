"""State that the parts of the control plane share: the tiers, the jobs in flight, and what waits for which fill."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvtier.control.jobs import CPU_TIER, JobOwner, JobTable
from kvtier.control.tiers.aged_tier import AgedTier
from kvtier.control.tiers.lower_tier import LowerTier, TierCounters, TierSpec, lower_tiers
from kvtier.control.tiers.owned_tier import OwnedTier
from kvtier.control.tiers.reuse_times import TickClock
from kvtier.control.tiers.tier_index import TierIndex
from kvtier.policy import RequestModels
from kvtier.types.jobs import JobKind
from kvtier.types.keys import OffloadKey

if TYPE_CHECKING:
    from kvtier.policy.reuse.preselecting_policy import PreselectingPolicy


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
        """Something became of these blocks. Without any `ages` it need not be called."""
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
    def on_fills(self, fills: Sequence[tuple[int, int]], success: bool, position: int, now: float) -> None:
        """The fills for some blocks ended, once each, all well or none: (its index, the row) of each.

        `position` is the lower tier that filled them, 0 for a store.
        """


class ControlState(JobTable[JobOwner]):
    """State shared by loads, stores, promotions, demotions and reservations. No logic of its own beyond bookkeeping.

    `epoch` is the namespace's, which the jobs carry; `resets` counts those of this session. `ended_ages` are those of
    the engine's jobs of which every block got an outcome since the last step, `filled_ages` those of requests for which
    a fill ended, or that were stopped. `shortage`: the rows that the first waiting request lacks. `joining`: the lower
    tiers are held back and may join yet. `indexes` are those of the tiers that are not held back. `models` are the
    statistics of requests; there are none if no policy follows requests. `request_policies`: the owned tiers, and their
    policies, that do. `group_blocks` counts the blocks of the engine's jobs, by their group.
    """

    def __init__(self, cpu: TierSpec, lowers: Sequence[TierSpec]) -> None:
        assert cpu.opened.space is not None
        self.cpu_spec = cpu
        self.models = RequestModels([spec.policy for spec in (cpu, *lowers)])
        self.cpu = OwnedTier(cpu.name, cpu.opened.space, cpu.policy, self.models)
        self.cpu.placement.format_all()
        rows = len(self.cpu.table) * 3 // 4  # the others are enough for loads and stores to go on
        self.cpu.retained.max_bytes = min(cpu.retained_bytes_max, rows * cpu.opened.space.slot_bytes[0])
        self.cpu_counters = TierCounters()
        self.tick_clock = TickClock()
        super().__init__(max((spec.opened.epoch for spec in lowers), default=0))
        self.resets = 0
        self.fills: dict[int, list[tuple[FillWaiter, int]]] = {}
        self.shortage = 0
        self.filled_ages: list[int] = []
        self.ended_ages: list[int] = []
        self.awaited = AwaitedKeys()
        self.num_rows = len(self.cpu.table)
        self.num_groups = len(cpu.opened.space.slot_bytes)
        self.group_blocks = {kind: [0] * self.num_groups for kind in JobKind}
        self.joining = any(spec.held_back for spec in lowers)
        self.lowers = lower_tiers(lowers, self.num_rows, self.epoch, self.models)
        self.indexes: list[TierIndex] = []
        self.owned_tiers: list[OwnedTier] = []
        self.request_policies: list[tuple[OwnedTier, PreselectingPolicy]] = []
        self.all_owned = True
        self.aged_tiers: list[AgedTier] = []
        self.reclaim_at = math.inf
        self.choose_indexes()

    def choose_indexes(self) -> None:
        """Choose the tiers to look into again, because lower ones joined or are held back."""
        self.indexes = [self.cpu, *(lower.index for lower in self.lowers if not lower.held_back)]
        self.owned_tiers = [index for index in self.indexes if isinstance(index, OwnedTier)]
        self.request_policies = [
            (tier, tier.request_policy) for tier in self.owned_tiers if tier.request_policy is not None
        ]
        for tier in self.owned_tiers:
            tier.uses.time = self.tick_clock
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
            lower.take_over(held_back)
        self.lowers, self.epoch, self.joining = lowers, epoch, False
        self.choose_indexes()

    def hold_back(self) -> None:
        """No lower tier loads or stores from here on, and none will join. What they hold is not reachable."""
        self.joining = False
        for lower in self.lowers:
            lower.hold_back()
            lower.index.reset()
        self.choose_indexes()

    def counters(self, position: int) -> TierCounters:
        return self.cpu_counters if position == CPU_TIER else self.lowers[position - 1].counters

    def wait_for_fills(self, waiter: FillWaiter, fills: Iterable[tuple[int, int]]) -> None:
        """Have `waiter.on_fills` called when the fills of these rows end: (its index, the row) of each."""
        for index, row in fills:
            self.fills.setdefault(row, []).append((waiter, index))

    def end_fill(self, rows: Sequence[int], success: bool, position: int, now: float) -> None:
        """Call all waiters of these rows, each once. Rows that succeeded are READY when this is called."""
        ended: dict[FillWaiter, list[tuple[int, int]]] = {}
        for row in rows:
            for waiter, index in self.fills.pop(row, ()):
                ended.setdefault(waiter, []).append((index, row))
        for waiter, fills in ended.items():
            waiter.on_fills(fills, success, position, now)
