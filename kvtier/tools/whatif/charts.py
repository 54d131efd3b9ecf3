"""Charts of a page: series in rows over one axis, drawn by plotly in one look.

Colours are those of Okabe and Ito, which people with any colour vision tell apart. What is not a series (text, lines,
grid) gets its colour from the page's style sheet, so that it follows the browser's light or dark scheme.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

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
    """One series; `x` and `y` have an entry for each point.

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
    """Series over one vertical axis, whose title says the unit. `height` is that of a usual row times so much."""

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
