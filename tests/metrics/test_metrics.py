"""Metric names follow one rule, are documented, and carry the figures of the stack."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
from support_control import World, cpu_setup, key, shared_setup
from support_paths import PROJECT

import kvtier
from kvtier.control.tiers.histogram import Histogram, HistogramFigures
from kvtier.control.tiers.shared_tier import SharedTier
from kvtier.metrics import DEFINITIONS, MetricDefinition, metric_families
from kvtier.metrics.families import Samples
from kvtier.stack import StackStats, TierStats
from kvtier.stack.dispatcher import TransferStats
from kvtier.stack.watching.stats import EngineStats, HintStats, lower_stats
from kvtier.tier.contract import LookupResult
from kvtier.types.jobs import DropReason, SkipReason

UNITS = (
    "_bytes",
    "_seconds",
    "_blocks",
    "_slots",
    "_rows",
    "_events",
    "_errors",
    "_restarts",
    "_deadlines",
    "_tokens",
    "_state",
    "_transitions",
    "_info",
    "_up",
    "_joined",
    "_exceptions",
    "_sessions",
)
NO_BASE_UNIT = ("_ms", "_us", "_milliseconds", "_kib", "_mib", "_gib", "_percent", "_hits")
GAUGES = (
    "held_rows",
    "used_tokens",
    "capacity_tokens",
    "recovered",
    "recovery_seconds",
    "breaker_states",
    "about",
    "build",
    "used_bytes",
    "peak_bytes",
    "capacity_bytes",
    "slots",
    "retained_bytes",
    "retained_bytes_max",
    "hints.retained_sets",
    "up",
    "joined",
    "backlog",
    "transfers.in_flight_bytes",
    "transfers.queued_bytes",
    "transfers.oldest_seconds",
    "transfers.largest_queued_bytes",
    "coldest_seconds",
)
TIMES = Histogram().figures()
TRANSFERS = {"load": TransferStats(TIMES, TIMES, 94, 95, {"queued": 96}, oldest_seconds=98, largest_queued_bytes=99)}
_BY_LABEL = {
    "dropped": {"no_slot": 90},
    "slots": {"ready": 91, "free": 92},
    "curve_missed": {"2": 93},
    "transfers": TRANSFERS,
    "events": {"repeated": 97},
    "coldest_seconds": 100,
    "reuse_gaps": TIMES,
    "eviction_ages": TIMES,
}
each = pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.name)


def tier(**changes: object) -> TierStats:
    """Figures in which every number is another one."""
    numbers = {field.name: number for number, field in enumerate(fields(TierStats), start=1) if field.default == 0}
    return TierStats(**(numbers | _BY_LABEL | changes))  # type: ignore[arg-type]


def values(stats: StackStats) -> dict[str, Samples]:
    return {metric.name: samples for metric, samples in metric_families(stats).items()}


@each
def test_a_name_has_the_prefix_base_units_and_no_colon(definition: MetricDefinition) -> None:
    assert re.fullmatch(r"kvtier_[a-z]+(_[a-z]+)*", definition.name)
    stem = definition.name.removesuffix("_total")
    assert stem.endswith(UNITS)
    assert not stem.endswith(NO_BASE_UNIT)


@each
def test_a_name_ends_in_total_if_its_figure_only_grows(definition: MetricDefinition) -> None:
    grows = definition.figure not in GAUGES and not definition.bounds
    assert definition.name.endswith("_total") == grows
    assert (definition.kind == "counter") == grows


@each
def test_a_metric_is_documented_with_its_kind_labels_and_help(definition: MetricDefinition) -> None:
    labels = ", ".join(f"`{name}`" for name in definition.label_names)
    row = f"| `{definition.name}` | {definition.kind} | {labels} | {definition.help} |"
    assert row in (PROJECT / "docs" / "metrics.md").read_text().splitlines()


def test_labels_are_few() -> None:
    shown = {name for each in DEFINITIONS if not each.name.endswith("_info") for name in each.label_names}
    assert shown == {"tier", "direction", "reason", "state", "size", "hint", "group", "engine"}


def test_the_documentation_names_no_other_metric() -> None:
    documented = re.findall(r"^\| `(kvtier_\w+)` \|", (PROJECT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    assert documented == [definition.name for definition in DEFINITIONS]
    assert len(set(documented)) == len(documented)


def test_every_number_is_a_sample() -> None:
    figures = tier()
    of_stack = {
        field.name: number
        for number, field in enumerate(fields(StackStats), start=70)
        if field.name not in ("tiers", "hints", "engines")
    }
    engines = {"one": EngineStats(201, 202, {"disk": 203}, 204, 205)}
    hints = HintStats(79, {"retain": {"over_quota": 80}}, 81, 82, 83, {"late": 84}, 85)
    found = values(StackStats({"disk": figures}, **of_stack, hints=hints, engines=engines))
    values_found = [value for samples in found.values() for value in samples.values()]
    samples = sorted(value for value in values_found if not isinstance(value, HistogramFigures) and value)
    assert len(values_found) - sum(not isinstance(value, HistogramFigures) for value in values_found) == 4
    numbers = [getattr(figures, field.name) for field in fields(TierStats) if field.default == 0]
    numbers.remove(figures.token_bytes)
    derived = [figures.capacity_tokens, figures.used_tokens]
    ones = [figures.up, figures.joined, *figures.about.values(), *StackStats({}, 0).build.values()]
    expected = [*numbers, *range(90, 101), *of_stack.values(), *range(79, 86), *range(201, 206), *ones, *derived]
    assert samples == sorted(filter(None, expected))


def test_every_figure_in_words_is_a_label_or_a_state() -> None:
    in_words = {field.name for field in fields(TierStats) if isinstance(field.default, str)}
    shown = tier(**{name: f"{name} itself" for name in in_words})
    labels = {
        label for samples in values(StackStats({"disk": shown}, 0)).values() for each in samples for label in each
    }
    assert {f"{name} itself" for name in in_words - {"breaker"}} <= labels


def test_a_reason_has_a_value_before_it_happens() -> None:
    found = values(StackStats({"disk": TierStats()}, 0))
    assert found["kvtier_dropped_blocks_total"] == {("disk", reason.value): 0 for reason in DropReason}
    assert found["kvtier_skipped_blocks_total"] == {("disk", reason.value): 0 for reason in SkipReason}
    assert set(found["kvtier_block_errors_total"].values()) == {0}


def test_samples_carry_the_labels_of_their_definition() -> None:
    families = metric_families(StackStats({"cpu": tier(), "disk": tier()}, backlog=1))
    assert list(families) == list(DEFINITIONS)
    for metric, samples in families.items():
        assert all(len(labels) == len(metric.label_names) for labels in samples)
    found = values(StackStats({"cpu": tier(), "disk": tier(corrupt=3)}, backlog=1))
    assert found["kvtier_block_errors_total"]["disk", "corrupt"] == 3
    assert found["kvtier_dropped_blocks_total"]["cpu", "no_slot"] == 90
    assert found["kvtier_backlog_blocks"] == {(): 1}
    assert found["kvtier_prefetched_blocks_total"] == {(): 0}
    assert found["kvtier_queued_bytes"]["disk", "load"] == 95
    assert found["kvtier_missed_deadlines_total"]["disk", "load", "queued"] == 96
    assert found["kvtier_transfer_seconds"]["disk", "load"] is TIMES


@pytest.mark.parametrize(
    ("breaker", "up"),
    [
        ("closed", 1),
        ("half_open", 1),
        ("load half_open, store closed", 1),
        ("open", 0),
        ("load open, store closed", 0),
        ("load half_open, store open", 0),
        ("load closed, store closed, lookup open", 0),
        ("open: I/O is stuck", 0),
    ],
)
def test_a_tier_is_up_unless_a_breaker_is_open(breaker: str, up: int) -> None:
    found = values(StackStats({"disk": tier(breaker=breaker)}, backlog=0))
    assert found["kvtier_tier_up"] == {("disk",): up}


def test_a_breaker_of_lookups_is_shown() -> None:
    world = World(cpu_setup(4), [shared_setup(hint_seconds=5.0, lookup_timeout_seconds=1.0)])
    (lower,) = world.plane.control.lowers
    assert isinstance(lower.index, SharedTier)
    assert lower_stats(lower, {}, world.now).breaker == "closed"
    for number in range(lower.index.lookup_breaker.threshold):
        lower.index.take_answers([key(number)], [LookupResult.RETRY], world.now)
    stats = lower_stats(lower, {}, world.now)
    assert (stats.breaker, stats.up) == ("load closed, store closed, lookup open", 0)
    world.plane.hold_back(world.now)
    assert lower_stats(lower, {}, world.now).breaker == "held_back"


def test_breakers_are_shown_apart_with_what_they_went_through() -> None:
    world = World(cpu_setup(4), [shared_setup()])
    (lower,) = world.plane.control.lowers
    breaker = lower.load_breaker
    for _ in range(breaker.threshold):
        breaker.on_failure(world.now)
    assert not breaker.allows(world.now)
    stats = StackStats({"s3": lower_stats(lower, {}, world.now)}, backlog=0)
    found = values(stats)["kvtier_breaker_state"]
    assert {labels[1:]: value for labels, value in found.items() if value} == {
        ("load", "open"): 1,
        ("store", "closed"): 1,
        ("lookup", "closed"): 1,
    }
    assert breaker.allows(world.now + breaker.pause_seconds)
    breaker.on_success()
    stats = StackStats({"s3": lower_stats(lower, {}, world.now)}, backlog=0)
    entered = values(stats)["kvtier_breaker_transitions_total"]
    assert {labels: value for labels, value in entered.items() if value} == {
        ("s3", "load", "open"): 1,
        ("s3", "load", "half_open"): 1,
        ("s3", "load", "closed"): 1,
    }


def test_settings_and_the_version_are_labels() -> None:
    about = {"kind": "fs", "policy": "arc", "write_policy": "on_evict", "admit": "always"}
    described = tier(**about, layout="slab", io_engine="io_uring", mode="slab, io_uring, direct")
    found = values(StackStats({"disk": described}, backlog=0))
    assert found["kvtier_config_info"] == {
        ("disk", "fs", "arc", "on_evict", "always", "slab", "io_uring", "slab, io_uring, direct"): 1
    }
    assert found["kvtier_build_info"] == {(kvtier.__version__,): 1}


def test_a_tier_without_a_size_in_tokens_or_breakers_has_no_such_samples() -> None:
    found = values(StackStats({"cpu": tier(token_bytes=0.0)}, backlog=0))
    names = ("capacity_tokens", "used_tokens", "promoted_blocks_total", "demoted_blocks_total", "breaker_state")
    assert [found[f"kvtier_{name}"] for name in names] == [{}] * len(names)
