"""Pages for a browser: charts by plotly, whose code is in the page, so that it needs no network.

Colours are those of Okabe and Ito, which people with any colour vision distinguish. What is not a series (text, lines,
grid) gets its colour from the page's style sheet, so that it follows the browser's light or dark scheme.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from typing import Any, Literal

from kvtier.errors import ConfigError

COLOURS = ("#009E73", "#0072B2", "#E69F00", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
"""In the order of tiers, from the GPU down."""
GREY = "#999999"
FONT = "system-ui, sans-serif"
ROW_PIXELS = 105
GAP_PIXELS = 46
TOP_PIXELS, BOTTOM_PIXELS = 56, 52

Kind = Literal["line", "area", "bar", "mark", "span"]


@dataclass(frozen=True, slots=True)
class Series:
    """A series; `x` and `y` have an entry for each point.

    Bars stack on each other, and so do areas with `stacked`. A `span` is drawn as a thick line between two points, and
    None separates it from the next. `widths` are those of bars, `hover` is plotly's template for a point, and `points`
    are numbers that a click hands on.
    """

    name: str
    x: Sequence[Any]
    y: Sequence[Any]
    kind: Kind = "line"
    colour: str | None = None
    widths: Sequence[float] | None = None
    hover: str | None = None
    points: Sequence[int] | None = None
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class ChartRow:
    """Series over one vertical axis, whose title is the unit. `height` is a multiple of a usual row's."""

    title: str
    y_title: str
    series: Sequence[Series]
    log_y: bool = False
    legend: bool = True
    words: bool = False
    y_max: float | None = None
    height: float = 1.0


@dataclass(frozen=True, slots=True)
class Chart:
    """Rows above each other over one horizontal axis: what is zoomed in one is zoomed in all."""

    x_title: str
    rows: Sequence[ChartRow]
    log_x: bool = False
    x_max: float | None = None


def chart_of(title: str, x_title: str, y_title: str, series: Sequence[Series], log_x: bool = False) -> Chart:
    """A chart of one row."""
    return Chart(x_title, [ChartRow(title, y_title, series, height=2.4)], log_x)


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name, again from the first when they run out."""
    return {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}


def draw(chart: Chart, name: str) -> str:
    """The chart as HTML with the id `name`; plotly's code has to be on the page already."""
    from plotly import graph_objects

    traces = [
        _trace(series, row, number, index)
        for number, row in enumerate(chart.rows, start=1)
        for index, series in enumerate(row.series)
    ]
    figure = graph_objects.Figure(traces, _layout(chart))
    config = {"displaylogo": False, "responsive": True, "modeBarButtons": [["toImage", "resetScale2d"]]}
    drawn: str = figure.to_html(full_html=False, include_plotlyjs=False, div_id=name, config=config)
    return drawn


def _trace(series: Series, row: ChartRow, number: int, index: int) -> dict[str, Any]:
    suffix = "" if number == 1 else str(number)
    colour = series.colour or COLOURS[index % len(COLOURS)]
    trace: dict[str, Any] = {
        "name": series.name,
        "x": list(series.x),
        "y": list(series.y),
        "yaxis": f"y{suffix}",
        "legend": f"legend{suffix}",
        "showlegend": row.legend,
        "hovertemplate": series.hover,
        "customdata": None if series.points is None else list(series.points),
    }
    if series.kind == "bar":
        widths = None if series.widths is None else list(series.widths)
        return trace | {"type": "bar", "width": widths, "marker": {"color": colour, "line": {"width": 0}}}
    if series.kind == "mark":
        marker = {"color": colour, "size": 6, "opacity": 0.8, "line": {"width": 0}}
        return trace | {"type": "scatter", "mode": "markers", "marker": marker}
    line = {"color": colour, "width": 1.6, "dash": "dash" if series.dashed else "solid"}
    if series.kind == "span":
        line["width"] = 9
    trace |= {"type": "scatter", "mode": "lines", "line": line}
    if series.kind == "area":
        trace |= {"fill": "tozeroy"}
    return trace


def _layout(chart: Chart) -> dict[str, Any]:
    heights = [row.height * ROW_PIXELS for row in chart.rows]
    inside = sum(heights) + GAP_PIXELS * (len(heights) - 1)
    last = "" if len(heights) == 1 else str(len(heights))
    layout: dict[str, Any] = {
        "template": "none",
        "height": inside + TOP_PIXELS + BOTTOM_PIXELS,
        "margin": {
            "l": 170 if any(row.words for row in chart.rows) else 84,
            "r": 168,
            "t": TOP_PIXELS,
            "b": BOTTOM_PIXELS,
        },
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 12},
        "barmode": "relative",
        "bargap": 0.3,
        "hovermode": "closest",
        "modebar": {"bgcolor": "rgba(0,0,0,0)"},
        "annotations": [],
        "xaxis": _x_axis(chart, f"y{last}"),
    }
    top = float(inside)
    for number, (row, height) in enumerate(zip(chart.rows, heights, strict=True), start=1):
        suffix = "" if number == 1 else str(number)
        layout[f"yaxis{suffix}"] = _y_axis(row, [max(0.0, (top - height) / inside), min(1.0, top / inside)])
        layout[f"legend{suffix}"] = {"x": 1.01, "y": top / inside, "yanchor": "top", "tracegroupgap": 0}
        layout["annotations"].append(_heading(row.title, top / inside))
        top -= height + GAP_PIXELS
    return layout


def _x_axis(chart: Chart, below: str) -> dict[str, Any]:
    axis: dict[str, Any] = {"title": {"text": chart.x_title}, "anchor": below, "zeroline": False}
    if chart.log_x:
        axis |= {"type": "log"}
    if chart.x_max is not None:
        axis |= {"range": [0, chart.x_max]}
    return axis


def _y_axis(row: ChartRow, domain: list[float]) -> dict[str, Any]:
    axis: dict[str, Any] = {"title": {"text": row.y_title, "standoff": 8}, "domain": domain, "anchor": "x"}
    axis |= {"zeroline": not row.log_y and not row.words, "nticks": 5, "showgrid": not row.words}
    if row.log_y:
        axis |= {"type": "log", "dtick": 1, "exponentformat": "none"}
    else:
        axis |= {"rangemode": "tozero", "exponentformat": "SI"}
    if row.words:
        axis |= {"type": "category", "rangemode": "normal", "tickmode": "linear", "dtick": 1}
    if row.y_max is not None:
        axis |= {"range": [0, row.y_max]}
    return axis


def _heading(text: str, top: float) -> dict[str, Any]:
    place = {"xref": "paper", "yref": "paper", "x": 0, "y": top, "xanchor": "left", "yanchor": "bottom", "yshift": 5}
    return place | {"text": text, "showarrow": False, "font": {"size": 13, "weight": 600}}


_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<link rel="icon" href="data:,">
<style>
{style}</style></head>
<body>
<h1>{title}</h1>
{parts}
<script type="application/json" id="figures">{figures}</script>
<script>
{script}</script>
</body>
</html>
"""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class RequestView:
    """The way of one request: the slowest one at first, then the one whose mark in the chart before is clicked.

    `path` leads to the run in the page's figures, `colours` are those of sources and phases, `names` what the page
    calls them.
    """

    path: Sequence[str | int]
    colours: dict[str, str]
    names: dict[str, str]


@dataclass(frozen=True, slots=True)
class Section:
    """Parts below a heading, which opens and closes them."""

    title: str
    parts: Sequence[Part]
    opened: bool = True


Part = str | Chart | Table | RequestView | Section


def check_plotly() -> None:
    """Raise ConfigError where plotly is not installed."""
    if find_spec("plotly") is None:
        raise ConfigError("needs a plotting library: pip install 'kvtier[plots]'", "--html")


def page(title: str, parts: Sequence[Part], figures: dict[str, Any]) -> str:
    """A whole page: paragraphs, charts and tables in their order, and the figures as JSON in `#figures`.

    Raises ConfigError where plotly is not installed.
    """
    check_plotly()
    from plotly import offline

    shown = [f"<script>{offline.get_plotlyjs()}</script>", *_drawn(parts, "plot")]
    held = json.dumps(figures).replace("<", "\\u003c")  # `<!--<script>` would hide the page's own end of the script
    style, script = (files("kvtier.tools.whatif").joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    return _PAGE.format(title=escape(title), style=style, parts="\n".join(shown), figures=held, script=script)


def _drawn(parts: Sequence[Part], name: str) -> list[str]:
    """The parts as HTML. A chart has the id of its place, and so finds the view of requests behind it."""
    return [_part(part, f"{name}-{number}", f"{name}-{number - 1}") for number, part in enumerate(parts)]


def _part(part: Part, name: str, before: str) -> str:
    match part:
        case str():
            return f"<p>{escape(part)}</p>"
        case Table():
            return _table(part)
        case Chart():
            return draw(part, name)
        case RequestView():
            view = {"chart": before, "path": part.path, "colours": part.colours, "names": part.names}
            return f'<div class="request" data-view="{escape(json.dumps(view))}"></div>'
        case Section():
            inside = "\n".join(_drawn(part.parts, name))
            opened = " open" if part.opened else ""
            return f"<details{opened}><summary>{escape(part.title)}</summary>\n{inside}\n</details>"


def _table(part: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in part.columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in part.rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
