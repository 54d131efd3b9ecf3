"""The metrics of `kvtier.metrics` on vLLM's own `/metrics`."""

import time
from collections.abc import Callable, Iterable

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from kvtier.metrics import DEFINITIONS, MetricDefinition
from kvtier.service.figures import EngineFigures
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
    """Turns the totals of a tier into what vLLM takes, once an interval, so that a step costs nothing."""

    def __init__(self) -> None:
        self._figures = EngineFigures()
        self._next = 0.0
        self._unread = True

    def read(self, stats: Callable[[], StackStats]) -> OffloadingConnectorStats | None:
        """The changes since the last reading; None before an interval is over."""
        now = time.monotonic()
        self._unread = now < self._next
        if self._unread:
            return None
        self._next = now + INTERVAL_SECONDS
        return counted(self._figures.series(stats()))

    def to_read(self) -> bool:
        """Ask when the engine has nothing to do: True if there were steps after the last reading, or none yet.

        The next reading is made at once then. So the engine has to step once more, and until there is work again its
        page shows what is, and not what was within a second before.
        """
        if self._unread:
            self._next = 0.0
        return self._unread


def counted(series: Iterable[MetricSeries]) -> OffloadingConnectorStats:
    """The changes of series, as vLLM takes them."""
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
