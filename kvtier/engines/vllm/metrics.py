"""The metrics of `kvtier.metrics` on vLLM's own `/metrics`."""

import time
from collections.abc import Callable, Sequence

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from kvtier.control.tiers.histogram import HistogramFigures
from kvtier.metrics import DEFINITIONS, MetricDefinition, metric_families
from kvtier.service.wire import COUNTER, GAUGE, MetricSeries
from kvtier.stack import StackStats

INTERVAL_SECONDS = 1.0
"""How often figures are collected; vLLM collects them once a step."""

_METADATA = {"counter": OffloadingCounterMetadata, "gauge": OffloadingGaugeMetadata}


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """Every metric by its name."""
    return {each.name: _metadata(each) for each in DEFINITIONS if not each.of_engines}


def _metadata(definition: MetricDefinition) -> OffloadingMetricMetadata:
    if definition.kind == "histogram":
        return OffloadingHistogramMetadata(definition.help, definition.label_names, definition.bounds)
    return _METADATA[definition.kind](definition.help, definition.label_names)


class Meter:
    """Turns the stack's totals into what vLLM takes: counters as increments, gauges as they are, histograms as values.

    Every series is there from the first reading on, counters and histograms at zero, because what a series begins with
    is no increase to Prometheus. A histogram's new values are given as the mean of those of their bucket, so that each
    bucket's count and the sum of all are right.
    """

    def __init__(self) -> None:
        self._reported: dict[tuple[str, tuple[str, ...]], float] = {}
        self._observed: dict[tuple[str, tuple[str, ...]], HistogramFigures] = {}
        self._next = 0.0
        self._unread = True

    def read(self, stats: Callable[[], StackStats]) -> OffloadingConnectorStats | None:
        """The changes since the last reading; None before an interval is over, so that a step costs nothing."""
        now = time.monotonic()
        self._unread = now < self._next
        if self._unread:
            return None
        self._next = now + INTERVAL_SECONDS
        changed = OffloadingConnectorStats()
        for metric, samples in metric_families(stats()).items():
            for labels, value in samples.items():
                if isinstance(value, HistogramFigures):
                    self._observe(changed, metric.name, labels, value)
                elif metric.kind == "gauge":
                    changed.set_gauge(metric.name, value, labels)
                else:
                    self._increase(changed, metric.name, labels, value)
        return changed

    def to_read(self) -> bool:
        """Ask when the engine has nothing to do: True if there were steps after the last reading, or none yet.

        The next reading is made at once then. So the engine has to step once more, and until there is work again its
        page shows what is, and not what was within a second before.
        """
        if self._unread:
            self._next = 0.0
        return self._unread

    def _increase(self, changed: OffloadingConnectorStats, name: str, labels: tuple[str, ...], value: float) -> None:
        before = self._reported.get((name, labels))
        if before is None or value > before:
            value = max(value, 0.0)  # vLLM would end by a negative increase, whatever figure was wrong
            self._reported[name, labels] = value
            changed.increase_counter(name, value - (before or 0.0), labels)

    def _observe(
        self, changed: OffloadingConnectorStats, name: str, labels: tuple[str, ...], value: HistogramFigures
    ) -> None:
        before, self._observed[name, labels] = self._observed.get((name, labels)), value
        if before is None:  # vLLM makes a series of what is named, also with an empty list of values
            changed.observe_histogram(name, 0.0, labels)
            changed.data["data"][name][labels].clear()
        for each in value.values_since(before):
            changed.observe_histogram(name, each, labels)


def counted(series: Sequence[MetricSeries]) -> OffloadingConnectorStats:
    """The series that a stack process has sent, as vLLM takes them."""
    changed = OffloadingConnectorStats()
    for each in series:
        labels = tuple(each.labels)
        if each.kind == GAUGE:
            changed.set_gauge(each.name, each.values[0], labels)
        elif each.kind == COUNTER:
            changed.increase_counter(each.name, each.values[0], labels)
        else:
            changed.observe_histogram(each.name, 0.0, labels)  # vLLM makes a series of an empty list of values too
            values = changed.data["data"][each.name][labels]
            values.clear()
            for value, count in zip(each.values[::2], each.values[1::2], strict=True):
                values += [value] * int(count)
    return changed
