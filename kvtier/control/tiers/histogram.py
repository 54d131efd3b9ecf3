"""Histograms with fixed buckets: a few integers each, however much is observed."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

DURATION_BOUNDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025),
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""Seconds of transfers and of their waits: from rows in memory to a deadline of a minute."""


@dataclass(frozen=True, slots=True)
class HistogramFigures:
    """The counts of a histogram: `counts[i]` values up to `bounds[i]` and above the bound before it, the last one
    beyond all bounds; `sums[i]` is their sum."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sums: tuple[float, ...]

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)

    @property
    def sum(self) -> float:
        """The sum of all values."""
        return sum(self.sums)

    def values_since(self, before: HistogramFigures | None) -> Iterator[float]:
        """Values in place of those that were counted since: as many in each bucket, with their sum up to rounding."""
        for bucket, (count, total) in enumerate(zip(self.counts, self.sums, strict=True)):
            new = count - (before.counts[bucket] if before else 0)
            if new:
                mean = (total - (before.sums[bucket] if before else 0.0)) / new
                least = math.nextafter(self.bounds[bucket - 1], math.inf) if bucket else 0.0
                most = self.bounds[bucket] if bucket < len(self.bounds) else math.inf
                yield from repeat(min(max(mean, least), most), new)


class Histogram:
    """Counts values by bucket. One thread observes; `figures` is for any."""

    __slots__ = ("_bounds", "_counts", "_sums")

    def __init__(self, bounds: tuple[float, ...] = DURATION_BOUNDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sums = [0.0] * (len(bounds) + 1)

    def observe(self, value: float, count: int = 1) -> None:
        """Count one value, or the same one several times."""
        bucket = bisect_left(self._bounds, value)
        self._counts[bucket] += count
        self._sums[bucket] += count * value

    def figures(self) -> HistogramFigures:
        """The counts until now."""
        return HistogramFigures(self._bounds, tuple(self._counts), tuple(self._sums))
