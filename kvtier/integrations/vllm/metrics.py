"""The metrics of `kvtier.metrics` on vLLM's own `/metrics`."""

import time
from collections.abc import Callable

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from kvtier.control.tiers.histogram import HistogramFigures
from kvtier.metrics import DEFINITIONS, MetricDefinition, metric_families
from kvtier.stack import StackStats

INTERVAL_SECONDS = 1.0
"""How often figures are collected; vLLM collects them once a step."""

_METADATA = {"counter": OffloadingCounterMetadata, "gauge": OffloadingGaugeMetadata}


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """Every metric by its name."""
    return {each.name: _metadata(each) for each in DEFINITIONS}


def _metadata(definition: MetricDefinition) -> OffloadingMetricMetadata:
    if definition.kind == "histogram":
        return OffloadingHistogramMetadata(definition.help, definition.label_names, definition.bounds)
    return _METADATA[definition.kind](definition.help, definition.label_names)


class Meter:
    """Turns the stack's totals into what vLLM takes: counters as increments, gauges as they are, histograms as values.

    A histogram's new values are given as the mean of those of their bucket, so that each bucket's count and the sum of
    all are right.
    """

    def __init__(self) -> None:
        self._reported: dict[tuple[str, tuple[str, ...]], float] = {}
        self._observed: dict[tuple[str, tuple[str, ...]], HistogramFigures] = {}
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
                if isinstance(value, HistogramFigures):
                    before, self._observed[metric.name, labels] = self._observed.get((metric.name, labels)), value
                    for each in value.values_since(before):
                        changed.observe_histogram(metric.name, each, labels)
                elif metric.kind == "gauge":
                    changed.set_gauge(metric.name, value, labels)
                elif (grown := value - self._reported.get((metric.name, labels), 0)) > 0:
                    self._reported[metric.name, labels] = value
                    changed.increase_counter(metric.name, grown, labels)
        return changed
