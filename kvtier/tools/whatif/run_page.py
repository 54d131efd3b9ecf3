"""The page of a run: its tiers over time, and the path of a request.

Everything is drawn from the run's JSON (`Timeline.to_json`), which the page holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from typing import Any

from rich.console import Console

from kvtier.options import size_text
from kvtier.tools.replay.report import COLUMNS, ReplayReport
from kvtier.tools.replay.timeline import COMPUTED, PHASES, Timeline
from kvtier.tools.whatif.page import COLOURS, GREY, Chart, ChartRow, Part, RequestView, Series, Table, colours_of, page

MIB = 1 << 20
NEAR_FULL = 0.25
"""The bound of a tier is drawn where this share of it was used."""
PHASE_NAMES = {"gpu_blocks": "wait for GPU blocks", "write_back": "wait for write-back", "queued": "wait for its turn"}
PHASE_COLOURS = {
    "queued": "#882255",
    "prepare": "#BBBBBB",
    "lookup": "#88CCEE",
    "gpu_blocks": "#AA4499",
    "load": "#CC6677",
    "verify": "#DDCC77",
    "compute": GREY,
    "store": "#44AA99",
    "write_back": "#117733",
}
"""Of Paul Tol's muted scheme, so that no phase looks like a tier."""
TROUBLE_COLOURS = ("#D55E00", "#CC79A7", "#F0E442", "#56B4E9")
_UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
_HOW_TO_READ = (
    "All rows share one axis of time: drag over a part of any row to look closer, double-click to see all again. "
    "Point at anything for its figures, click a name on the right to hide it, and a request's mark for its path."
)


@dataclass(frozen=True, eq=False)
class WatchedReplay:
    """A replay with its run over time, in JSON and as a page."""

    report: ReplayReport
    timeline: Timeline

    @property
    def ok(self) -> bool:
        """True when every byte was right."""
        return self.report.ok

    def show(self, console: Console) -> None:
        """Print what a replay without a timeline prints."""
        self.report.show(console)

    @cached_property
    def _figures(self) -> dict[str, Any]:
        return self.report.to_json() | {"run": self.timeline.to_json()}

    def to_json(self) -> dict[str, Any]:
        """The report for programs, and the run in `run`."""
        return self._figures

    def to_html(self) -> str:
        """The page."""
        report = self.report
        verdict = "Every byte was right." if report.ok else "WRONG BYTES."
        rows = [[", ".join(filter(None, cell.split("\n"))) for cell in row] for row in report.rows()]
        parts: list[Part] = [f"{report.settings['source']}: {report.summary()} {verdict}", Table(COLUMNS, rows)]
        return page("kvtier replay", [*parts, *run_parts(self._figures["run"], ("run",))], self._figures)


def run_parts(run: Mapping[str, Any], path: Sequence[str | int]) -> list[Part]:
    """The parts of a page for one run, whose JSON is at `path` in the page's figures."""
    drawing = _Drawing(run)
    kept = f"every {run['requests_every']} of them" if run["requests_every"] > 1 else "all of them"
    if run["requests_every"] > 1:
        kept += f" and the {run['requests_slowest']} slowest"
    quiet = "" if drawing.has_events else " No breaker opened, nothing stood still, and no load or store failed."
    return [
        _HOW_TO_READ + quiet,
        Chart(f"{drawing.unit} of {run['clock']} time since the start", drawing.rows(kept), x_max=drawing.ends[-1]),
        RequestView(path, drawing.colours | PHASE_COLOURS, PHASE_NAMES),
    ]


class _Drawing:
    """Rows of the chart of one run."""

    def __init__(self, run: Mapping[str, Any]) -> None:
        self.run = run
        self.colours = colours_of(dict.fromkeys([*run["tiers"], *run["tokens"]])) | {COMPUTED: GREY}
        times: list[float] = run["times"]
        self.seconds, self.unit = next(unit for unit in _UNITS if times[-1] >= 5 * unit[0] or unit[0] == 1.0)
        self.ends = [time / self.seconds for time in times]
        self.lengths = [end - begin for begin, end in zip([0.0, *times], times, strict=False)]
        self.widths = [length / self.seconds for length in self.lengths]
        self.middles = [end - width / 2 for end, width in zip(self.ends, self.widths, strict=True)]
        self.has_events = bool(run["spans"]) or any(tier["faults"] for tier in run["tiers"].values())

    def rows(self, kept: str) -> list[ChartRow]:
        """All rows that there are; `kept` names the requests in them."""
        found = [
            *self._held(),
            self._tokens(),
            self._bandwidth(),
            self._lost(),
            self._backlog(),
            self._phases(),
            self._events(),
            self._requests(kept),
        ]
        return [row for row in found if row is not None and row.series]

    def _per_interval(self) -> str:
        return f"in each {self.run['interval_seconds']:.4g} s"

    def _bars(self, name: str, values: Sequence[float], colour: str, unit: str) -> Series:
        hover = f"{name}: %{{y:,}} {unit}<br>until %{{x:.4~g}} {self.unit}<extra></extra>"
        return Series(name, self.middles, values, "bar", colour, self.widths, hover)

    def _held(self) -> Iterable[ChartRow]:
        """A row for each tier whose used bytes are known."""
        for name, tier in self.run["tiers"].items():
            used, bound = tier["used_bytes"], tier["capacity_bytes"]
            if not any(used):
                continue
            size, unit = _bytes_unit(max(*used, bound if max(used) >= NEAR_FULL * bound else 0))
            hover = f"{name}: %{{y:,.4~g}} {unit}<br>%{{x:.4~g}} {self.unit}<extra></extra>"
            values = [value / size for value in used]
            row = [Series(name, self.ends, values, "area", self.colours[name], hover=hover)]
            most = None
            if bound and max(used) >= NEAR_FULL * bound:
                ends, line = [0.0, self.ends[-1]], [bound / size] * 2
                hover = f"bound {size_text(bound)}<extra></extra>"
                row.append(Series(f"{name} bound", ends, line, colour=GREY, dashed=True, hover=hover))
                most = 1.08 * bound / size
            of = f" of {size_text(bound)}" if bound else ""
            title = f"{name}: holds at most {size_text(max(used))}{of}"
            yield ChartRow(title, unit, row, legend=False, y_max=most, height=0.7)

    def _tokens(self) -> ChartRow:
        tokens = self.run["tokens"]
        series = [self._bars(name, values, self.colours[name], "tokens") for name, values in tokens.items()]
        return ChartRow(f"Prompt tokens by where they came from, {self._per_interval()}", "tokens", series)

    def _bandwidth(self) -> ChartRow:
        series = []
        for name, tier in self.run["tiers"].items():
            for what, sign in (("load", 1), ("store", -1)):
                moved = tier[f"{what}_bytes"]
                if not any(moved):
                    continue
                times = zip(moved, self.lengths, strict=True)
                rates = [sign * size / MIB / length if length else 0.0 for size, length in times]
                hover = f"{name} {what}s: %{{customdata:,}} bytes<br>%{{y:,.4~g}} MiB/s<extra></extra>"
                look: dict[str, Any] = {"hover": hover, "points": moved, "dashed": what == "store"}
                series.append(Series(f"{name} {what}s", self.ends, rates, "line", self.colours[name], **look))
        return ChartRow("Bytes moved: loads up, stores down", "MiB/s", series, height=1.2)

    def _lost(self) -> ChartRow:
        tiers, series = self.run["tiers"], []
        others = cycle(COLOURS[len(tiers) :] or COLOURS)
        for name, tier in tiers.items():
            for what, values in tier["lost"].items():
                colour = self.colours[name] if what == "evicted" else next(others)
                series.append(self._bars(f"{name} {what}", values, colour, "blocks"))
        return ChartRow(f"Blocks evicted, dropped and not sent, and why, {self._per_interval()}", "blocks", series)

    def _backlog(self) -> ChartRow | None:
        backlog = self.run["backlog"]
        if not any(backlog):
            return None
        hover = f"%{{y:,}} blocks on their way<br>%{{x:.4~g}} {self.unit}<extra></extra>"
        series = [Series("on their way", self.ends, backlog, "area", COLOURS[4], hover=hover)]
        return ChartRow("Blocks on their way to lower tiers", "blocks", series, legend=False, height=0.7)

    def _phases(self) -> ChartRow:
        """Seconds of the requests that ended in an interval, a mean of them for each."""
        ended, phases = self.run["requests_ended"], self.run["phases"]
        means = {
            name: [time / count if count else 0.0 for time, count in zip(phases[name], ended, strict=True)]
            for name in PHASES
            if name in phases
        }
        scale, unit = _time_unit(max((max(values) for values in means.values()), default=0.0))
        series = [
            self._bars(PHASE_NAMES.get(name, name), [scale * value for value in values], PHASE_COLOURS[name], unit)
            for name, values in means.items()
        ]
        return ChartRow("Where the time of a request went, a mean of those that ended", unit, series, height=1.5)

    def _events(self) -> ChartRow | None:
        """Spans in which a tier was not well, and intervals in which blocks failed."""
        if not self.has_events:
            return None
        series, colours = [], cycle(TROUBLE_COLOURS)
        spans: dict[tuple[str, str], list[float | None]] = {}
        for span in self.run["spans"]:
            ends = (span["begin"] / self.seconds, span["end"] / self.seconds, None)
            spans.setdefault((span["tier"], span["what"]), []).extend(ends)
        for (tier, what), x in spans.items():
            name = f"{tier}: {what}"
            hover = f"{name}<br>%{{x:.4~g}} {self.unit}<extra></extra>"
            series.append(Series(name, x, [name] * len(x), "span", next(colours), hover=hover))
        for tier, figures in self.run["tiers"].items():
            for what, values in figures["faults"].items():
                name = f"{tier}: blocks {what}"
                hover = f"{name}: %{{customdata:,}}<br>%{{x:.4~g}} {self.unit}<extra></extra>"
                there = [index for index, value in enumerate(values) if value]
                x, counts = [self.ends[index] for index in there], [values[index] for index in there]
                series.append(Series(name, x, [name] * len(x), "mark", next(colours), hover=hover, points=counts))
        height = 0.2 + 0.2 * len(series)
        return ChartRow("Breakers, stalls and faults", "", series, legend=False, words=True, height=height)

    def _requests(self, kept: str) -> ChartRow:
        """A mark for each request, by the source of most of its prompt."""
        found: dict[str, list[int]] = {name: [] for name in self.run["tokens"]}
        requests = self.run["requests"]
        for index, request in enumerate(requests):
            tokens: dict[str, int] = {}
            for source, count in request["parts"]:
                tokens[source] = tokens.get(source, 0) + count
            if tokens:
                found.setdefault(max(tokens, key=lambda name: tokens[name]), []).append(index)
        series = []
        scale, unit = _time_unit(max((request["first_token_seconds"] for request in requests), default=0.0))
        for name, indexes in found.items():
            if indexes:
                arrived = [requests[index]["arrived"] / self.seconds for index in indexes]
                times = [scale * requests[index]["first_token_seconds"] for index in indexes]
                hover = f"mostly {name}<br>first token after %{{y:,.4~g}} {unit}<br>click for its path<extra></extra>"
                series.append(
                    Series(f"mostly {name}", arrived, times, "mark", self.colours[name], hover=hover, points=indexes)
                )
        return ChartRow(f"Requests ({kept}): time to the first token", unit, series, log_y=True, height=1.3)


def _time_unit(seconds: float) -> tuple[float, str]:
    """Factor of seconds, and its unit, in which the longest is read well."""
    return (1.0, "s") if seconds >= 10 else (1e3, "ms")


def _bytes_unit(size: float) -> tuple[int, str]:
    """The unit in which a size is read best."""
    for power, name in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << power:
            return 1 << power, name
    return 1, "bytes"
