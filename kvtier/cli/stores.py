"""What the tools for stores on disk share: finding the store, errors of one line, notes, a bar, columns."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvtier.cli.failing import fail
from kvtier.cli.text import count_text, size_text
from kvtier.errors import KVTierError
from kvtier.inspection import Access, Inspection, StoreAbout, find_store
from kvtier.registry import discover

JSON_VERSION = 1
_UNKNOWN = "-"

root_argument = click.argument("root", type=click.Path(readable=False), metavar="ROOT")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")


@contextmanager
def store_at(root: str, access: Access) -> Iterator[Inspection]:
    """The store in a folder, closed at the end. What goes wrong meanwhile is one line each and exit status 2."""
    try:
        store = find_store(os.path.abspath(root), access, discover())
        try:
            yield store
        finally:
            store.close()
    except KVTierError as error:
        fail(str(error))


def note_owner(about: StoreAbout) -> None:
    """Say on stderr that somebody is using the store that is looked at."""
    if about.owner:
        click.echo(f"note: in use by {about.owner}; what is stored or evicted meanwhile may be missed", err=True)


def parts_text(about: StoreAbout) -> str:
    """How many parts a store has, and how large they are if all are of one size: `12 regions of 664 KiB`."""
    if about.region_bytes:
        return f"{count_text(about.regions)} regions of {size_text(about.region_bytes)}"
    return f"{count_text(about.regions)} buckets"


@contextmanager
def progress(title: str, slots: int) -> Iterator[Callable[[int], None]]:
    """A bar over slots on stderr, if that is a terminal; what is yielded moves it on."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(title, total=slots)
        yield lambda done: bar.advance(task, done)


def about_json(command: str, about: StoreAbout) -> dict[str, Any]:
    """What every tool's JSON begins with."""
    return {
        "command": command,
        "version": JSON_VERSION,
        "root": about.root,
        "layout": about.layout,
        "identity": about.identity,
        "session": about.session,
        "clean": about.clean,
        "owner": about.owner or None,
        "notes": list(about.notes),
    }


def print_json(document: dict[str, Any]) -> None:
    click.echo(json.dumps(document, indent=2))


def print_columns(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> None:
    """Columns as wide as their widest cell, the first `left` of them flush left, whatever the width of the terminal."""
    widths = [max(map(len, cells)) for cells in zip(headings, *rows, strict=True)]
    for row in (headings, *rows):
        cells = [
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        click.echo("  ".join(cells).rstrip())


def time_text(seconds: float | None) -> str:
    """A time of a disk as people read it, whatever its clock said."""
    try:
        return _UNKNOWN if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return _UNKNOWN


def printable(text: str | None) -> str:
    """A text of unknown origin, safe to print."""
    return "".join(sign if sign.isprintable() else "?" for sign in text) if text else _UNKNOWN
