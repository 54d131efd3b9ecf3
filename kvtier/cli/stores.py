"""Parts of all tools for stores: opening the store, notes, JSON, columns."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import click

from kvtier.cli.addresses import StoreAddress
from kvtier.options import count_text, size_text
from kvtier.tier.inspection import Access, Inspection, StoreAbout

JSON_VERSION = 1
_UNKNOWN = "-"

root_argument = click.argument("root", metavar="ROOT")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")


@contextmanager
def store_at(where: StoreAddress, access: Access) -> Iterator[Inspection]:
    """A store, closed at the end. Prints a note on stderr if a process owns it."""
    with closing(where.open(access)) as store:
        if store.about.owner:
            owner = store.about.owner
            click.echo(f"note: in use by {owner}; what is stored or evicted meanwhile may be missed", err=True)
        yield store


def parts_text(about: StoreAbout) -> str:
    """The number of parts of a store, and their size if all have one: `12 regions of 664 KiB`."""
    if about.region_bytes:
        return f"{count_text(about.regions)} {about.parts} of {size_text(about.region_bytes)}"
    return f"{count_text(about.regions)} {about.parts}"


def about_json(command: str, about: StoreAbout) -> dict[str, Any]:
    """The beginning of every tool's JSON."""
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


def in_namespace(namespace: bytes, digits: str) -> bool:
    """True for a namespace whose digest begins so. A store may keep the front of digests only: the rest of the digits
    has nothing to be compared with then."""
    known = namespace.hex()
    return known.startswith(digits[: len(known)])
