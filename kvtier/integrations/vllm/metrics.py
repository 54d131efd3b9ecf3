"""The stack's figures on vLLM's own `/metrics`, tier by tier."""

from __future__ import annotations

import time
from collections.abc import Iterator

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingMetricMetadata

from kvtier.stack import StackStats, TierStats

PREFIX = "kvtier:"
INTERVAL_SECONDS = 1.0
"""How often figures are collected; vLLM asks once a step."""

Labels = tuple[str, ...]

_COUNTERS = {
    "hits": "Blocks loaded for requests whose highest copy was in the tier.",
    "load_bytes": "Payload bytes that left the tier towards the GPU.",
    "load_seconds": "Seconds in which at least one load of the tier was under way.",
    "store_bytes": "Payload bytes that went into the tier.",
    "store_seconds": "Seconds in which at least one store of the tier was under way.",
    "loaded": "Blocks loaded from the tier.",
    "stored": "Blocks stored in the tier.",
    "evictions": "Blocks evicted from the tier.",
}
_ERRORS = ("failed", "corrupt", "missing", "late")
_GAUGES = {"used_bytes": "Bytes of slots that hold a block.", "capacity_bytes": "Bytes the tier may use at most."}


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """Every metric by its name."""
    found: dict[str, OffloadingMetricMetadata] = {
        PREFIX + name: OffloadingCounterMetadata(documentation, ("tier",)) for name, documentation in _COUNTERS.items()
    }
    found[PREFIX + "errors"] = OffloadingCounterMetadata(
        "Blocks that a tier could not give or take, by reason; each is a miss.", ("tier", "reason")
    )
    found[PREFIX + "dropped"] = OffloadingCounterMetadata(
        "Blocks that were not kept in a tier, by reason.", ("tier", "reason")
    )
    found.update({PREFIX + name: OffloadingGaugeMetadata(text, ("tier",)) for name, text in _GAUGES.items()})
    found[PREFIX + "slots"] = OffloadingGaugeMetadata("Slots of a tier by state.", ("tier", "state"))
    found[PREFIX + "down"] = OffloadingGaugeMetadata("1 while a tier's breaker keeps it from being used.", ("tier",))
    found[PREFIX + "backlog"] = OffloadingGaugeMetadata("Blocks on their way to lower tiers.")
    return found


class Meter:
    """Turns the stack's totals into what vLLM wants: counters as increments, gauges as they are."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, Labels], float] = {}
        self._next = 0.0

    @property
    def due(self) -> bool:
        """True once an interval, so that a step costs nothing."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + INTERVAL_SECONDS
        return True

    def read(self, stats: StackStats) -> OffloadingConnectorStats:
        """What changed since the last reading."""
        told = OffloadingConnectorStats()
        for tier, figures in stats.tiers.items():
            for name, labels, total in _totals(tier, figures):
                grown = total - self._told.get((name, labels), 0)
                if grown > 0:
                    self._told[name, labels] = total
                    told.increase_counter(PREFIX + name, grown, labels)
            for name in _GAUGES:
                told.set_gauge(PREFIX + name, getattr(figures, name), (tier,))
            for state, count in figures.slots.items():
                told.set_gauge(PREFIX + "slots", count, (tier, state))
            told.set_gauge(PREFIX + "down", int("open" in figures.breaker), (tier,))
        told.set_gauge(PREFIX + "backlog", stats.backlog)
        return told


def _totals(tier: str, figures: TierStats) -> Iterator[tuple[str, Labels, float]]:
    for name in _COUNTERS:
        yield name, (tier,), getattr(figures, name)
    for reason in _ERRORS:
        yield "errors", (tier, reason), getattr(figures, reason)
    for reason, count in figures.dropped.items():
        yield "dropped", (tier, reason), count
