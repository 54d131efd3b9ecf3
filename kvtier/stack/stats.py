"""Figures of a running stack, tier by tier."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.control.board import LowerTier
from kvtier.control.slots import SlotState
from kvtier.jobs import JobKind
from kvtier.stack.assembly import Assembled


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier since the stack opened.

    `hits` counts blocks loaded for requests whose highest copy was here; bytes are payload; seconds are those in
    which at least one transfer of that direction was under way. `slots` counts slots by state, `dropped` blocks by
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


@dataclass(frozen=True, slots=True)
class StackStats:
    """Every tier by name, from the CPU down, and the blocks on their way to lower tiers.

    `events_lost` counts keys whose events were thrown away because nobody took them in time.
    """

    tiers: dict[str, TierStats]
    backlog: int
    events_lost: int = 0


def collect(assembled: Assembled, now: float) -> StackStats:
    """The figures of an open stack at this moment."""
    board = assembled.plane.board
    tiers: dict[str, TierStats] = {}
    for position, (lane, opened) in enumerate(zip(assembled.lanes, assembled.opened, strict=True)):
        lower = board.lowers[position - 1] if position else None
        owned = lower.owned if lower is not None else board.cpu
        counters = board.counters(position)
        tiers[lower.name if lower is not None else board.cpu.name] = TierStats(
            hits=counters.hits,
            load_bytes=counters.load_bytes,
            load_seconds=lane.traffic[JobKind.LOAD].seconds(now),
            store_bytes=counters.store_bytes,
            store_seconds=lane.traffic[JobKind.STORE].seconds(now),
            loaded=counters.loaded,
            stored=counters.stored,
            evictions=owned.evictions if owned is not None else 0,
            failed=counters.failed,
            corrupt=counters.corrupt,
            missing=counters.missing,
            late=counters.late,
            dropped={reason.value: count for reason, count in counters.dropped.items()},
            used_bytes=owned.used_bytes if owned is not None else 0,
            peak_bytes=owned.peak_bytes if owned is not None else 0,
            capacity_bytes=opened.capacity_bytes,
            slots={state.name.lower(): owned.table.counts[state] for state in SlotState} if owned is not None else {},
            breaker=_breaker(lower) if lower is not None else "closed",
            mode=opened.mode,
        )
    return StackStats(tiers, assembled.plane.backlog, assembled.plane.events_lost)


def _breaker(lower: LowerTier) -> str:
    load, store = lower.load_breaker.state.value, lower.store_breaker.state.value
    return load if load == store else f"load {load}, store {store}"
