"""The table of all metrics, and `metric_families`, which fills it in.

Names follow the conventions of Prometheus: the prefix `kvtier_`, base units (`_bytes`, `_seconds`) before a last
`_total`, and `_total` on counters only. A colon would be replaced by exporters, so that one metric had two names.
"""

from dataclasses import dataclass
from typing import Literal

from kvtier.stack.stats import StackStats

Samples = dict[tuple[str, ...], float]
"""One metric's values at one moment, by the values of its labels."""


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """One metric: `figure` of `TierStats` for every tier, or of `StackStats` where there are no labels.

    A figure with values by reason or state has a second label.
    """

    name: str
    figure: str
    label_names: tuple[str, ...]
    help: str

    @property
    def kind(self) -> Literal["counter", "gauge"]:
        """A counter, which only grows while the stack is open, if the name ends in `_total`. A gauge may fall."""
        return "counter" if self.name.endswith("_total") else "gauge"


def metric_families(stats: StackStats) -> dict[MetricDefinition, Samples]:
    """Every metric of a stack in the order of `DEFINITIONS`. Pure: the same figures give the same families."""
    return {definition: _samples(definition, stats) for definition in DEFINITIONS}


def _samples(definition: MetricDefinition, stats: StackStats) -> Samples:
    if not definition.label_names:
        return {(): getattr(stats, definition.figure)}
    samples: Samples = {}
    for tier, figures in stats.tiers.items():
        value = getattr(figures, definition.figure)
        if isinstance(value, dict):
            samples |= {(tier, key): each for key, each in value.items()}
        else:
            samples[tier,] = value
    return samples


_TIER = ("tier",)
_IN_FLIGHT = "Seconds in which at least one {} of the tier was in flight."
_ERRORS = "Blocks that the tier could not load or store: failed, corrupt, missing or late. Each is a miss."

DEFINITIONS: tuple[MetricDefinition, ...] = tuple(
    MetricDefinition(*row)
    for row in (
        ("kvtier_hit_blocks_total", "hits", _TIER, "Blocks loaded for requests whose highest copy was in the tier."),
        ("kvtier_loaded_blocks_total", "loaded", _TIER, "Blocks loaded from the tier."),
        ("kvtier_stored_blocks_total", "stored", _TIER, "Blocks stored in the tier."),
        ("kvtier_evicted_blocks_total", "evictions", _TIER, "Blocks evicted from the tier."),
        ("kvtier_load_bytes_total", "load_bytes", _TIER, "Payload bytes loaded from the tier."),
        ("kvtier_store_bytes_total", "store_bytes", _TIER, "Payload bytes stored in the tier."),
        ("kvtier_load_seconds_total", "load_seconds", _TIER, _IN_FLIGHT.format("load")),
        ("kvtier_store_seconds_total", "store_seconds", _TIER, _IN_FLIGHT.format("store")),
        ("kvtier_block_errors_total", "errors", ("tier", "reason"), _ERRORS),
        ("kvtier_dropped_blocks_total", "dropped", ("tier", "reason"), "Blocks that were not stored in the tier."),
        ("kvtier_used_bytes", "used_bytes", _TIER, "Bytes of the slots that hold a block."),
        ("kvtier_peak_used_bytes", "peak_bytes", _TIER, "Largest value of used bytes so far."),
        ("kvtier_capacity_bytes", "capacity_bytes", _TIER, "Bytes the tier may use at most."),
        ("kvtier_slots", "slots", ("tier", "state"), "Slots of the tier by state."),
        ("kvtier_tier_up", "up", _TIER, "1 while the tier is used, 0 while a breaker refuses its loads or its stores."),
        ("kvtier_backlog_blocks", "backlog", (), "Blocks queued or in flight to lower tiers."),
        ("kvtier_lost_events_total", "events_lost", (), "Keys whose events were discarded because they were not read."),
    )
)
"""Every metric of kvtier: this table is the only place of their names."""
