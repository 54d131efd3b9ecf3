"""`kvtier gc`: drop namespaces, or what can no longer be loaded, from a store."""

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import click

from kvtier.cli.stores import json_option, print_columns, print_json, root_argument, store_at
from kvtier.cli.usage import Chosen, add_up
from kvtier.errors import UsageError
from kvtier.options import count_text, size_text
from kvtier.tier_api.inspection import Access, BlockState, StoreAbout

FEWEST_DIGITS = 4
_NAMESPACE = attrgetter("namespace")


@click.command(short_help="Drop namespaces from a store on disk.")
@root_argument
@click.option("--namespace", "drop", multiple=True, metavar="DIGEST", help="Drop this namespace; may be repeated.")
@click.option("--all-but", "keep", multiple=True, metavar="DIGEST", help="Drop all but this; may be repeated.")
@click.option("--old", is_flag=True, help="Drop what can no longer be loaded: old, orphaned and foreign blocks.")
@click.option("--dry-run", is_flag=True, help="Only print what would be dropped.")
@json_option
def gc(root: str, dry_run: bool, as_json: bool, **options: Any) -> None:
    """Drop blocks from ROOT for good, and print how many of which namespace.

    A DIGEST is a namespace's digest, or the first digits of only that one. Slots become free; slabs keep their size,
    because they are reserved as a whole. A store that processes share is pruned beside them. Exits with 2 if a process
    owns the store or a digest is not known.
    """
    if sum(map(bool, options.values())) != 1:
        raise UsageError("give one of --namespace, --all-but and --old")
    with store_at(root, Access.CHECK if dry_run else Access.CHANGE) as store:
        about = store.about
        there, _ = add_up("reading", about.slots, store.blocks(), _NAMESPACE)
        chosen = _choose(about, there, **options)
        title, going = ("reading", store.blocks()) if dry_run else ("dropping", store.drop(chosen))
        dropped, _ = add_up(title, about.slots, going, _NAMESPACE, chosen)
    rows = [
        {
            "namespace": namespace.hex(),
            "blocks": usage.blocks + usage.leftover_blocks,
            "stored_bytes": usage.stored_bytes + usage.leftover_bytes,
        }
        for namespace, usage in dropped.items()
    ]
    if as_json:
        print_json("gc", about, {"dry_run": dry_run, "dropped": rows})
    elif rows:
        _show(rows, "would be dropped" if dry_run else "dropped")
    else:
        click.echo("there is nothing to drop")


def _choose(
    about: StoreAbout, there: Iterable[bytes], drop: tuple[str, ...], keep: tuple[str, ...], old: bool
) -> Chosen:
    """Which blocks are dropped. Raises UsageError for an unknown digest: a typing error must not drop the others."""
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


def _show(rows: list[dict[str, Any]], heading: str) -> None:
    cells = [
        {"namespace": row["namespace"], heading: count_text(row["blocks"]), "on disk": size_text(row["stored_bytes"])}
        for row in rows
    ]
    print_columns(cells, left=1)
