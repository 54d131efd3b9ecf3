"""The Grafana dashboard of kvtier, from the table of its metrics.

Needs `pip install grafana-foundation-sdk`. Make it anew after a change: python examples/monitoring/dashboard.py
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models

MADE = Path(__file__).with_name("dashboard.json")
SCOPE = 'job=~"$job", instance=~"$instance", tier=~"$tier"'
STACK_SCOPE = 'job=~"$job", instance=~"$instance"'
_COLUMNS, _WIDTH, _HEIGHT = 3, 8, 8
_OF_OTHERS = ("id", "auto", "auto_count", "auto_min")
"""What the builder writes into every variable, and Grafana's types do not have."""
_METRIC = re.compile(r"kvtier_[a-z_]+")
_TIER, _WAY = "{{instance}} {{tier}}", "{{instance}} {{tier}} {{direction}}"


@dataclass(frozen=True, slots=True)
class Chart:
    """One panel: what it says, Grafana's unit, and an expression with its legend for each kind of line.

    `{tier}` and `{stack}` stand for the selected series of a metric with and without the label `tier`.
    """

    title: str
    about: str
    unit: str
    lines: tuple[tuple[str, str], ...]
    stacked: bool = False

    @property
    def metrics(self) -> list[str]:
        """The names of the metrics in it, as they are in the documentation."""
        found = (name for line, _ in self.lines for name in _METRIC.findall(line))
        return list(dict.fromkeys(name.removesuffix("_bucket") for name in found))

    @property
    def expressions(self) -> list[str]:
        """What is asked of Prometheus."""
        scopes = (("{tier", "{" + SCOPE), ("{stack", "{" + STACK_SCOPE))
        return [reduce(lambda text, scope: text.replace(*scope), scopes, line) for line, _ in self.lines]


def rate(metric: str, legend: str = _TIER) -> tuple[str, str]:
    """A counter by the second."""
    return f"rate({metric}{{tier}}[$__rate_interval])", legend


def now(metric: str, legend: str = _TIER) -> tuple[str, str]:
    """A gauge."""
    return f"{metric}{{tier}}", legend


def of_engine(metric: str, legend: str) -> tuple[str, str]:
    """A counter of an engine of a service by the second."""
    return f"rate(kvtier_engine_{metric}{{stack}}[$__rate_interval])", legend


def quantile(metric: str, share: float) -> tuple[str, str]:
    """A quantile of a histogram, by tier and direction."""
    buckets = f"rate({metric}_bucket{{tier}}[$__rate_interval])"
    legend = f"p{share * 100:g} {_WAY}"
    return f"histogram_quantile({share}, sum by (instance, tier, direction, le) ({buckets}))", legend


def median_of_hour(metric: str, legend: str) -> tuple[str, str]:
    """The median of a histogram of rare values, by tier."""
    buckets = f"rate({metric}_bucket{{tier}}[1h])"
    return f"histogram_quantile(0.5, sum by (instance, tier, le) ({buckets}))", legend


ROWS: dict[str, tuple[Chart, ...]] = {
    "Hits": (
        Chart(
            "Share of lookups that hit",
            "Of the blocks that no tier above had, those that the tier had.",
            "percentunit",
            (
                (
                    "1 - rate(kvtier_missed_blocks_total{tier}[$__rate_interval])"
                    " / (rate(kvtier_looked_up_blocks_total{tier}[$__rate_interval]) > 0)",
                    _TIER,
                ),
            ),
        ),
        Chart(
            "Blocks hit",
            "Blocks loaded for requests, each once: by the highest tier that had it when the request asked.",
            "cps",
            (rate("kvtier_hit_blocks_total"),),
            stacked=True,
        ),
        Chart(
            "Blocks by KV cache group",
            "Blocks that the engine stored and loaded: a group that is stored and never loaded is of no use.",
            "cps",
            (("rate(kvtier_group_blocks_total{stack}[$__rate_interval])", "{{instance}} {{direction}} {{group}}"),),
        ),
        Chart(
            "Computed sooner",
            "Blocks found and not loaded, because the engine computes them sooner: the tier is too slow.",
            "cps",
            (rate("kvtier_computed_sooner_blocks_total"),),
        ),
        Chart(
            "Between the CPU tier and the tier below",
            "Promotions bring blocks up before a hit, demotions bring them down.",
            "cps",
            (
                rate("kvtier_promoted_blocks_total", f"promoted {_TIER}"),
                rate("kvtier_demoted_blocks_total", f"demoted {_TIER}"),
            ),
        ),
        Chart(
            "Share missed at other sizes",
            "Where the stack file has curves: what the tier would miss at a half, twice and four times its size.",
            "percentunit",
            (
                (
                    "rate(kvtier_curve_missed_blocks_total{tier}[$__rate_interval]) / ignoring(size) group_left()"
                    " (rate(kvtier_curve_used_blocks_total{tier}[$__rate_interval]) > 0)",
                    f"{_TIER} x{{{{size}}}}",
                ),
            ),
        ),
        Chart(
            "Not admitted, and computed again",
            "Blocks that were stored once more after the tier did not admit them: what admission cost.",
            "cps",
            (
                rate("kvtier_skipped_blocks_total", f"{{{{reason}}}} {_TIER}"),
                rate("kvtier_computed_again_blocks_total", f"computed again {_TIER}"),
            ),
        ),
    ),
    "Room": (
        Chart(
            "Used and capacity",
            "A full tier is no fault: it evicts.",
            "bytes",
            (
                now("kvtier_used_bytes", f"used {_TIER}"),
                now("kvtier_peak_used_bytes", f"peak {_TIER}"),
                now("kvtier_capacity_bytes", f"capacity {_TIER}"),
            ),
        ),
        Chart(
            "Tokens",
            "Tokens whose blocks of every group fit, now and at most.",
            "short",
            (now("kvtier_used_tokens", f"used {_TIER}"), now("kvtier_capacity_tokens", f"capacity {_TIER}")),
        ),
        Chart(
            "Evicted and expired",
            "Blocks that left the tier for others, or became older than max_age; a server counts those of all clients.",
            "cps",
            (
                rate("kvtier_evicted_blocks_total", f"evicted {_TIER}"),
                rate("kvtier_expired_blocks_total", f"expired {_TIER}"),
                (
                    'rate(kvtier_tier_events_total{tier, reason="server.evicted"}[$__rate_interval])',
                    f"names evicted by the server {_TIER}",
                ),
            ),
        ),
        Chart(
            "Time between uses, and at eviction",
            "Medians of an hour. Where blocks are evicted sooner after their last use than others are used again, more"
            " room would bring hits. And how long the coldest block has not been used now.",
            "s",
            (
                median_of_hour("kvtier_reuse_gap_seconds", f"used again after {_TIER}"),
                median_of_hour("kvtier_eviction_age_seconds", f"evicted after {_TIER}"),
                now("kvtier_coldest_block_seconds", f"coldest {_TIER}"),
            ),
        ),
        Chart("Slots", "Slots by state.", "short", (now("kvtier_slots", f"{{{{state}}}} {_TIER}"),)),
        Chart(
            "Stored and loaded",
            "Blocks that moved.",
            "cps",
            (
                rate("kvtier_stored_blocks_total", f"stored {_TIER}"),
                rate("kvtier_loaded_blocks_total", f"loaded {_TIER}"),
            ),
        ),
        Chart(
            "Written to the device in a day",
            "Beside what a disk is rated for, or what an object store costs.",
            "bytes",
            (("increase(kvtier_written_bytes_total{tier}[1d])", _TIER),),
        ),
    ),
    "Hints": (
        Chart(
            "Retained",
            "Bytes that hints keep from being evicted, and at most.",
            "bytes",
            (now("kvtier_retained_bytes", f"retained {_TIER}"), now("kvtier_retained_limit_bytes", f"at most {_TIER}")),
        ),
        Chart(
            "Sessions that retain",
            "Sessions whose blocks are retained or pinned.",
            "short",
            (("kvtier_retaining_sessions{stack}", "{{instance}}"),),
        ),
        Chart(
            "Refused",
            "Blocks of hints that were left as they are. over_quota: more is retained than the tiers allow.",
            "cps",
            (("rate(kvtier_refused_hint_blocks_total{stack}[$__rate_interval])", "{{instance}} {{hint}} {{reason}}"),),
        ),
        Chart(
            "Prefetched",
            "Blocks brought up ahead of loads, and what became of them. Many unused: prefetches come too early.",
            "cps",
            (
                ("rate(kvtier_prefetched_blocks_total{stack}[$__rate_interval])", "brought up {{instance}}"),
                ("rate(kvtier_prefetched_used_blocks_total{stack}[$__rate_interval])", "used {{instance}}"),
                ("rate(kvtier_prefetched_unused_blocks_total{stack}[$__rate_interval])", "unused {{instance}}"),
                ("rate(kvtier_prefetch_missed_blocks_total{stack}[$__rate_interval])", "{{reason}} {{instance}}"),
            ),
        ),
        Chart(
            "Given up early",
            "Rows of the CPU tier that were given up because of a hint.",
            "cps",
            (("rate(kvtier_demoted_early_blocks_total{stack}[$__rate_interval])", "{{instance}}"),),
        ),
    ),
    "Engines of a service": (
        Chart(
            "Blocks loaded by an engine",
            "By the highest tier that had them: a block of another engine is a hit too.",
            "cps",
            (of_engine("loaded_blocks_total", "{{engine}} {{tier}} {{instance}}"),),
            stacked=True,
        ),
        Chart(
            "Blocks looked up and stored by an engine",
            "Looked up and not loaded is computed.",
            "cps",
            (
                of_engine("looked_up_blocks_total", "looked up {{engine}} {{instance}}"),
                of_engine("stored_blocks_total", "stored {{engine}} {{instance}}"),
            ),
        ),
        Chart(
            "Rows held by an engine",
            "Lent or leased to it, or in its copies. One that holds many and stores nothing may be stuck.",
            "short",
            (("kvtier_engine_held_rows{stack}", "{{engine}} {{instance}}"),),
        ),
        Chart(
            "Rows asked back",
            "From engines, for others: the CPU tier is small for all of them.",
            "cps",
            (of_engine("revoked_rows_total", "{{engine}} {{instance}}"),),
        ),
    ),
    "Speed": (
        Chart("Loads", "Payload bytes loaded from the tier.", "Bps", (rate("kvtier_load_bytes_total"),)),
        Chart("Stores", "Payload bytes stored in the tier.", "Bps", (rate("kvtier_store_bytes_total"),)),
        Chart(
            "Busy",
            "Share of the time in which at least one load, or store, was in flight.",
            "percentunit",
            (rate("kvtier_load_seconds_total", f"load {_TIER}"), rate("kvtier_store_seconds_total", f"store {_TIER}")),
        ),
        Chart(
            "Time of a transfer job",
            "From its beginning in the tier to its end; a job has up to 128 blocks.",
            "s",
            (quantile("kvtier_transfer_seconds", 0.5), quantile("kvtier_transfer_seconds", 0.99)),
        ),
        Chart(
            "Wait of a transfer job",
            "In the queue, before it began.",
            "s",
            (quantile("kvtier_transfer_wait_seconds", 0.5), quantile("kvtier_transfer_wait_seconds", 0.99)),
        ),
        Chart(
            "Oldest transfer job in flight",
            "How long it has been so. A line that rises by a second in a second: the disk or server hangs.",
            "s",
            (now("kvtier_oldest_transfer_seconds", _WAY),),
        ),
        Chart(
            "In flight and queued",
            "Bytes of transfer jobs, and of the largest one that waits.",
            "bytes",
            (
                now("kvtier_in_flight_bytes", f"in flight {_WAY}"),
                now("kvtier_queued_bytes", f"queued {_WAY}"),
                now("kvtier_largest_queued_bytes", f"largest queued {_WAY}"),
            ),
        ),
    ),
    "Losses": (
        Chart(
            "Errors",
            "Blocks that the tier could not load or store. Each is a miss, never wrong bytes.",
            "cps",
            (rate("kvtier_block_errors_total", f"{{{{reason}}}} {_TIER}"),),
        ),
        Chart(
            "Dropped",
            "Blocks that were not stored, by reason.",
            "cps",
            (rate("kvtier_dropped_blocks_total", f"{{{{reason}}}} {_TIER}"),),
        ),
        Chart(
            "Missed deadlines",
            "Transfer jobs that were queued, or in flight, when their deadline passed.",
            "cps",
            (rate("kvtier_missed_deadlines_total", f"{{{{reason}}}} {_WAY}"),),
        ),
        Chart(
            "Backlog",
            "Blocks queued or in flight to lower tiers. One that only grows: the tier is too slow for the writes.",
            "short",
            (("kvtier_backlog_blocks{stack}", "{{instance}}"),),
        ),
        Chart(
            "Exceptions in an hour",
            "Defects, each with a line in the log. After one of the stack itself all requests miss until a restart.",
            "short",
            (("increase(kvtier_exceptions_total{stack}[1h])", "{{instance}}"),),
        ),
        Chart(
            "Restarts in an hour",
            "Stack processes that had ended and were started again; the log says why. More than three wait an hour.",
            "short",
            (("increase(kvtier_restarts_total{stack}[1h])", "{{instance}}"),),
        ),
        Chart(
            "Lost events",
            "Keys whose events were discarded because a router did not read them.",
            "cps",
            (("rate(kvtier_lost_events_total{stack}[$__rate_interval])", "{{instance}}"),),
        ),
        Chart(
            "What tiers count themselves",
            "Such as repeated and hedged requests of servers.",
            "cps",
            (rate("kvtier_tier_events_total", f"{{{{reason}}}} {_TIER}"),),
        ),
    ),
    "State": (
        Chart(
            "Up and joined",
            "0: a breaker refuses the tier, or it is held back. The engine computes meanwhile.",
            "bool",
            (now("kvtier_tier_up", f"up {_TIER}"), now("kvtier_tier_joined", f"joined {_TIER}")),
        ),
        Chart(
            "Breakers that are not closed",
            "open: refused for a while; half_open: tried again; held_back: by the program.",
            "bool",
            (('kvtier_breaker_state{tier, state!="closed"}', f"{{{{state}}}} {_WAY}"),),
        ),
        Chart(
            "Breakers, changes in an hour",
            "A breaker that opens often: the device fails now and then.",
            "short",
            (("increase(kvtier_breaker_transitions_total{tier}[1h])", f"{{{{state}}}} {_WAY}"),),
        ),
        Chart(
            "Found again at the start",
            "Blocks that a restart found, and the seconds it took.",
            "short",
            (now("kvtier_recovered_blocks", f"blocks {_TIER}"), now("kvtier_recovery_seconds", f"seconds {_TIER}")),
        ),
        Chart(
            "Settings",
            "One line for each tier, its settings in the legend.",
            "short",
            (
                (
                    "kvtier_config_info{tier}",
                    "{{instance}} {{tier}}: {{type}}, {{layout}} {{io_engine}} ({{mode}}), {{policy}},"
                    " {{write_policy}}, admit {{admit}}",
                ),
            ),
        ),
        Chart("Version", "Of kvtier.", "short", (("kvtier_build_info{stack}", "{{instance}} {{version}}"),)),
    ),
}


def _source() -> models.DataSourceRef:
    return models.DataSourceRef(type_val="prometheus", uid="${datasource}")


def _panel(chart: Chart, number: int, left: int, top: int) -> timeseries.Panel:
    panel = (
        timeseries.Panel()
        .id(number)
        .title(chart.title)
        .description(f"{chart.about} {', '.join(chart.metrics)}")
        .datasource(_source())
        .unit(chart.unit)
        .min(0)
        .fill_opacity(20 if chart.stacked else 0)
        .grid_pos(models.GridPos(h=_HEIGHT, w=_WIDTH, x=left, y=top))
        .legend(
            common.VizLegendOptions()
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
    )
    if chart.stacked:
        panel = panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    for letter, expression, (_, legend) in zip("ABCDEF", chart.expressions, chart.lines, strict=False):
        panel = panel.with_target(prometheus.Dataquery().ref_id(letter).expr(expression).legend_format(legend))
    return panel


def _variable(name: str, label: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(_source())
        .query(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .include_all(True)
        .multi(True)
        .all_value(".*")
    )


def made() -> str:
    """The dashboard as the JSON that Grafana 10.4 and later import."""
    whole = (
        dashboard.Dashboard("kvtier")
        .uid("kvtier")
        .description("Every metric of kvtier, by tier.")
        .tags(["kvtier", "vllm"])
        .refresh("10s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("vLLM").type(models.DashboardLinkType.DASHBOARDS).tags(["vllm"]).as_dropdown(True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_variable("job", "Job", "label_values(kvtier_capacity_bytes, job)"))
        .with_variable(_variable("instance", "Instance", 'label_values(kvtier_capacity_bytes{job=~"$job"}, instance)'))
        .with_variable(_variable("tier", "Tier", f"label_values(kvtier_capacity_bytes{{{STACK_SCOPE}}}, tier)"))
    )
    number, top = 1, 0
    for title, charts in ROWS.items():
        whole = whole.with_panel(
            dashboard.Row(title).id(number).grid_pos(models.GridPos(h=1, w=_COLUMNS * _WIDTH, x=0, y=top))
        )
        number, top = number + 1, top + 1
        for at, chart in enumerate(charts):
            left = at % _COLUMNS * _WIDTH
            whole = whole.with_panel(_panel(chart, number, left, top + at // _COLUMNS * _HEIGHT))
            number += 1
        top += -(-len(charts) // _COLUMNS) * _HEIGHT
    found = json.loads(JSONEncoder(sort_keys=True).encode(whole.build()))
    found.pop("style")
    for variable in found["templating"]["list"]:
        for name in _OF_OTHERS:
            variable.pop(name)
    return json.dumps(found, indent=2) + "\n"


if __name__ == "__main__":
    MADE.write_text(made())
