"""The result of a simulation: variants side by side, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.markup import escape

from kvtier.cli.terminal import bar, table
from kvtier.tools.replay.report import size_or_none, tier_json
from kvtier.tools.whatif.page import Part, Section, Series, Table, chart_of, page
from kvtier.tools.whatif.run_page import run_parts
from kvtier.tools.whatif.service import describe
from kvtier.tools.whatif.simulate import Simulated

_BLOCK_COUNTS = ("stored", "loaded", "dropped", "load_failed", "computed", "longest_load")


@dataclass(frozen=True, slots=True, eq=False)
class SimulationReport:
    """All variants of one stack over one trace."""

    variants: Sequence[Simulated]
    settings: dict[str, object]
    ok: bool = True

    def to_json(self) -> dict[str, Any]:
        """The report for programs."""
        variants = [variant_json(variant) for variant in self.variants]
        return {"command": "simulate", "version": 1, "settings": self.settings, "variants": variants}

    def to_html(self) -> str:
        """A page with the hits of every variant by tier, what was saved, and its run over time."""
        names = list(dict.fromkeys(name for variant in self.variants for name in _names(variant)))
        several = len(self.variants) > 1
        parts: list[Part] = [
            f"Trace {self.settings['source']}, stack {self.settings['stack']}.",
            describe([*self.variants[0].services.items()]) + ".",
            *(self._comparison(names) if several else []),
            Table(_columns(names), [self._row(variant, names) for variant in self.variants]),
            *(f"{title(variant)}: {line}" for variant in self.variants for line in shortages(variant)),
        ]
        figures = self.to_json()
        for number, variant in enumerate(figures["variants"]):
            if "run" in variant:
                run = run_parts(variant["run"], ("variants", number, "run"))
                parts += [Section(variant["title"], run, not number)] if several else run
        return page("kvtier simulate", parts, figures)

    def _comparison(self, names: Sequence[str]) -> list[Part]:
        titles = [title(variant) for variant in self.variants]
        hits = [
            Series(name, titles, [variant.counts.hit_tokens.get(name, 0) for variant in self.variants], "bar")
            for name in names
        ]
        saved = Series("saved", titles, [round(variant.first_tokens.saved, 6) for variant in self.variants], "bar")
        return [
            chart_of("Tokens hit, by tier", "", "tokens", hits),
            chart_of("Seconds to the first token saved, over all requests", "", "seconds", [saved]),
        ]

    def show(self, console: Console) -> None:
        """Print one line for each variant, the tiers of each, and where it was short."""
        first = self.variants[0]
        console.print(
            f"{first.counts.requests:,} requests, {first.counts.prompt_tokens:,} prompt tokens, "
            f"{self.settings['source']}, prefill {self.settings['prefill_tokens_per_second']:,.0f} tokens/s",
            highlight=False,
        )
        console.print(escape(describe([*first.services.items()])), soft_wrap=True, highlight=False)
        names = list(dict.fromkeys(name for variant in self.variants for name in _names(variant)))
        for number, variant in enumerate(self.variants, start=1):
            console.print(escape(f"{number}: {title(variant)}"), soft_wrap=True, highlight=False)
        columns = [*_columns(names), ""]
        rows = [
            (str(number), *self._row(variant, names)[1:], bar(variant.hit_share))
            for number, variant in enumerate(self.variants, start=1)
        ]
        heading = "% of prompt tokens hit, by tier; % of prefill time saved; bytes written below"
        console.print(table(columns, rows, words=(0, len(columns) - 1), title=heading))
        for variant in self.variants:
            for line in shortages(variant):
                console.print(escape(f"{title(variant)}: {line}"), soft_wrap=True, highlight=False)

    def _row(self, variant: Simulated, names: Sequence[str]) -> tuple[str, ...]:
        counts, whole = variant.counts, variant.counts.prompt_tokens
        times = variant.first_tokens
        return (
            title(variant),
            *(_percent(counts.hit_tokens.get(name, 0), whole) for name in names),
            _percent(variant.hit_share, 1.0),
            _percent(times.saved, sum(times.computing)),
            size_or_none(sum(tier.store_bytes for tier in list(variant.tiers.values())[1:])),
            str(len(shortages(variant))) if shortages(variant) else "-",
        )


def _columns(names: Sequence[str]) -> list[str]:
    return ["variant", *names, "all", "saved", "written", "short"]


def title(variant: Simulated) -> str:
    """The changes of a variant."""
    return " ".join(f"{name}={value}" for name, value in variant.changes.items()) or "as in the file"


def shortages(variant: Simulated) -> list[str]:
    """Shortages of the stack: a line for each tier whose jobs waited or were late, or whose blocks were dropped."""
    found = []
    for name, tier in variant.tiers.items():
        waits, parts = variant.waits[name], []
        if waits.waited:
            parts.append(
                f"{waits.waited:,} of {waits.jobs:,} jobs waited, at most {waits.longest_seconds:.3f} s, "
                f"up to {waits.peak_jobs} at once"
            )
        if waits.late:
            parts.append(f"{waits.late:,} jobs were late")
        parts += [f"{count:,} blocks dropped ({reason})" for reason, count in sorted(tier.dropped.items())]
        if parts:
            found.append(f"{name}: {'; '.join(parts)}")
    return found


def variant_json(variant: Simulated) -> dict[str, Any]:
    """A variant for programs."""
    counts, times = variant.counts, variant.first_tokens
    return {
        "changes": dict(variant.changes),
        "title": title(variant),
        "requests": counts.requests,
        "prompt_tokens": counts.prompt_tokens,
        "hit_tokens": {name: counts.hit_tokens.get(name, 0) for name in _names(variant)},
        "blocks": {name: getattr(counts, name) for name in _BLOCK_COUNTS},
        "block_references": counts.block_references,
        "block_hits": counts.block_hits,
        "time_to_first_token": {
            "mean_seconds": _mean(times.seconds),
            "mean_seconds_computing_all": _mean(times.computing),
            "saved_seconds": round(times.saved, 6),
        },
        "tiers": {name: tier_json(tier) for name, tier in variant.tiers.items()},
        "waits": {name: asdict(waits) for name, waits in variant.waits.items()},
        "services": {name: service.to_json() for name, service in variant.services.items()},
        "short": shortages(variant),
        "virtual_seconds": round(variant.virtual_seconds, 6),
        "seconds": round(variant.seconds, 3),
        **({} if variant.timeline is None else {"run": variant.timeline.to_json()}),
    }


def _names(variant: Simulated) -> Iterable[str]:
    return dict.fromkeys([variant.gpu_name, *variant.tiers, *variant.counts.hit_tokens])


def _mean(values: Sequence[float]) -> float:
    return round(fmean(values), 6) if values else 0.0


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.2f}" if whole else "-"
