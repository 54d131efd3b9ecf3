"""What the tools for stores on disk share: finding the store, notes, JSON, columns."""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import click

from kvtier.options import count_text, size_text
from kvtier.tier_api.inspection import Access, Inspection, StoreAbout, find_store
from kvtier.tier_api.registry import discover

JSON_VERSION = 1
_UNKNOWN = "-"

root_argument = click.argument("root", type=click.Path(readable=False), metavar="ROOT")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")


@contextmanager
def store_at(root: str, access: Access) -> Iterator[Inspection]:
    """The store in a folder, closed at the end. Prints a note on stderr if a process owns it."""
    with closing(find_store(os.path.abspath(root), access, discover())) as store:
        if store.about.owner:
            owner = store.about.owner
            click.echo(f"note: in use by {owner}; what is stored or evicted meanwhile may be missed", err=True)
        yield store


def parts_text(about: StoreAbout) -> str:
    """How many parts a store has, and how large they are if all are of one size: `12 regions of 664 KiB`."""
    if about.region_bytes:
        return f"{count_text(about.regions)} regions of {size_text(about.region_bytes)}"
    return f"{count_text(about.regions)} buckets"


def about_json(command: str, about: StoreAbout) -> dict[str, Any]:
    """What every tool's JSON begins with."""
    facts = {name: getattr(about, name) for name in ("root", "layout", "identity", "session", "clean", "notes")}
    return {"command": command, "version": JSON_VERSION, **facts, "owner": about.owner or None}


def print_json(command: str, about: StoreAbout, found: dict[str, Any]) -> None:
    """Print what a tool found, for scripts."""
    click.echo(json.dumps(about_json(command, about) | found, indent=2))


def print_columns(rows: Sequence[Mapping[str, str]], left: int) -> None:
    """Rows of cells by heading. A column is as wide as its widest cell, also on a narrow terminal. The first `left`
    columns are flush left."""
    lines = [tuple(rows[0]), *(tuple(row.values()) for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for line in lines:
        cells = [
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        click.echo("  ".join(cells).rstrip())


def time_text(seconds: float | None) -> str:
    """A time that was read from a disk, as local date and time; a dash if it is no time."""
    try:
        return _UNKNOWN if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return _UNKNOWN


def printable(text: str | None) -> str:
    """A text of unknown origin, safe to print."""
    return "".join(sign if sign.isprintable() else "?" for sign in text) if text else _UNKNOWN
