"""The metrics of a stack for `prometheus_client`: a collector for a registry, and a small HTTP server of its own.

Needs `pip install 'kvtier[metrics]'`. A scrape reads figures in its own thread: it calls nothing in the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvtier.control.tiers.histogram import HistogramFigures
from kvtier.metrics.families import DEFINITIONS, MetricDefinition, Samples, metric_families
from kvtier.stack.watching.stats import StackStats


class StackCollector(Collector):
    """Every metric of one stack. Register it in a registry of yours: `registry.register(StackCollector(stack.stats))`.

    `stats` is called for each scrape, in the thread that serves it. Two stacks need two registries, as their metrics
    have the same names.
    """

    def __init__(self, stats: Callable[[], StackStats]) -> None:
        self._stats = stats

    def describe(self) -> list[Metric]:
        """The metrics without values: registering reads no figure."""
        return [_family(definition, {}) for definition in DEFINITIONS]

    def collect(self) -> list[Metric]:
        """The metrics as they are now."""
        return [_family(definition, samples) for definition, samples in metric_families(self._stats()).items()]


def _family(definition: MetricDefinition, samples: Samples) -> Metric:
    about = definition.name, definition.help
    if definition.kind == "histogram":
        return _histogram(HistogramMetricFamily(*about, labels=definition.label_names), samples)
    kind = CounterMetricFamily if definition.kind == "counter" else GaugeMetricFamily
    family = kind(*about, labels=definition.label_names)
    for labels, value in samples.items():
        assert not isinstance(value, HistogramFigures)
        family.add_metric(labels, value)
    return family


def _histogram(family: HistogramMetricFamily, samples: Samples) -> Metric:
    for labels, value in samples.items():
        assert isinstance(value, HistogramFigures)
        bounds = [*map(floatToGoString, value.bounds), "+Inf"]
        family.add_metric(labels, list(zip(bounds, accumulate(value.counts), strict=True)), value.sum)
    return family


@contextmanager
def metrics_server(stats: Callable[[], StackStats], port: int, host: str = "127.0.0.1") -> Iterator[int]:
    """Serve a stack's metrics over HTTP while the block runs; yields the port, which is a free one for `port` 0.

    The server has a registry and threads of its own. Raises OSError for a port that is in use.
    """
    registry = CollectorRegistry()
    registry.register(StackCollector(stats))
    server, thread = start_http_server(port, host, registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
