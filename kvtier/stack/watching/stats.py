"""Figures of a running stack, tier by tier."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

from kvtier.control.hints.following import Hints
from kvtier.control.tiers.breaker import Breaker
from kvtier.control.tiers.histogram import HistogramFigures
from kvtier.control.tiers.lower_tier import LowerTier, TierCounters, TierSpec
from kvtier.control.tiers.owned_tier import OwnedTier
from kvtier.control.tiers.slot_table import SlotState
from kvtier.stack.dispatcher import TierQueue, TransferStats
from kvtier.stack.open_stack import OpenStack
from kvtier.types.jobs import JobKind

if TYPE_CHECKING:
    from kvtier.control.tiers.size_curve import SizeCurve


@dataclass(frozen=True, slots=True)
class BreakerStats:
    """A breaker's state, and how often each state was entered since the stack opened."""

    state: str
    entered: dict[str, int]


@dataclass(frozen=True, slots=True)
class TierStats:
    """A tier since the stack opened.

    `looked_up` counts blocks that were looked up here because no tier above has them, and `missed` those of them that
    are not here either; a lookup counts once it is answered. `hits` counts blocks loaded for requests, each once, here
    if no tier above had it when the request asked; bytes are payload; seconds are those in which at least one transfer
    of that direction was in flight.
    `expired` counts blocks that became older than the tier's `max_age` while it was open. `slots` counts slots by
    state, `dropped` blocks by reason, `skipped` those that were not sent because the tier had them or did not admit
    them yet. `computed_sooner` blocks were found here and not loaded, because the engine computes them sooner;
    `computed_again` ones were stored in the stack once more after the tier did not admit them, as far as that is
    remembered. A shared tier has no slots. `breaker` is the state of all breakers of a tier, or that of each: `load
    closed, store closed, lookup open`. `joined` is 0 while a tier is held back, and neither loads nor stores. With
    `curves`, `curve_used` counts the blocks of the requests that began, and `curve_missed` those that an LRU tier of so
    many times the size would not have had, about; see `SizeCurve`. `transfers` are the figures of `load` and `store`
    jobs. `reuse_gaps` are seconds between two uses of a block and `eviction_ages` those since the last use of evicted
    ones, `coldest_seconds` since that of the block that was not used for longest; None for a shared tier. Of
    `retained_bytes_max` bytes that hints may retain in the tier, `retained_bytes` are.
    """

    looked_up: int = 0
    missed: int = 0
    hits: int = 0
    load_bytes: int = 0
    load_seconds: float = 0.0
    store_bytes: int = 0
    store_seconds: float = 0.0
    loaded: int = 0
    stored: int = 0
    written_bytes: int = 0
    evictions: int = 0
    expired: int = 0
    failed: int = 0
    corrupt: int = 0
    missing: int = 0
    late: int = 0
    computed_sooner: int = 0
    computed_again: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    used_bytes: int = 0
    peak_bytes: int = 0
    capacity_bytes: int = 0
    slots: dict[str, int] = field(default_factory=dict)
    retained_bytes: int = 0
    retained_bytes_max: int = 0
    breaker: str = "closed"
    mode: str = ""
    joined: int = 1
    curve_used: int = 0
    curve_missed: dict[str, int] = field(default_factory=dict)
    transfers: dict[str, TransferStats] = field(default_factory=dict)
    breakers: dict[str, BreakerStats] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)
    recovered: int = 0
    recovery_seconds: float = 0.0
    token_bytes: float = 0.0
    kind: str = ""
    policy: str = ""
    write_policy: str = ""
    admit: str = ""
    layout: str = ""
    io_engine: str = ""
    coldest_seconds: float | None = None
    reuse_gaps: HistogramFigures | None = None
    eviction_ages: HistogramFigures | None = None

    @property
    def up(self) -> int:
        """0 while a breaker refuses loads, stores or lookups. A half-open one lets a probe through: the tier is up."""
        return int(self.joined and "open" not in re.findall(r"\w+", self.breaker))

    @property
    def promoted(self) -> int | None:
        """Blocks that were promoted from here to the CPU tier; None for that tier itself."""
        return self.loaded if self.breakers else None

    @property
    def demoted(self) -> int | None:
        """Blocks that were brought down here from the CPU tier; None for that tier itself."""
        return self.stored if self.breakers else None

    @property
    def capacity_tokens(self) -> int | None:
        """Tokens that fit, each with its share of a block of every group; None where that is not known."""
        return int(self.capacity_bytes / self.token_bytes) if self.token_bytes else None

    @property
    def used_tokens(self) -> int | None:
        """The tokens of `used_bytes`, counted as for `capacity_tokens`."""
        return int(self.used_bytes / self.token_bytes) if self.token_bytes and self.slots else None

    @property
    def breaker_states(self) -> dict[str, dict[str, int]]:
        """1 for the state that each breaker is in, 0 for the others."""
        return {what: {s: int(s == one.state) for s in one.entered} for what, one in self.breakers.items()}

    @property
    def about(self) -> dict[tuple[str, ...], int]:
        """1, by what describes the tier: its type, policies, admission, layout, I/O engine and mode."""
        about = self.kind, self.policy, self.write_policy, self.admit, self.layout, self.io_engine, self.mode
        return {about: 1}

    @property
    def curve_hit_rates(self) -> dict[str, float]:
        """Share of the blocks of requests that a tier of so many times the size would hit; empty without `curves`."""
        used = self.curve_used
        return {size: max(0.0, 1 - missed / used) for size, missed in self.curve_missed.items()} if used else {}

    @property
    def errors(self) -> dict[str, int]:
        """Blocks that the tier could not load or store, by reason."""
        return {"failed": self.failed, "corrupt": self.corrupt, "missing": self.missing, "late": self.late}


@dataclass(frozen=True, slots=True)
class HintStats:
    """Outcomes of hints since the stack opened.

    `retained_sets` sessions retain or pin blocks now. `refused` counts blocks by the hint and the reason. Of the blocks
    `prefetched`, that are those promoted, `prefetched_used` were loaded and `prefetched_unused` were not; others are
    still fresh. `prefetch_missed` blocks were not promoted: `missing` in every tier, or not in time (`late`).
    `demoted_early` rows were given up for a hint.
    """

    retained_sets: int = 0
    refused: dict[str, dict[str, int]] = field(default_factory=dict)
    prefetched: int = 0
    prefetched_used: int = 0
    prefetched_unused: int = 0
    prefetch_missed: dict[str, int] = field(default_factory=dict)
    demoted_early: int = 0


@dataclass(slots=True)
class EngineStats:
    """Figures of an engine of a stack process, in blocks; `loaded` by the highest tier that had them.

    `revoked_rows` were asked back from it, `held_rows` are lent or leased to it, or in its copies.
    """

    looked_up: int = 0
    stored: int = 0
    loaded: dict[str, int] = field(default_factory=dict)
    revoked_rows: int = 0
    held_rows: int = 0


@dataclass(frozen=True, slots=True)
class StackStats:
    """Every tier by name, from the CPU down, and the blocks on their way to lower tiers.

    `events_lost` counts keys whose events were discarded because they were not taken in time. `errors` counts
    exceptions that were caught: of tiers, and of the stack itself, whose first one makes every request a miss.
    `hints` is what became of hints. `group_blocks` counts blocks that the engine stored and loaded, by KV cache group.
    `restarts` counts how often an engine has started its stack process again; 0 for a stack in the engine's process.
    `engines` by name, of a service.
    """

    tiers: dict[str, TierStats]
    backlog: int
    events_lost: int = 0
    errors: int = 0
    hints: HintStats = HintStats()
    group_blocks: dict[str, dict[str, int]] = field(default_factory=dict)
    restarts: int = 0
    engines: dict[str, EngineStats] = field(default_factory=dict)

    @property
    def build(self) -> dict[tuple[str, ...], int]:
        """1, by the version of kvtier."""
        return {(kvtier_version(),): 1}


@cache
def kvtier_version() -> str:
    """The installed version of kvtier."""
    return metadata.version("kvtier")


def collect(assembled: OpenStack, now: float, errors: int) -> StackStats:
    """The figures of an open stack at this moment; `errors` are those beside the dispatcher's.

    From any thread, without a lock: figures that change meanwhile may be of two moments.
    """
    control, queues = assembled.plane.control, assembled.dispatcher.queues
    by_kind = [dict.fromkeys(JobKind, queue) for queue in queues]
    tiers = {control.cpu.name: tier_stats(control.cpu_spec, control.cpu, control.cpu_counters, by_kind[0], now)}
    for lower, queue in zip(control.lowers, by_kind[1:], strict=True):
        tiers[lower.name] = lower_stats(lower, queue, now)
    plane = assembled.plane
    errors += assembled.dispatcher.errors
    groups = {
        kind.value: {str(at): count for at, count in enumerate(each)} for kind, each in control.group_blocks.items()
    }
    return StackStats(tiers, plane.backlog, plane.events.lost, errors, hint_stats(plane.hints), groups)


def hint_stats(hints: Hints) -> HintStats:
    """Outcomes of hints until now."""
    brought, refused = hints.prefetches, dict[str, dict[str, int]]()
    for (hint, reason), count in dict(hints.refused).items():
        refused.setdefault(hint, {})[reason] = count
    return HintStats(
        hints.retention.num_sets,
        refused,
        brought.brought,
        brought.used,
        brought.unused,
        {"missing": brought.missing, "late": brought.late},
        hints.demotions.freed,
    )


def lower_stats(lower: LowerTier, queues: Mapping[JobKind, TierQueue], now: float) -> TierStats:
    """The figures of a lower tier, whose jobs of each kind go through these queues."""
    return replace(
        tier_stats(lower.spec, lower.owned, lower.counters, queues, now),
        breaker=lower.health_text,
        joined=int(not lower.held_back),
        breakers={what: _breaker_stats(breaker) for what, breaker in lower.breakers.items()},
        write_policy=lower.spec.write_policy,
        admit=lower.spec.admit,
    )


def tier_stats(
    spec: TierSpec, owned: OwnedTier | None, counters: TierCounters, queues: Mapping[JobKind, TierQueue], now: float
) -> TierStats:
    """The figures of a tier without breakers, whose jobs of each kind go through these queues."""
    opened, seconds = spec.opened, {kind: queue.traffic[kind].seconds(now) for kind, queue in queues.items()}
    figures = TierStats(
        **_counted(counters),
        load_seconds=seconds.get(JobKind.LOAD, 0.0),
        store_seconds=seconds.get(JobKind.STORE, 0.0),
        capacity_bytes=opened.capacity_bytes,
        mode=opened.mode,
        layout=opened.layout,
        io_engine=opened.io_engine,
        events=_events(queues),
        recovered=len(opened.recovered.slots),
        recovery_seconds=opened.open_seconds,
        transfers={kind.value: queue.figures(kind, now) for kind, queue in queues.items()},
        token_bytes=spec.token_bytes,
        kind=spec.kind,
    )
    if owned is None:
        return figures
    return replace(
        figures,
        policy=spec.eviction,
        evictions=owned.evictions,
        expired=owned.expired,
        used_bytes=owned.used_bytes,
        peak_bytes=owned.peak_bytes,
        retained_bytes=owned.retained.used_bytes,
        retained_bytes_max=owned.retained.max_bytes,
        slots={state.name.lower(): owned.table.counts[state] for state in SlotState},
        coldest_seconds=owned.uses.coldest_seconds(owned.table.state, now),
        reuse_gaps=owned.uses.reuse_gaps.figures(),
        eviction_ages=owned.uses.eviction_ages.figures(),
        **_curve(owned.curve),
    )


def _counted(counters: TierCounters) -> dict[str, Any]:
    """Every counter by its name. `dict(counts)` is one step of the interpreter: a reason that another thread counts for
    the first time meanwhile does not interrupt it."""
    counts = {each.name: getattr(counters, each.name) for each in fields(counters)}
    return counts | {
        "dropped": {reason.value: count for reason, count in dict(counters.dropped).items()},
        "skipped": {reason.value: count for reason, count in dict(counters.skipped).items()},
    }


def _curve(curve: SizeCurve | None) -> dict[str, Any]:
    if curve is None:
        return {}
    return {"curve_used": curve.used, "curve_missed": {f"{size:g}": each for size, each in curve.missed.items()}}


def _breaker_stats(breaker: Breaker) -> BreakerStats:
    return BreakerStats(breaker.state.value, {state.value: count for state, count in breaker.entered.items()})


def _events(queues: Mapping[JobKind, TierQueue]) -> dict[str, int]:
    """The counts of the tier behind these queues, in `counters` by place and reason, if it has any."""
    counters = getattr(queues[JobKind.LOAD].tier, "counters", None) if queues else None
    return dict(counters) if isinstance(counters, Counter) else {}
