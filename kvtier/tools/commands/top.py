"""`kvtier top`: a running stack, live: one table, two lines a tier, the lines below it, and the keys."""

import asyncio
import json
import os
import signal
import sys
import termios
import tty
from collections.abc import Callable
from math import inf

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from kvtier.cli.terminal import bar, table
from kvtier.errors import KVTierError, UsageError
from kvtier.options import size_text
from kvtier.tools.commands.run_report import run_to_end
from kvtier.tools.top import Figures, StackReading, is_restart, read, snapshot

VERSION = 1
KEYS = "q quit  s sort  f freeze  r reset"
SORTS = {"stack": "", "hits": "hit_share", "load": "load_bytes_per_second", "store": "store_bytes_per_second"}
SORTS |= {"used": "used_bytes", "dropped": "drops_per_second", "errors": "errors"}
"""Figures by which the tiers may be sorted; `stack` is their own order, from the CPU down."""
_FIRST = ("tier", "", "hits", "load", "in flight", "evicted/s", "errors")
_SECOND = ("state", "used", "p50/p99", "store", "queued", "dropped/s", "coldest")
_OF_ENGINES = ("engine", "hits", "loads/s", "stores/s", "rows held", "revoked")
_UNITS = "load, store: MiB/s   p50/p99: ms of a load   hits: of all blocks looked up"
_AGE_UNITS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))


def _shown(text: Callable[[float], str]) -> Callable[[float | None], str]:
    return lambda value: "-" if value is None else text(value)


_percent = _shown("{:.0%}".format)
_number = _shown(lambda value: f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}")
_mib = _shown(lambda value: _number(value / (1 << 20)))
_size = _shown(lambda value: size_text(int(value)).replace(" ", "").replace("iB", ""))
_milliseconds = _shown(lambda value: ">max" if value == inf else f"{value * 1000:g}")


@_shown
def _age(value: float) -> str:
    name, seconds = next((unit for unit in _AGE_UNITS if value >= unit[1]), ("s", 1))
    return f"{_number(round(value / seconds, 1))}{name}"


def _cells(row: Figures) -> list[str]:
    used = (row["used_bytes"] or 0) / row["capacity_bytes"] if row["capacity_bytes"] else 0.0
    return [
        f"{row['tier']}\n{row['state']}",
        f"{bar(used)}\n{_size(row['used_bytes'])}/{_size(row['capacity_bytes'])}",
        f"{_percent(row['hit_share'])}\n{_milliseconds(row['load_p50_seconds'])}/{_milliseconds(row['load_p99_seconds'])}",
        f"{_mib(row['load_bytes_per_second'])}\n{_mib(row['store_bytes_per_second'])}",
        f"{_size(row['in_flight_bytes'])}\n{_size(row['queued_bytes'])}",
        f"{_number(row['evictions_per_second'])}\n{_number(row['drops_per_second'])} {row['top_drop_reason'] or ''}",
        f"{_number(row['errors'])}\n{_age(row['coldest_seconds'])}",
    ]


def _engine_cells(row: Figures) -> list[str]:
    rates = _number(row["loads_per_second"]), _number(row["stores_per_second"])
    return [row["engine"], _percent(row["hit_share"]), *rates, _number(row["held_rows"]), _number(row["revoked_rows"])]


def screen(found: Figures, sort: str = "stack") -> RenderableType:
    """The table of all tiers, that of engines if there are some, and the lines below, in 80 columns."""
    rows = sorted(found["tiers"], key=lambda row: -(row.get(SORTS[sort]) or 0))
    tiers = table([*map("\n".join, zip(_FIRST, _SECOND, strict=True))], map(_cells, rows), words=(0, 1))
    tiers.show_lines = True
    today = f"{_size(found['written_today_bytes'])} today, " if found["written_today_bytes"] is not None else ""
    backlog, largest = _number(found["backlog_blocks"]), _size(found["largest_queued_bytes"])
    below = f"backlog {backlog} blocks   largest waiting job {largest}\nwritten below the CPU tier {today}"
    below += f"{_size(found['written_bytes'])} since the start"
    engines = [table(_OF_ENGINES, map(_engine_cells, found["engines"]), words=(0,))] if found["engines"] else []
    return Group(tiers, *engines, Text(below, no_wrap=True), Text(_UNITS, style="dim", no_wrap=True))


class View:
    """The state of a live screen. It takes readings and keys, and has no terminal and no clock."""

    def __init__(self, address: str, first: StackReading) -> None:
        self.sort = "stack"
        self._address = address
        self._lost = ""
        self._now = first
        self._before: StackReading | None = None
        self._base: StackReading | None = None
        self._frozen: Figures | None = None

    def on_reading(self, reading: StackReading) -> None:
        """After a restart of the source counts are since its start. No rate spans a gap."""
        restart = is_restart(self._now, reading)
        self._before = None if restart or self._lost else self._now
        self._base = None if restart else self._base
        self._lost, self._now = "", reading

    def on_loss(self, reason: str) -> None:
        """The source cannot be read. The last reading stays on the screen."""
        self._lost = reason

    def on_key(self, key: str) -> None:
        """A key of the screen; others than those of `KEYS` do nothing."""
        if key == "s":
            self.sort = (*SORTS, "stack")[[*SORTS].index(self.sort) + 1]
        elif key in ("f", " "):
            self._frozen = None if self._frozen else snapshot(self._now, self._before, self._base)
        elif key == "r":
            self._base = self._now

    def render(self) -> RenderableType:
        """The whole screen."""
        state = f"by {self.sort}{', FROZEN' if self._frozen else ''}{', since reset' if self._base else ''}"
        head = Text(f"kvtier top  {self._address}", style="bold", no_wrap=True, overflow="ellipsis")
        lost = [Text(f"LOST, trying again: {self._lost}", style="bold red")] if self._lost else []
        keys = Text(f"{KEYS}  |  {state}", style="dim", no_wrap=True)
        figures = self._frozen or snapshot(self._now, self._before, self._base)
        return Group(head, *lost, screen(figures, self.sort), keys)


async def watch(address: str, interval_seconds: float) -> None:
    """Show a source until the key `q`. A source that is lost is tried until it is back.

    Raises UsageError without a terminal, and as `read` where the first reading fails.
    """
    view = View(address, await read(address))
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("there is no terminal to draw on: use --once")
    loop, keyboard = asyncio.get_running_loop(), sys.stdin.fileno()
    keys: asyncio.Queue[str] = asyncio.Queue()

    async def read_on() -> None:
        while True:
            await asyncio.sleep(interval_seconds)
            try:
                view.on_reading(await read(address))
            except KVTierError as error:
                view.on_loss(str(error))
            keys.put_nowait("")

    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)  # each key comes at once, and is not shown
    loop.add_reader(keyboard, lambda: keys.put_nowait(os.read(keyboard, 1).decode(errors="ignore")))
    loop.add_signal_handler(signal.SIGWINCH, keys.put_nowait, "")
    try:
        with Live(screen=True, auto_refresh=False) as live:
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(read_on())
                key = ""
                while key != "q":
                    view.on_key(key)
                    live.update(view.render(), refresh=True)
                    key = await keys.get()
                reading.cancel()
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


@click.command(short_help="Show a running stack, live.")
@click.argument("address", metavar="SOCKET|URL")
@click.option(
    "--interval",
    type=click.FloatRange(min=0),
    default=1.0,
    metavar="SECONDS",
    help="Time between two readings. With --once, 0 reads once, without rates.",
)
@click.option("--once", is_flag=True, help="Print the figures and exit.")
@click.option("--json", "as_json", is_flag=True, help="With --once: print JSON.")
def top(address: str, interval: float, once: bool, as_json: bool) -> None:
    """Show the tiers of a running stack: how full they are, what they load and store, what is dropped and fails.

    SOCKET is the `stats_socket` of a stack file, URL a page of metrics: vLLM's, or that of kvtier's exporter.
    """
    if as_json and not once:
        raise UsageError("--json goes with --once")
    if not once and interval == 0:
        raise UsageError("--interval 0 goes with --once")
    run_to_end(_print(address, interval, as_json) if once else watch(address, interval))


async def _print(address: str, interval: float, as_json: bool) -> None:
    """Read twice, for the rates, and print."""
    before, now = None, await read(address)
    if interval:
        await asyncio.sleep(interval)
        before, now = now, await read(address)
    found = snapshot(now, None if before is None or is_restart(before, now) else before)
    if not as_json:
        Console().print(screen(found))
        return
    for row in found["tiers"]:  # JSON has no infinity
        row |= {figure: None for figure, value in row.items() if value == inf}
    click.echo(json.dumps({"command": "top", "version": VERSION, "source": address, **found}, indent=2))
