"""`kvtier ping | status | engines | reset | forget SOCKET`: what the operator of a `kvtier serve` needs."""

import json
import time
from collections.abc import Callable
from typing import Any

import click
from rich.console import Console

from kvtier.cli.terminal import table
from kvtier.client.inquiry import inquire
from kvtier.options import size_text
from kvtier.service.channel import is_listening

VERSION = 1
SECONDS = 10.0
WAIT_SECONDS = 0.05


def _wait(path: str, seconds: float) -> float:
    """Wait until a process listens. The seconds that are left, at least a tenth of one."""
    until = time.monotonic() + seconds
    while not is_listening(path) and time.monotonic() < until:
        time.sleep(WAIT_SECONDS)
    return max(0.1, until - time.monotonic())


def _options(command: Callable[..., None]) -> Callable[..., None]:
    """The socket and the options that all have."""
    command = click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")(command)
    seconds = click.FloatRange(0.0, 3600.0, min_open=True)
    command = click.option("--timeout", type=seconds, default=SECONDS, show_default=True, help="Seconds.")(command)
    return click.argument("path", metavar="SOCKET")(command)


def _shown(what: str, path: str, timeout: float, as_json: bool, about: str = "") -> dict[str, Any] | None:
    """The answer, unless it was printed as JSON."""
    found = inquire(path, what, timeout, about)
    if not as_json:
        return found
    click.echo(_as_json(what, found))
    return None


def _as_json(what: str, found: dict[str, Any]) -> str:
    return json.dumps({"command": what, "version": VERSION} | found, indent=2)


@click.command(short_help="Look whether a stack process answers.")
@click.option("--wait", is_flag=True, help="Try again until it answers, or --timeout is over.")
@_options
def ping(path: str, timeout: float, wait: bool, as_json: bool) -> None:
    """Exit with 0 if the event loop of a `kvtier serve` answers, with 2 if not: for a probe."""
    if wait:
        timeout = _wait(path, timeout)
    found = _shown("ping", path, timeout, as_json)
    if found is not None:
        fault = f"no engine may join: {found['fault']}" if found["fault"] else "no engine yet"
        ready = "ready" if found["ready"] else fault
        click.echo(f"kvtier {found['release']}, protocol {found['protocol']}: {ready}, engines {found['engines']}")


@click.command(short_help="Rows and tiers of a stack process.")
@_options
def status(path: str, timeout: float, as_json: bool) -> None:
    """Show the rows of a `kvtier serve` by state, and its tiers."""
    found = _shown("status", path, timeout, as_json)
    if found is None:
        return
    rows = ", ".join(f"{count} {state}" for state, count in found["rows"].items())
    click.echo(f"engines {found['engines']}; rows of {size_text(found['row_bytes'])}: {rows or 'none yet'}")
    if found["waiting_rows"] or found["lost_rows"]:
        click.echo(f"of the process before: {found['waiting_rows']} rows wait, {found['lost_rows']} are out of use")
    if found["fault"]:
        click.echo(f"no engine may join: {found['fault']}")
    cells = [
        (name, size_text(tier["used_bytes"]), size_text(tier["capacity_bytes"]), *map(str, list(tier.values())[2:5]))
        for name, tier in found["tiers"].items()
    ]
    Console().print(table(("tier", "used", "of", "stored", "loaded", "evicted"), cells))


@click.command(short_help="Engines of a stack process.")
@_options
def engines(path: str, timeout: float, as_json: bool) -> None:
    """List the engines of a `kvtier serve`, with the rows that each holds."""
    found = _shown("engines", path, timeout, as_json)
    if found is not None:
        columns = ("number", "name", "namespace", "state", "lent_rows", "copy_rows", "held_rows")
        cells = [[str(engine[column]) for column in columns] for engine in found["listed"]]
        Console().print(table([column.replace("_", " ") for column in columns], cells, words=(1, 2, 3)))


@click.command(short_help="Make all blocks of a stack process unreachable.")
@_options
def reset(path: str, timeout: float, as_json: bool) -> None:
    """Make every block of the namespaces that engines of a `kvtier serve` have joined unreachable, for all its engines,
    in rows and below. Returns once that is durable, and exits with 1 if it is not."""
    found = inquire(path, "reset", timeout)
    click.echo(_as_json("reset", found) if as_json else found["fault"] or "nothing stored before is found any more")
    if found["fault"]:
        raise click.exceptions.Exit(1)


@click.command(short_help="Serve an engine again that was refused.")
@click.argument("engine", metavar="ENGINE")
@_options
def forget(path: str, engine: str, timeout: float, as_json: bool) -> None:
    """Forget the defects of a `kvtier serve` that messages of ENGINE, its name in `kvtier engines`, brought about: it
    may connect again at once, not only after an hour."""
    found = _shown("forget", path, timeout, as_json, engine)
    if found is not None:
        click.echo(f"forgotten: {found['forgotten']}" if found["forgotten"] else f"nothing is held against {engine}")
