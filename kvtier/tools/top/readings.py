"""The figures of the stacks of one process at one moment, from its stats socket or from a page of metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from kvtier.cli.stores import printable
from kvtier.control.tiers.histogram import HistogramFigures
from kvtier.errors import ResourceError
from kvtier.metrics.families import DEFINITIONS, MetricDefinition, metric_families
from kvtier.stack.watching.stats_socket import stats_from_json

Labels = tuple[str, ...]
Value = float | HistogramFigures
Sample = tuple[str, Mapping[str, str], float]
"""Of a page: a name, labels, a value."""

_BY_NAME = {each.name: each for each in DEFINITIONS}
_BUCKET, _PARTS = "_bucket", ("_bucket", "_sum", "_count")
_TIER, _BOUND = "tier", "le"
NAME_MAX = 64
VALUE_MAX = float(1 << 63)
"""No figure is larger, and none is negative."""
WORK_MAX = 1 << 22
"""Tiers times values, at most: each row looks at every value. Sixty-four tiers have some ten thousand values."""


@dataclass(frozen=True, slots=True)
class StackReading:
    """Figures by their names in `kvtier.metrics.DEFINITIONS`, those of a tier by labels that begin with the tier.

    `seconds` is a clock of the source. `tiers` has the name of each tier, and the stack that it belongs to: where a
    page shows several stacks, names are `stack/tier`. `states` are those that the source says in words. `process`
    differs where counters begin anew. `written_today_bytes` is None where it is not known.
    """

    seconds: float
    tiers: Mapping[str, str]
    figures: Mapping[str, Mapping[Labels, Value]]
    states: Mapping[str, str] = field(default_factory=dict)
    process: object = None
    written_today_bytes: int | None = None

    def value(self, figure: str, *labels: str) -> float | None:
        """One figure; None where the source does not have it."""
        found = self.figures.get(figure, {}).get(labels)
        return None if isinstance(found, HistogramFigures) else found

    def total(self, figure: str, *first: str) -> float | None:
        """The sum of a figure over all labels that begin so; None where the source does not have it."""
        found = [value for labels, value in self.figures.get(figure, {}).items() if labels[: len(first)] == first]
        return sum(each for each in found if not isinstance(each, HistogramFigures)) if found else None

    def most(self, figure: str) -> float | None:
        """The largest value of a figure, whatever its labels; None where the source does not have it."""
        found = self.figures.get(figure, {}).values()
        return max((each for each in found if not isinstance(each, HistogramFigures)), default=None)

    def histogram(self, figure: str, *labels: str) -> HistogramFigures | None:
        """A histogram; None where the source does not have it."""
        found = self.figures.get(figure, {}).get(labels)
        return found if isinstance(found, HistogramFigures) else None


def from_document(document: Mapping[str, Any]) -> StackReading:
    """What a stats socket said. Raises ResourceError if it is no document of one."""
    try:
        stats = stats_from_json(document)
        today = sum(map(int, document["written_today_bytes"].values()))
        reading = StackReading(
            float(document["seconds"]),
            dict.fromkeys(stats.tiers, ""),
            {metric.figure: samples for metric, samples in metric_families(stats).items()},
            {name: tier.breaker for name, tier in stats.tiers.items()},
            (int(document["process"]), float(document["opened_at"])),
            today if _is_sound(today) else None,
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise ResourceError("it says something else than a stats socket of kvtier") from None
    return _bounded(reading)


def from_samples(samples: Iterable[Sample], seconds: float) -> StackReading:
    """What a page of metrics says of every stack of its process."""
    known = [(found, labels, name, value) for name, labels, value in samples if (found := _definition(name))]
    names = _stack_names([_rest(definition, labels) for definition, labels, _, _ in known])
    tiers: dict[str, str] = {}
    figures: dict[str, dict[Labels, Value]] = {}
    buckets: dict[str, dict[Labels, dict[float, float]]] = {}
    for definition, labels, name, value in known:
        stack = names[_rest(definition, labels)]
        own = _own_labels(definition, labels, stack)
        if own and definition.label_names[0] == _TIER:
            tiers[own[0]] = stack
        if not definition.bounds:
            place = figures.setdefault(definition.figure, {})
            place[own] = place.get(own, 0) + value  # type: ignore[operator]
        elif name.endswith(_BUCKET) and _is_sound(value):
            buckets.setdefault(definition.figure, {}).setdefault(own, {})[float(labels[_BOUND])] = value
    for figure, by_labels in buckets.items():
        figures[figure] = {own: _histogram(each) for own, each in by_labels.items()}
    return _bounded(StackReading(seconds, tiers, figures))


def _bounded(reading: StackReading) -> StackReading:
    """What may be shown of what a source says: printable short names, and the values that a figure may have. The others
    are not known then. Raises ResourceError for more tiers than can be shown."""
    if len(reading.tiers) * sum(map(len, reading.figures.values())) > WORK_MAX:
        raise ResourceError(f"it names {len(reading.tiers)} tiers with too many figures to be shown")
    if not _is_sound(reading.seconds):
        raise ResourceError("its clock is none")
    return replace(
        reading,
        seconds=round(reading.seconds, 3),
        tiers={_name(tier): _name(stack) for tier, stack in reading.tiers.items()},
        figures={
            figure: {tuple(map(_name, labels)): value for labels, value in samples.items() if _is_sound(value)}
            for figure, samples in reading.figures.items()
        },
        states={_name(tier): _name(state) for tier, state in reading.states.items()},
    )


def _name(text: str) -> str:
    return printable(text[:NAME_MAX]) if text else ""


def _is_sound(value: Value) -> bool:
    """True for a value that a figure may have; not for NaN. A histogram counts in ordered buckets."""
    if not isinstance(value, HistogramFigures):
        return 0 <= value <= VALUE_MAX
    parts = (*value.bounds, *value.counts, *value.sums)
    of_one_size = len(value.bounds) + 1 == len(value.counts) == len(value.sums)
    return of_one_size and [*value.bounds] == sorted(value.bounds) and all(0 <= part <= VALUE_MAX for part in parts)


def _definition(name: str) -> MetricDefinition | None:
    if name in _BY_NAME:
        return _BY_NAME[name]
    for part in _PARTS:
        found = _BY_NAME.get(name.removesuffix(part))
        if found is not None and found.bounds:
            return found
    return None


def _rest(definition: MetricDefinition, labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The labels that are not kvtier's: they say which stack of the process it is."""
    own = {*definition.label_names, _BOUND}
    return tuple(sorted((name, value) for name, value in labels.items() if name not in own))


def _own_labels(definition: MetricDefinition, labels: Mapping[str, str], stack: str) -> Labels:
    own = tuple(labels.get(name, "") for name in definition.label_names)
    return (f"{stack}/{own[0]}", *own[1:]) if own and stack else own


def _stack_names(stacks: Iterable[tuple[tuple[str, str], ...]]) -> dict[tuple[tuple[str, str], ...], str]:
    """A name for each stack: the values of the labels by which they differ, empty for one alone."""
    distinct = list(dict.fromkeys(stacks))
    alike = set.intersection(*map(set, distinct)) if distinct else set()
    return {each: ",".join(value for name, value in each if (name, value) not in alike) for each in distinct}


def _histogram(cumulative: Mapping[float, float]) -> HistogramFigures:
    """Buckets of a page, each of which counts those below it too. Sums are not asked for."""
    bounds = sorted(cumulative)
    counts = tuple(int(cumulative[after] - before) for before, after in _steps(bounds, cumulative))
    return HistogramFigures(tuple(bounds[:-1]), counts, (0.0,) * len(counts))


def _steps(bounds: list[float], cumulative: Mapping[float, float]) -> Iterable[tuple[float, float]]:
    yield 0.0, bounds[0]
    yield from ((cumulative[before], after) for before, after in pairwise(bounds))
