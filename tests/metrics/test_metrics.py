"""Metric names follow one rule, are documented, and carry the figures of the stack."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
from support_paths import PROJECT

from kvtier.metrics import DEFINITIONS, MetricDefinition, metric_families
from kvtier.stack import StackStats, TierStats

UNITS = ("_bytes", "_seconds", "_blocks", "_slots", "_events", "_errors", "_up")
NO_BASE_UNIT = ("_ms", "_us", "_milliseconds", "_kib", "_mib", "_gib", "_percent", "_hits")
GAUGES = ("used_bytes", "peak_bytes", "capacity_bytes", "slots", "up", "backlog")
each = pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.name)


def tier(**changes: object) -> TierStats:
    """Figures in which every number is another one."""
    numbers = {field.name: number for number, field in enumerate(fields(TierStats), start=1) if field.default == 0}
    return TierStats(**(numbers | {"dropped": {"no_slot": 90}, "slots": {"ready": 91, "free": 92}} | changes))  # type: ignore[arg-type]


def values(stats: StackStats) -> dict[str, dict[tuple[str, ...], float]]:
    return {metric.name: samples for metric, samples in metric_families(stats).items()}


@each
def test_a_name_has_the_prefix_base_units_and_no_colon(definition: MetricDefinition) -> None:
    assert re.fullmatch(r"kvtier_[a-z]+(_[a-z]+)*", definition.name)
    stem = definition.name.removesuffix("_total")
    assert stem.endswith(UNITS)
    assert not stem.endswith(NO_BASE_UNIT)


@each
def test_a_name_ends_in_total_if_its_figure_only_grows(definition: MetricDefinition) -> None:
    grows = definition.figure not in GAUGES
    assert definition.name.endswith("_total") == grows
    assert (definition.kind == "counter") == grows


@each
def test_a_metric_is_documented_with_its_kind_labels_and_help(definition: MetricDefinition) -> None:
    labels = ", ".join(f"`{name}`" for name in definition.label_names)
    row = f"| `{definition.name}` | {definition.kind} | {labels} | {definition.help} |"
    assert row in (PROJECT / "docs" / "metrics.md").read_text().splitlines()


def test_the_documentation_names_no_other_metric() -> None:
    documented = re.findall(r"^\| `(kvtier_\w+)` \|", (PROJECT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    assert documented == [definition.name for definition in DEFINITIONS]
    assert len(set(documented)) == len(documented)


def test_every_number_of_a_tier_is_a_sample() -> None:
    figures = tier()
    found = values(StackStats({"disk": figures}, backlog=77, events_lost=78))
    samples = sorted(value for samples in found.values() for value in samples.values())
    numbers = [getattr(figures, field.name) for field in fields(TierStats) if field.default == 0]
    assert samples == sorted([*numbers, 90, 91, 92, 77, 78, 1])


def test_samples_carry_the_labels_of_their_definition() -> None:
    families = metric_families(StackStats({"cpu": tier(), "disk": tier()}, backlog=1))
    assert list(families) == list(DEFINITIONS)
    for metric, samples in families.items():
        assert all(len(labels) == len(metric.label_names) for labels in samples)
    found = values(StackStats({"cpu": tier(), "disk": tier(corrupt=3)}, backlog=1))
    assert found["kvtier_block_errors_total"]["disk", "corrupt"] == 3
    assert found["kvtier_dropped_blocks_total"]["cpu", "no_slot"] == 90
    assert found["kvtier_backlog_blocks"] == {(): 1}


@pytest.mark.parametrize(
    ("breaker", "up"),
    [
        ("closed", 1),
        ("half_open", 1),
        ("load half_open, store closed", 1),
        ("open", 0),
        ("load open, store closed", 0),
        ("load half_open, store open", 0),
        ("open: I/O is stuck", 0),
    ],
)
def test_a_tier_is_up_unless_a_breaker_is_open(breaker: str, up: int) -> None:
    found = values(StackStats({"disk": tier(breaker=breaker)}, backlog=0))
    assert found["kvtier_tier_up"] == {("disk",): up}
