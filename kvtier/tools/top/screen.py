"""The screen of `kvtier top`: one table where it is wide enough, else two, and what is not of one tier below."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from kvtier.cli.tables import bar, table
from kvtier.options import size_text
from kvtier.tools.top.rows import TierRow, TopFigures

WIDE_COLUMNS = 130
UNKNOWN = "-"
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its title and the text of a tier in it."""

    title: str
    text: Callable[[TierRow], str]
    words: bool = False


def _share(row: TierRow) -> float:
    return (row.used_bytes or 0) / row.capacity_bytes if row.capacity_bytes else 0.0


def _size(value: float | None) -> str:
    return UNKNOWN if value is None else size_text(int(value)).replace(" ", "").replace("iB", "")


def _used(row: TierRow) -> str:
    return f"{_size(row.used_bytes)}/{_size(row.capacity_bytes)}"


def _mib(value: float | None) -> str:
    return UNKNOWN if value is None else _figure(value / _MIB)


def _figure(value: float | None) -> str:
    """A figure of at most five characters below a million."""
    if value is None:
        return UNKNOWN
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def _percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0%}"


def _milliseconds(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return ">max" if math.isinf(value) else f"{value * 1000:g}"


def _quantiles(row: TierRow) -> str:
    if row.load_p50_seconds is None:
        return UNKNOWN
    return f"{_milliseconds(row.load_p50_seconds)}/{_milliseconds(row.load_p99_seconds)}"


def _age(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    name, seconds = next((unit for unit in _UNITS_OF_AGE if value >= unit[1]), ("s", 1))
    return f"{_figure(round(value / seconds, 1))}{name}"


def _drops(row: TierRow) -> str:
    return f"{_figure(row.drops_per_second)} {row.top_drop_reason or ''}".strip()


TIER = Column("tier", lambda row: row.tier, words=True)
TRAFFIC = (
    Column("state", lambda row: row.state, words=True),
    Column("", lambda row: bar(_share(row)), words=True),
    Column("used", _used),
    Column("hits", lambda row: _percent(row.hit_share)),
    Column("load", lambda row: _mib(row.load_bytes_per_second)),
    Column("store", lambda row: _mib(row.store_bytes_per_second)),
    Column("p50/p99", _quantiles),
)
QUEUES = (
    Column("in flight", lambda row: _size(row.in_flight_bytes)),
    Column("queued", lambda row: _size(row.queued_bytes)),
    Column("evicted/s", lambda row: _figure(row.evictions_per_second)),
    Column("dropped/s", _drops),
    Column("errors", lambda row: _figure(row.errors)),
    Column("coldest", lambda row: _age(row.coldest_seconds)),
)
UNITS = "load, store: MiB/s   p50/p99: ms of a load   hits: of all blocks looked up"
_UNITS_OF_AGE = (("d", 86400), ("h", 3600), ("m", 60))

SORTS: dict[str, Callable[[TierRow], float]] = {
    "stack": lambda row: 0.0,
    "hits": lambda row: -(row.hit_share or 0),
    "load": lambda row: -(row.load_bytes_per_second or 0),
    "store": lambda row: -(row.store_bytes_per_second or 0),
    "used": lambda row: -_share(row),
    "dropped": lambda row: -(row.drops_per_second or 0),
    "errors": lambda row: -row.errors,
}
"""How the tiers may be sorted; `stack` is their own order, from the CPU down."""


def screen(found: TopFigures, width: int, sort: str = "stack") -> RenderableType:
    """The tables and the lines below them, in the width of a terminal."""
    rows = sorted(found.tiers, key=SORTS[sort])
    if width >= WIDE_COLUMNS:
        tables = [_table((TIER, *TRAFFIC, *QUEUES), rows)]
    else:
        tables = [_table((TIER, *TRAFFIC), rows), _table((TIER, *QUEUES), rows)]
    return Group(*tables, Text(_below(found), no_wrap=True), Text(UNITS, style="dim", no_wrap=True))


def _table(columns: Sequence[Column], rows: Sequence[TierRow]) -> RenderableType:
    words = [index for index, column in enumerate(columns) if column.words]
    return table([column.title for column in columns], [[each.text(row) for each in columns] for row in rows], words)


def _below(found: TopFigures) -> str:
    largest = _size(found.largest_queued_bytes)
    waiting = f"backlog {_figure(found.backlog_blocks)} blocks   largest waiting job {largest}"
    since_start = f"{_size(found.written_bytes)} since the start"
    today = f"{_size(found.written_today_bytes)} today, " if found.written_today_bytes is not None else ""
    return f"{waiting}\nwritten below the CPU tier {today}{since_start}"
