"""The figures of a tier below vLLM's own CPU tier, in the form of those of a stack."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.control.board import LowerTier, TierCounters
from kvtier.control.slots import SlotState
from kvtier.jobs import BlockOutcome, BlockStatus, DropReason, JobKind
from kvtier.loadstore import Opened
from kvtier.stack import StackStats, TierStats
from kvtier.stack.dispatcher import Lane


def count_outcome(counters: TierCounters, outcome: BlockOutcome) -> None:
    """Count what became of a block, if it did not go well."""
    match outcome.status:
        case BlockStatus.FAILED:
            counters.failed += 1
        case BlockStatus.CORRUPT:
            counters.corrupt += 1
        case BlockStatus.MISSING:
            counters.missing += 1
        case BlockStatus.LATE:
            counters.late += 1
        case BlockStatus.DROPPED:
            counters.drop(outcome.reason or DropReason.BACKLOG)
        case _:
            pass


def tier_stats(lower: LowerTier, opened: Opened, lanes: Sequence[Lane], backlog: int, now: float) -> StackStats:
    """Everything since the tier opened. `backlog` counts blocks on their way."""
    counters, owned = lower.counters, lower.owned
    seconds = {kind: sum(lane.traffic[kind].seconds(now) for lane in lanes) for kind in JobKind}
    load, store = lower.load_breaker.state.value, lower.store_breaker.state.value
    figures = TierStats(
        hits=counters.loaded,
        load_bytes=counters.load_bytes,
        load_seconds=seconds[JobKind.LOAD],
        store_bytes=counters.store_bytes,
        store_seconds=seconds[JobKind.STORE],
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
        breaker="open: I/O is stuck" if lower.stuck else f"load {load}, store {store}",
        mode=opened.mode,
    )
    return StackStats({lower.name: figures}, backlog)
