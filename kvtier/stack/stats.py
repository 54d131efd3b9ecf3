"""Figures of a running stack, tier by tier."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from kvtier.control.state import LowerTier, TierCounters
from kvtier.control.tiers.breaker import BreakerState
from kvtier.control.tiers.owned_tier import OwnedTier
from kvtier.control.tiers.slot_table import SlotState
from kvtier.stack.assembled import Assembled
from kvtier.stack.dispatcher import TierQueue
from kvtier.tier_api.contract import Opened
from kvtier.types.jobs import JobKind


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier since the stack opened.

    `hits` counts blocks loaded for requests whose highest copy was here; bytes are payload; seconds are those in
    which at least one transfer of that direction was in flight. `slots` counts slots by state, `dropped` blocks by
    reason. A shared tier has no slots.
    """

    hits: int = 0
    load_bytes: int = 0
    load_seconds: float = 0.0
    store_bytes: int = 0
    store_seconds: float = 0.0
    loaded: int = 0
    stored: int = 0
    evictions: int = 0
    failed: int = 0
    corrupt: int = 0
    missing: int = 0
    late: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    used_bytes: int = 0
    peak_bytes: int = 0
    capacity_bytes: int = 0
    slots: dict[str, int] = field(default_factory=dict)
    breaker: str = "closed"
    mode: str = ""

    @property
    def up(self) -> int:
        """0 while a breaker refuses loads or stores. A half-open breaker lets a probe through: the tier is up."""
        return int("open" not in re.findall(r"\w+", self.breaker))

    @property
    def errors(self) -> dict[str, int]:
        """Blocks that the tier could not load or store, by reason."""
        return {"failed": self.failed, "corrupt": self.corrupt, "missing": self.missing, "late": self.late}


@dataclass(frozen=True, slots=True)
class StackStats:
    """Every tier by name, from the CPU down, and the blocks on their way to lower tiers.

    `events_lost` counts keys whose events were discarded because they were not taken in time.
    """

    tiers: dict[str, TierStats]
    backlog: int
    events_lost: int = 0


def collect(assembled: Assembled, now: float) -> StackStats:
    """The figures of an open stack at this moment."""
    control = assembled.plane.control
    cpu = tier_stats(assembled.opened[0], control.cpu, control.cpu_counters, assembled.queues[:1], now)
    tiers = {control.cpu.name: cpu}
    for lower, opened, queue in zip(control.lowers, assembled.opened[1:], assembled.queues[1:], strict=True):
        tiers[lower.name] = lower_stats(lower, opened, [queue], now)
    return StackStats(tiers, assembled.plane.backlog, assembled.plane.events_lost)


def lower_stats(lower: LowerTier, opened: Opened, queues: Sequence[TierQueue], now: float) -> TierStats:
    """The figures of a lower tier, whose jobs go through these queues."""
    return replace(tier_stats(opened, lower.owned, lower.counters, queues, now), breaker=_breaker(lower))


def tier_stats(
    opened: Opened, owned: OwnedTier | None, counters: TierCounters, queues: Sequence[TierQueue], now: float
) -> TierStats:
    """The figures of a tier without breakers."""
    seconds = {kind: sum(queue.traffic[kind].seconds(now) for queue in queues) for kind in JobKind}
    counts = asdict(counters) | {"dropped": {reason.value: count for reason, count in counters.dropped.items()}}
    figures = TierStats(
        **counts,
        load_seconds=seconds[JobKind.LOAD],
        store_seconds=seconds[JobKind.STORE],
        capacity_bytes=opened.capacity_bytes,
        mode=opened.mode,
    )
    if owned is None:
        return figures
    return replace(
        figures,
        evictions=owned.evictions,
        used_bytes=owned.used_bytes,
        peak_bytes=owned.peak_bytes,
        slots={state.name.lower(): owned.table.counts[state] for state in SlotState},
    )


def _breaker(lower: LowerTier) -> str:
    if lower.stuck:
        return f"{BreakerState.OPEN}: I/O is stuck"
    load, store = lower.load_breaker.state.value, lower.store_breaker.state.value
    return load if load == store else f"load {load}, store {store}"
