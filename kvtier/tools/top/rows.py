"""What `kvtier top` shows of each tier: rates between two readings, counts since the start or since a reset."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvtier.tools.top.readings import StackReading

UP = "up"
_COUNTERS = ("hits", "load_bytes", "store_bytes", "evictions")


@dataclass(frozen=True, slots=True)
class TierRow:
    """One tier. Rates are by second between the last two readings; None stands for what is not known.

    `hit_share` is of the blocks that were looked up in the stack. A quantile is the upper bound of its bucket, infinite
    for the last one. Bytes in flight and queued are loads and stores.
    """

    tier: str
    state: str
    used_bytes: float | None
    capacity_bytes: float | None
    hit_share: float | None
    load_bytes_per_second: float | None
    store_bytes_per_second: float | None
    load_p50_seconds: float | None
    load_p99_seconds: float | None
    in_flight_bytes: float | None
    queued_bytes: float | None
    evictions_per_second: float | None
    drops_per_second: float | None
    top_drop_reason: str | None
    errors: float
    coldest_seconds: float | None


@dataclass(frozen=True, slots=True)
class TopFigures:
    """All tiers at one moment. `written_bytes` counts what was written to the devices of lower tiers since the start.

    `largest_queued_bytes` are those of the largest transfer job that waits.
    """

    tiers: tuple[TierRow, ...]
    backlog_blocks: float | None
    largest_queued_bytes: float | None
    written_bytes: float | None
    written_today_bytes: float | None

    def to_json(self) -> dict[str, Any]:
        """The same for programs. Infinite quantiles are null there, as JSON has no infinity."""
        found = asdict(self)
        for row in found["tiers"]:
            row.update({name: None for name, value in row.items() if isinstance(value, float) and math.isinf(value)})
        return found


def restarted(before: StackReading, now: StackReading) -> bool:
    """True if counters began anew in between: another process, or one that opened its stack again."""
    if before.process != now.process:
        return True
    return any(_fell(before, now, figure, tier) for figure in _COUNTERS for tier in now.tiers)


def _fell(before: StackReading, now: StackReading, figure: str, tier: str) -> bool:
    return (now.value(figure, tier) or 0) < (before.value(figure, tier) or 0)


def snapshot(now: StackReading, before: StackReading | None = None, base: StackReading | None = None) -> TopFigures:
    """What to show of a reading. Rates are since `before`, counts since `base`, or else since the start."""
    return TopFigures(
        tuple(_row(tier, now, before, base) for tier in now.tiers),
        now.value("backlog"),
        now.most("transfers.largest_queued_bytes"),
        now.total("written_bytes"),
        now.written_today_bytes,
    )


def _row(tier: str, now: StackReading, before: StackReading | None, base: StackReading | None) -> TierRow:
    drops = _drops(tier, now, before)
    reason = max(drops, key=lambda each: drops[each], default=None)
    return TierRow(
        tier,
        _state(tier, now),
        now.value("used_bytes", tier),
        now.value("capacity_bytes", tier),
        _hit_share(tier, now, base),
        _rate("load_bytes", tier, now, before),
        _rate("store_bytes", tier, now, before),
        _load_quantile(tier, 0.50, now, base),
        _load_quantile(tier, 0.99, now, base),
        now.total("transfers.in_flight_bytes", tier),
        now.total("transfers.queued_bytes", tier),
        _rate("evictions", tier, now, before),
        None if before is None else sum(drops.values()),
        reason,
        (now.total("errors", tier) or 0) - (base.total("errors", tier) or 0 if base else 0),
        now.value("coldest_seconds", tier),
    )


def _state(tier: str, now: StackReading) -> str:
    """The worst state of the tier's breakers. A page says of a tier without breakers whether it is up, and of one that
    is not used although they are closed, because its I/O is stuck, that it is down."""
    words = now.states.get(tier)
    if words is not None:
        found = set(re.findall(r"\w+", words))
    else:
        states = now.figures.get("breaker_states", {}).items()
        found = {labels[2] for labels, value in states if labels[0] == tier and value}
    worst = next((state for state in ("held_back", "open", "half_open") if state in found), None)
    if worst is not None or words is not None:
        return worst or words or UP
    if now.value("joined", tier) == 0:
        return "held_back"
    return "down" if now.value("up", tier) == 0 else "closed" if found else UP


def _rate(figure: str, tier: str, now: StackReading, before: StackReading | None) -> float | None:
    if before is None or now.seconds <= before.seconds:
        return None
    return _grown(figure, tier, now, before) / (now.seconds - before.seconds)


def _grown(figure: str, tier: str, now: StackReading, base: StackReading | None) -> float:
    return (now.value(figure, tier) or 0) - (base.value(figure, tier) or 0 if base else 0)


def _drops(tier: str, now: StackReading, before: StackReading | None) -> Mapping[str, float]:
    """Drops by second by reason; those reasons that had any."""
    if before is None or now.seconds <= before.seconds:
        return {}
    seconds = now.seconds - before.seconds
    counts = {
        labels[1]: now.value("dropped", *labels) or 0 for labels in now.figures.get("dropped", {}) if labels[0] == tier
    }
    grown = {reason: count - (before.value("dropped", tier, reason) or 0) for reason, count in counts.items()}
    return {reason: count / seconds for reason, count in grown.items() if count > 0}


def _hit_share(tier: str, now: StackReading, base: StackReading | None) -> float | None:
    """The share of the blocks that were looked up in the tier's stack which were found in this tier."""
    same = [each for each, stack in now.tiers.items() if stack == now.tiers[tier]]
    looked_up = max(_grown("looked_up", each, now, base) for each in same)
    if now.value("looked_up", tier) is None or looked_up <= 0:
        return None
    found = _grown("looked_up", tier, now, base) - _grown("missed", tier, now, base)
    return min(1.0, max(0.0, found / looked_up))


def _load_quantile(tier: str, share: float, now: StackReading, base: StackReading | None) -> float | None:
    found = now.histogram("transfers.took_seconds", tier, "load")
    before = base.histogram("transfers.took_seconds", tier, "load") if base else None
    if found is None:
        return None
    comparable = before is not None and before.bounds == found.bounds
    return (found.minus(before) if before and comparable else found).quantile(share)
