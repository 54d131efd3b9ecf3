"""`kvtier top`: a running stack, live."""

import json
import time

import click
from rich.console import Console

from kvtier.errors import UsageError
from kvtier.tools.commands.run_report import run_to_end
from kvtier.tools.top.rows import restarted, snapshot
from kvtier.tools.top.screen import screen
from kvtier.tools.top.session import watch
from kvtier.tools.top.sources import Source, source_of

VERSION = 1


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
    source = source_of(address)
    if once:
        _print(source, interval, as_json)
    else:
        run_to_end(watch(source, source.read(), interval))


def _print(source: Source, interval: float, as_json: bool) -> None:
    """Read twice, for the rates, and print."""
    before, now = None, source.read()
    if interval:
        time.sleep(interval)
        before, now = now, source.read()
        before = None if restarted(before, now) else before
    found = snapshot(now, before)
    if as_json:
        click.echo(
            json.dumps({"command": "top", "version": VERSION, "source": source.name, **found.to_json()}, indent=2)
        )
    else:
        console = Console()
        console.print(screen(found, console.width))
