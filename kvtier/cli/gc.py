"""`kvtier gc`: drop namespaces, or what can no longer be loaded, from a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click

from kvtier.cli.failing import OneLineErrors, fail
from kvtier.cli.stores import (
    about_json,
    json_option,
    note_owner,
    print_columns,
    print_json,
    progress,
    root_argument,
    store_at,
)
from kvtier.cli.text import count_text, size_text
from kvtier.cli.usage import Usage
from kvtier.errors import UsageError
from kvtier.inspection import Access, BlockState, Listed, StoreAbout, StoredBlock

FEWEST_DIGITS = 4
Chosen = Callable[[StoredBlock], bool]


@click.command(cls=OneLineErrors, short_help="Drop namespaces from a store on disk.")
@root_argument
@click.option("--namespace", "drop", multiple=True, metavar="DIGEST", help="Drop this namespace; may be repeated.")
@click.option("--all-but", "keep", multiple=True, metavar="DIGEST", help="Drop all but this; may be repeated.")
@click.option("--old", is_flag=True, help="Drop what can no longer be loaded: old, orphaned and foreign blocks.")
@click.option("--dry-run", is_flag=True, help="Only say what would be dropped.")
@json_option
def gc(root: str, dry_run: bool, as_json: bool, **asked: Any) -> None:
    """Drop blocks from ROOT for good, and say how many of which namespace.

    A DIGEST is a namespace's digest, or how only that one begins. Slots become free; slabs keep their size, for they
    are reserved as a whole. A store that processes share is pruned beside them. Exits with 2 if a process owns the
    store or a digest is not known.
    """
    if sum(map(bool, asked.values())) != 1:
        fail("give one of --namespace, --all-but and --old")
    with store_at(root, Access.CHECK if dry_run else Access.CHANGE) as store:
        about = store.about
        note_owner(about)
        with progress("reading", about.slots) as advance:
            there = _by_namespace(store.blocks(), advance, lambda block: True)
        chosen = _choose(about, there, **asked)
        with progress("reading" if dry_run else "dropping", about.slots) as advance:
            going = store.blocks() if dry_run else store.drop(chosen)
            dropped = _by_namespace(going, advance, chosen)
    if as_json:
        print_json(_document(about, dropped, dry_run))
    else:
        _show(dropped, dry_run)


def _by_namespace(steps: Iterator[Listed], advance: Callable[[int], None], chosen: Chosen) -> dict[bytes, Usage]:
    usages: dict[bytes, Usage] = {}
    for listed in steps:
        for block in filter(chosen, listed.blocks):
            usages.setdefault(block.namespace, Usage()).add(block)
        advance(listed.slots)
    return dict(sorted(usages.items()))


def _choose(
    about: StoreAbout, there: Iterable[bytes], drop: tuple[str, ...], keep: tuple[str, ...], old: bool
) -> Chosen:
    """Which blocks go. Raises UsageError for a digest that is not known: a slip must not drop everything else."""
    if old:
        return lambda block: block.state is not BlockState.CURRENT
    known = {namespace.digest for namespace in about.namespaces} | set(there)
    named = {_resolve(digits.lower(), known) for digits in drop or keep}
    if drop:
        return lambda block: block.namespace in named
    return lambda block: block.namespace not in named


def _resolve(digits: str, known: set[bytes]) -> bytes:
    found = [digest for digest in known if digest.hex().startswith(digits)]
    if len(digits) < FEWEST_DIGITS:
        raise UsageError(f"{digits!r} is too short for a namespace; give {FEWEST_DIGITS} digits at least")
    if len(found) != 1:
        many = "no namespace begins" if not found else f"{len(found)} namespaces begin"
        raise UsageError(f"{many} with {digits!r}; kvtier du --by namespace lists them")
    return found[0]


def _document(about: StoreAbout, dropped: dict[bytes, Usage], dry_run: bool) -> dict[str, Any]:
    rows = [
        {
            "namespace": namespace.hex(),
            "blocks": usage.blocks + usage.leftover_blocks,
            "stored_bytes": usage.stored_bytes + usage.leftover_bytes,
        }
        for namespace, usage in dropped.items()
    ]
    return about_json("gc", about) | {"dry_run": dry_run, "dropped": rows}


def _show(dropped: dict[bytes, Usage], dry_run: bool) -> None:
    rows = [
        (
            namespace.hex(),
            count_text(usage.blocks + usage.leftover_blocks),
            size_text(usage.stored_bytes + usage.leftover_bytes),
        )
        for namespace, usage in dropped.items()
    ]
    if not rows:
        click.echo("there is nothing to drop")
        return
    print_columns(("namespace", "would be dropped" if dry_run else "dropped", "on disk"), rows, left=1)
