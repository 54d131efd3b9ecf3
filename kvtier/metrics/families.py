"""The table of all metrics, and `metric_families`, which fills it in.

Names follow the conventions of Prometheus: the prefix `kvtier_`, base units (`_bytes`, `_seconds`) before a last
`_total`, and `_total` on counters only. A colon would be replaced by exporters, so that one metric had two names.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from kvtier.control.tiers.histogram import DURATION_BOUNDS, HistogramFigures
from kvtier.control.tiers.reuse_times import AGE_BOUNDS
from kvtier.stack.watching.stats import StackStats
from kvtier.types.jobs import DropReason, SkipReason

RESTARTS = "kvtier_restarts_total"
"""A metric that the engine itself counts: its stack process cannot."""

Samples = dict[tuple[str, ...], float | HistogramFigures]
"""A metric's values at one moment, by the values of its labels; those of a histogram are `HistogramFigures`."""


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """A metric: `figure` of `TierStats` for every tier, of `EngineStats` for every engine, or else of `StackStats`.

    A figure with values by reason or state has a second label. `transfers.queued_bytes` is a figure of each value of
    `transfers`, `hints.prefetched` one of the stack's `hints`. `bounds` are those of a histogram's buckets.
    """

    name: str
    figure: str
    label_names: tuple[str, ...]
    help: str
    bounds: tuple[float, ...] = ()

    @property
    def kind(self) -> Literal["counter", "gauge", "histogram"]:
        """A counter, which only grows while the stack is open, if the name ends in `_total`. A gauge may fall."""
        if self.bounds:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"

    @property
    def of_engines(self) -> bool:
        """True for a figure of each engine of a service, which the engines themselves are not sent."""
        return "engine" in self.label_names


def metric_families(stats: StackStats) -> dict[MetricDefinition, Samples]:
    """Every metric of a stack in the order of `DEFINITIONS`. Pure: the same figures give the same families."""
    return {definition: _samples(definition, stats) for definition in DEFINITIONS}


_REASONS: dict[str, type[DropReason] | type[SkipReason]] = {"dropped": DropReason, "skipped": SkipReason}
"""Figures that have a value for each of these, zero before it happens: to Prometheus the first value is no increase."""


def _samples(definition: MetricDefinition, stats: StackStats) -> Samples:
    samples: Samples = {}
    if definition.of_engines:
        for engine, counts in stats.engines.items():
            samples.update(_labelled((engine,), getattr(counts, definition.figure)))
        return samples
    if "tier" not in definition.label_names:
        return dict(_labelled((), attrgetter(definition.figure)(stats)))
    name, _, inner = definition.figure.partition(".")
    for tier, figures in stats.tiers.items():
        value = getattr(figures, name)
        if name in _REASONS:
            value = dict.fromkeys((reason.value for reason in _REASONS[name]), 0) | value
        if inner:
            value = {key: getattr(each, inner) for key, each in value.items()}
        samples.update(_labelled((tier,), value))
    return samples


def _labelled(labels: tuple[str, ...], value: object) -> Iterator[tuple[tuple[str, ...], float | HistogramFigures]]:
    """Each value of a figure with its labels: one by reason or state has one more, one by a tuple as many as that. None
    is no value."""
    if value is None:
        return
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _labelled((*labels, *key) if isinstance(key, tuple) else (*labels, key), each)
    else:
        assert isinstance(value, int | float | HistogramFigures)
        yield labels, value


_TIER = ("tier",)
_ENGINE = ("engine",)
_DIRECTION = ("tier", "direction")
_LOOKED_UP = "Blocks looked up in the tier because no tier above had them."
_LACKED = "Blocks looked up in the tier that it did not have."
_TOOK = "Seconds from the beginning of a transfer job to its end."
_WAITED = "Seconds that a transfer job waited in the tier's queue."
_MOVING = "Bytes of the rows of transfer jobs in flight."
_QUEUED = "Bytes of the rows of transfer jobs that wait."
_OLDEST = "Seconds that the oldest transfer job in flight has been so; 0 without one."
_LATE = "Transfer jobs whose deadline passed, by where they were."
_IN_FLIGHT = "Seconds in which at least one {} of the tier was in flight."
_ERRORS = "Blocks that the tier could not load or store: failed, corrupt, missing or late. Each is a miss."
_UP = "1 while the tier is used, 0 while a breaker refuses its loads, its stores or its lookups."
_SKIPPED = "Blocks not sent to the tier, without a loss: already there, or not admitted so far."
_COMPUTED = "Blocks found in the tier and not loaded, because the engine computes them sooner."
_AGAIN = "Blocks stored in the stack once more after the tier did not admit them."
_WRITTEN = "Bytes on the tier's device of the blocks stored in it, with headers and padding."
_BREAKER = "1 for the state that a breaker of the tier is in, 0 for the others."
_ENTERED = "Times that a breaker of the tier entered the state."
_EVENTS = "What the tier itself counted, such as repeated requests."
_ABOUT = ("tier", "type", "policy", "write_policy", "admit", "layout", "io_engine", "mode")
_GAP = "Seconds between two uses of a block of the tier; uses less than a second apart are one."
_AGE = "Seconds from the last use of a block of the tier to its eviction; to become ready is a use."
_COLDEST = "Seconds since the last use of the block of the tier that was not used for longest."
_LARGEST = "Bytes of the rows of the largest transfer job that waits; 0 without one."
_CAUGHT = "Exceptions that were caught, of tiers or of the stack. After one of the stack every request is a miss."
_USED = "Blocks of the requests that began, where curves are on."
_RETAINED = "Bytes of the slots of blocks that hints retain in the tier."
_RETAINABLE = "Bytes that hints may retain in the tier at most."
_REFUSED = "Blocks of hints that were left as they are."
_UNUSED = "Prefetched blocks that were evicted, or not loaded within a minute."
_UNFETCHED = "Blocks of prefetches that were in no tier, or were not brought up in time."
_EARLY = "Rows of the CPU tier that were given up because of a hint."
_OF_GROUP = "Blocks of the KV cache group that the engine stored or loaded."
_LOADED_BY = "Blocks that the engine loaded, by the highest tier that had them."
_MISSED = "Of them, those that the tier would not have had at so many times its size, estimated."

DEFINITIONS: tuple[MetricDefinition, ...] = tuple(
    MetricDefinition(*row)
    for row in (
        ("kvtier_looked_up_blocks_total", "looked_up", _TIER, _LOOKED_UP),
        ("kvtier_missed_blocks_total", "missed", _TIER, _LACKED),
        ("kvtier_promoted_blocks_total", "promoted", _TIER, "Blocks promoted from the tier to the CPU tier."),
        ("kvtier_demoted_blocks_total", "demoted", _TIER, "Blocks demoted from the CPU tier to the tier."),
        ("kvtier_hit_blocks_total", "hits", _TIER, "Blocks loaded for requests, each once, by their highest copy."),
        ("kvtier_loaded_blocks_total", "loaded", _TIER, "Blocks loaded from the tier."),
        ("kvtier_stored_blocks_total", "stored", _TIER, "Blocks stored in the tier."),
        ("kvtier_evicted_blocks_total", "evictions", _TIER, "Blocks evicted from the tier."),
        ("kvtier_expired_blocks_total", "expired", _TIER, "Blocks of the tier that became older than its max_age."),
        ("kvtier_reuse_gap_seconds", "reuse_gaps", _TIER, _GAP, AGE_BOUNDS),
        ("kvtier_eviction_age_seconds", "eviction_ages", _TIER, _AGE, AGE_BOUNDS),
        ("kvtier_coldest_block_seconds", "coldest_seconds", _TIER, _COLDEST),
        ("kvtier_load_bytes_total", "load_bytes", _TIER, "Payload bytes loaded from the tier."),
        ("kvtier_store_bytes_total", "store_bytes", _TIER, "Payload bytes stored in the tier."),
        ("kvtier_written_bytes_total", "written_bytes", _TIER, _WRITTEN),
        ("kvtier_load_seconds_total", "load_seconds", _TIER, _IN_FLIGHT.format("load")),
        ("kvtier_store_seconds_total", "store_seconds", _TIER, _IN_FLIGHT.format("store")),
        ("kvtier_transfer_seconds", "transfers.took_seconds", _DIRECTION, _TOOK, DURATION_BOUNDS),
        ("kvtier_transfer_wait_seconds", "transfers.waited_seconds", _DIRECTION, _WAITED, DURATION_BOUNDS),
        ("kvtier_in_flight_bytes", "transfers.in_flight_bytes", _DIRECTION, _MOVING),
        ("kvtier_queued_bytes", "transfers.queued_bytes", _DIRECTION, _QUEUED),
        ("kvtier_largest_queued_bytes", "transfers.largest_queued_bytes", _DIRECTION, _LARGEST),
        ("kvtier_oldest_transfer_seconds", "transfers.oldest_seconds", _DIRECTION, _OLDEST),
        ("kvtier_missed_deadlines_total", "transfers.deadlines_missed", (*_DIRECTION, "reason"), _LATE),
        ("kvtier_block_errors_total", "errors", ("tier", "reason"), _ERRORS),
        ("kvtier_dropped_blocks_total", "dropped", ("tier", "reason"), "Blocks that were not stored in the tier."),
        ("kvtier_skipped_blocks_total", "skipped", ("tier", "reason"), _SKIPPED),
        ("kvtier_computed_sooner_blocks_total", "computed_sooner", _TIER, _COMPUTED),
        ("kvtier_computed_again_blocks_total", "computed_again", _TIER, _AGAIN),
        ("kvtier_curve_used_blocks_total", "curve_used", _TIER, _USED),
        ("kvtier_curve_missed_blocks_total", "curve_missed", ("tier", "size"), _MISSED),
        ("kvtier_used_bytes", "used_bytes", _TIER, "Bytes of the slots that hold a block."),
        ("kvtier_peak_used_bytes", "peak_bytes", _TIER, "Largest value of used bytes so far."),
        ("kvtier_capacity_bytes", "capacity_bytes", _TIER, "Bytes the tier may use at most."),
        ("kvtier_used_tokens", "used_tokens", _TIER, "Tokens whose blocks of every group fit in the used bytes."),
        ("kvtier_capacity_tokens", "capacity_tokens", _TIER, "Tokens whose blocks of every group fit in the tier."),
        ("kvtier_retained_bytes", "retained_bytes", _TIER, _RETAINED),
        ("kvtier_retained_limit_bytes", "retained_bytes_max", _TIER, _RETAINABLE),
        ("kvtier_recovered_blocks", "recovered", _TIER, "Blocks found in the tier when it was opened."),
        ("kvtier_recovery_seconds", "recovery_seconds", _TIER, "Seconds in which the tier was opened."),
        ("kvtier_slots", "slots", ("tier", "state"), "Slots of the tier by state."),
        ("kvtier_tier_up", "up", _TIER, _UP),
        ("kvtier_breaker_state", "breaker_states", (*_DIRECTION, "state"), _BREAKER),
        ("kvtier_breaker_transitions_total", "breakers.entered", (*_DIRECTION, "state"), _ENTERED),
        ("kvtier_tier_events_total", "events", ("tier", "reason"), _EVENTS),
        ("kvtier_tier_joined", "joined", _TIER, "1 while the tier loads and stores, 0 while it is held back."),
        ("kvtier_retaining_sessions", "hints.retained_sets", (), "Sessions whose blocks are retained or pinned."),
        ("kvtier_refused_hint_blocks_total", "hints.refused", ("hint", "reason"), _REFUSED),
        ("kvtier_prefetched_blocks_total", "hints.prefetched", (), "Blocks brought up to the CPU tier by prefetches."),
        ("kvtier_prefetched_used_blocks_total", "hints.prefetched_used", (), "Prefetched blocks that were loaded."),
        ("kvtier_prefetched_unused_blocks_total", "hints.prefetched_unused", (), _UNUSED),
        ("kvtier_prefetch_missed_blocks_total", "hints.prefetch_missed", ("reason",), _UNFETCHED),
        ("kvtier_demoted_early_blocks_total", "hints.demoted_early", (), _EARLY),
        ("kvtier_group_blocks_total", "group_blocks", ("direction", "group"), _OF_GROUP),
        ("kvtier_engine_looked_up_blocks_total", "looked_up", _ENGINE, "Blocks that the engine looked up."),
        ("kvtier_engine_loaded_blocks_total", "loaded", (*_ENGINE, "tier"), _LOADED_BY),
        ("kvtier_engine_stored_blocks_total", "stored", _ENGINE, "Blocks that the engine stored."),
        ("kvtier_engine_revoked_rows_total", "revoked_rows", _ENGINE, "Rows that the engine was asked to give back."),
        ("kvtier_engine_held_rows", "held_rows", _ENGINE, "Rows lent or leased to the engine, or in its copies."),
        ("kvtier_backlog_blocks", "backlog", (), "Blocks queued or in flight to lower tiers."),
        ("kvtier_exceptions_total", "errors", (), _CAUGHT),
        (RESTARTS, "restarts", (), "Times that the engine started its stack process again, after that had ended."),
        ("kvtier_config_info", "about", _ABOUT, "1, with the settings of the tier as labels."),
        ("kvtier_build_info", "build", ("version",), "1, with the version of kvtier as label."),
        ("kvtier_lost_events_total", "events_lost", (), "Keys whose events were discarded because they were not read."),
    )
)
"""Every metric of kvtier: this table is the only place of their names."""
