"""The figures of a pool for one engine: what has changed since it was sent them last, ready to be counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby, islice

from kvtier.control.tiers.histogram import HistogramFigures
from kvtier.metrics import metric_families
from kvtier.service.packing import pieces
from kvtier.service.wire import COUNTER, GAUGE, HISTOGRAM, FiguresPart, MetricSeries, Stats
from kvtier.stack.watching.stats import StackStats

SERIES_AT_ONCE = 64
"""MetricSeries of one message."""


def document_of(stats: StackStats) -> bytes:
    """All figures, as JSON."""
    return json.dumps(asdict(stats)).encode()


def parts_of(document: bytes, number: int) -> list[FiguresPart]:
    """A document in parts that fit a message each."""
    parts = pieces(document)
    return [FiguresPart(number, part, last=at == len(parts) - 1) for at, part in enumerate(parts)]


class EngineFigures:
    """The totals that an engine was sent."""

    def __init__(self) -> None:
        self._counted: dict[tuple[str, tuple[str, ...]], float] = {}
        self._observed: dict[tuple[str, tuple[str, ...]], HistogramFigures] = {}

    def changes(self, stats: StackStats) -> list[Stats]:
        """The series that changed, and all of them the first time."""
        series = self.series(stats)
        parts = iter(lambda: list(islice(series, SERIES_AT_ONCE)), [])
        items = [Stats(part, last=False) for part in parts]
        return [*items[:-1], Stats(items[-1].series if items else [], last=True)]

    def series(self, stats: StackStats) -> Iterator[MetricSeries]:
        """The same without messages. Every series is there the first time, counters and histograms at zero, because
        what a series begins with is no increase to Prometheus. A histogram's new values are the mean of their bucket's,
        so that each bucket's count and the sum of all are right."""
        for metric, samples in metric_families(stats).items():
            for labels, value in samples.items():
                if isinstance(value, HistogramFigures):
                    found = self._histogram(metric.name, labels, value)
                elif metric.kind == "gauge":
                    found = self._gauge(metric.name, labels, value)
                else:
                    found = self._counter(metric.name, labels, value)
                if found is not None:
                    yield found

    def _gauge(self, name: str, labels: tuple[str, ...], value: float) -> MetricSeries | None:
        if self._counted.get((name, labels)) == value:
            return None
        self._counted[name, labels] = value
        return MetricSeries(GAUGE, name, list(labels), [value])

    def _counter(self, name: str, labels: tuple[str, ...], value: float) -> MetricSeries | None:
        before = self._counted.get((name, labels))
        if before is not None and value <= before:
            return None
        value = max(value, 0.0)  # an engine may end by a negative increase
        self._counted[name, labels] = value
        return MetricSeries(COUNTER, name, list(labels), [value - (before or 0.0)])

    def _histogram(self, name: str, labels: tuple[str, ...], value: HistogramFigures) -> MetricSeries | None:
        before, self._observed[name, labels] = self._observed.get((name, labels)), value
        runs: list[float] = []
        for each, same in groupby(value.values_since(before)):
            runs += (each, sum(1 for _ in same))
        return MetricSeries(HISTOGRAM, name, list(labels), runs) if runs or before is None else None
