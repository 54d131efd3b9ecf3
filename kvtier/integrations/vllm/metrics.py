"""The metrics of `kvtier.metrics` on vLLM's own `/metrics`."""

import time
from collections.abc import Callable

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingMetricMetadata

from kvtier.metrics import DEFINITIONS, metric_families
from kvtier.stack import StackStats

INTERVAL_SECONDS = 1.0
"""How often figures are collected; vLLM collects them once a step."""

_METADATA = {"counter": OffloadingCounterMetadata, "gauge": OffloadingGaugeMetadata}


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """Every metric by its name."""
    return {each.name: _METADATA[each.kind](each.help, each.label_names) for each in DEFINITIONS}


class Meter:
    """Turns the stack's totals into what vLLM takes: counters as increments, gauges as they are."""

    def __init__(self) -> None:
        self._reported: dict[tuple[str, tuple[str, ...]], float] = {}
        self._next = 0.0

    def read(self, stats: Callable[[], StackStats]) -> OffloadingConnectorStats | None:
        """What changed since the last reading; None before an interval is over, so that a step costs nothing."""
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + INTERVAL_SECONDS
        changed = OffloadingConnectorStats()
        for metric, samples in metric_families(stats()).items():
            for labels, value in samples.items():
                if metric.kind == "gauge":
                    changed.set_gauge(metric.name, value, labels)
                elif (grown := value - self._reported.get((metric.name, labels), 0)) > 0:
                    self._reported[metric.name, labels] = value
                    changed.increase_counter(metric.name, grown, labels)
        return changed
