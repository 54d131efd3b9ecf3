"""Parts of all tools for stores: the store that a command line names, its blocks added up, notes, JSON, columns."""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import click

from kvtier.cli.terminal import progress
from kvtier.config.load import load_stack, validate
from kvtier.config.strict_yaml import Value, parse_text
from kvtier.errors import ConfigError, UsageError
from kvtier.options import TierOptions, count_text, folders_of, size_text
from kvtier.tier.inspection import (
    Access,
    BlockState,
    Inspection,
    Inspectors,
    InspectsServers,
    ListStep,
    StoreAbout,
    StoredBlock,
    find_server,
    find_store,
)
from kvtier.tier.registry import discover


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """A store as a command line names it. `root` is a folder, an address such as `valkey://cache-0:6379/team-a`, or
    with `stack` the name of one of its tiers; `options` are those of the tier at an address."""

    root: str
    stack: str | None = None
    options: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """The folder that it is. Raises UsageError for anything else."""
        if self.stack is not None or "://" in self.root:
            raise UsageError("only a folder has others beside it and in it")
        return os.path.abspath(self.root)

    def open(self, access: Access) -> Inspection:
        """The store, to be closed. Raises ConfigError, RootError, UsageError."""
        inspectors = Inspectors.find()
        if self.options and (self.stack is not None or "://" not in self.root):
            raise UsageError("--option is for the address of a server; a folder and a stack file need none")
        if self.stack is not None:
            options = self._tier(self.stack)
            if folders_of(options):
                return find_store(_one_folder(options), access, inspectors)
        elif "://" in self.root:
            options = self._at_address(inspectors)
        else:
            return find_store(os.path.abspath(self.root), access, inspectors)
        inspector = inspectors.get(options.type) if options.type in inspectors.names else None
        if not isinstance(inspector, InspectsServers):
            raise UsageError(f"a tier of type {options.type} keeps nothing that a tool could read")
        return inspector.inspect_server(options, access)

    def _tier(self, stack: str) -> TierOptions:
        tiers = load_stack(stack).tiers
        found = [options for options in tiers if options.label == self.root]
        if not found:
            names = ", ".join(options.label for options in tiers)
            raise UsageError(f"{stack} has no tier {self.root!r} (tiers: {names})")
        return found[0]

    def _at_address(self, inspectors: Inspectors) -> TierOptions:
        kind, options = find_server(self.root, inspectors)
        return validate(discover().get(kind).Options, {**options, **self._read_given()})

    def _read_given(self) -> dict[str, Value]:
        """The options on the command line, whose values are spelled as in a stack file."""
        found = {}
        for option in self.options:
            name, equals, value = option.partition("=")
            if not equals:
                raise UsageError("--option takes KEY=VALUE, such as tls=false or password_file=PATH")
            found[name] = parse_text(value)
        return found


def _one_folder(options: TierOptions) -> str:
    folders = folders_of(options)
    if len(folders) > 1:
        raise ConfigError(f"has several folders; give one of them: {', '.join(folders)}", options.label)
    return folders[0]


def store_arguments(command: Callable[..., None]) -> Callable[..., None]:
    """The arguments that name a store, handed to a command as `where`, which is None without a ROOT."""

    @click.option("--stack", metavar="FILE", help="A stack file; ROOT is then the name of one of its tiers.")
    @click.option("-o", "--option", "store_options", multiple=True, metavar="KEY=VALUE", help=_OPTION)
    @wraps(command)
    def wrapped(root: str | None, stack: str | None, store_options: tuple[str, ...], **more: Any) -> None:
        if root is None and (stack or store_options):
            raise UsageError("say which ROOT")
        command(where=None if root is None else StoreAddress(root, stack, store_options), **more)

    return wrapped


_OPTION = "An option of the tier at an address, as in a stack file, such as tls=false; may be repeated."


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


Chosen = Callable[[StoredBlock], bool]


@dataclass(slots=True)
class Usage:
    """Blocks that can be loaded, and leftovers that cannot. None where the store does not record it."""

    blocks: int = 0
    payload_bytes: int = 0
    stored_bytes: int = 0
    leftover_blocks: int = 0
    leftover_bytes: int = 0
    oldest_generation: int | None = None
    newest_generation: int | None = None
    oldest_stored_at: float | None = None
    newest_stored_at: float | None = None
    hits: int | None = None

    def add(self, block: StoredBlock) -> None:
        """Count one block in."""
        if block.state is not BlockState.CURRENT:
            self.leftover_blocks += 1
            self.leftover_bytes += block.stored_bytes
            return
        self.blocks += 1
        self.payload_bytes += block.payload_bytes
        self.stored_bytes += block.stored_bytes
        self.oldest_generation = min(block.generation, self.oldest_generation or block.generation)
        self.newest_generation = max(block.generation, self.newest_generation or 0)
        if block.stored_at is not None:
            self.oldest_stored_at = min(block.stored_at, self.oldest_stored_at or block.stored_at)
            self.newest_stored_at = max(block.stored_at, self.newest_stored_at or block.stored_at)
        if block.hits is not None:
            self.hits = (self.hits or 0) + block.hits


def add_up(
    title: str,
    slots: int | None,
    steps: Iterator[ListStep],
    place: Callable[[StoredBlock], Any],
    chosen: Chosen | None = None,
) -> tuple[dict[Any, Usage], Usage]:
    """The chosen blocks (None: all) by their place, in its order, and all of them together. Shows how far it is."""
    usages: dict[Any, Usage] = {}
    total = Usage()
    with progress(title, slots) as advance:
        for listed in steps:
            for block in filter(chosen, listed.blocks) if chosen else listed.blocks:
                usages.setdefault(place(block), Usage()).add(block)
                total.add(block)
            advance(listed.slots)
    return dict(sorted(usages.items())), total
