"""Pages for a browser: charts by plotly, whose code is in the page, so that it needs no network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from kvtier.errors import ConfigError
from kvtier.tools.whatif.charts import Chart, draw

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
