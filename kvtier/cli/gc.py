"""`kvtier gc`: drop namespaces, or what can no longer be loaded, from a store; and what killed tools left."""

import json
import os
import tempfile
import time
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import click

from kvtier.cli.stores import (
    JSON_VERSION,
    Chosen,
    StoreAddress,
    add_up,
    in_namespace,
    json_option,
    print_columns,
    print_json,
    store_arguments,
    store_at,
)
from kvtier.cli.temporary_folders import abandoned_folders, remove_abandoned
from kvtier.errors import ConfigError, UsageError
from kvtier.options import count_text, parse_duration, size_text
from kvtier.tier.inspection import Access, BlockState, StoreAbout, StoredBlock

FEWEST_DIGITS = 4
_NAMESPACE = attrgetter("namespace")


def _duration(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else parse_duration(value)
    except ValueError as error:
        raise ConfigError(str(error), param.opts[0]) from None


@click.command(short_help="Drop blocks from a store.")
@click.argument("root", required=False, metavar="[ROOT]")
@store_arguments
@click.option("--namespace", "drop", multiple=True, metavar="DIGEST", help="Drop this namespace; may be repeated.")
@click.option("--all-but", "keep", multiple=True, metavar="DIGEST", help="Drop all but this; may be repeated.")
@click.option("--old", is_flag=True, help="Drop what can no longer be loaded: old, orphaned and foreign blocks.")
@click.option("--older-than", callback=_duration, metavar="AGE", help="Drop what was stored longer ago, such as 7d.")
@click.option("--temporary", is_flag=True, help="Remove folders of tools that were killed, beside and in ROOT.")
@click.option("--dry-run", is_flag=True, help="Only print what would be dropped.")
@json_option
def gc(where: StoreAddress | None, temporary: bool, dry_run: bool, as_json: bool, **options: Any) -> None:
    """Drop blocks from ROOT for good, and print how many of which namespace.

    A DIGEST is a namespace's digest, or the first digits of only that one. Slots become free; slabs keep their size,
    because they are reserved as a whole. A store that processes share is pruned beside them. Exits with 2 if a process
    owns the store or a digest is not known.

    With --temporary no block is dropped: temporary folders go that a killed replay or measurement left, beside ROOT
    and in it, or in the system's folder for temporary files without ROOT. Those of living processes stay.
    """
    if sum(map(bool, (temporary, *options.values()))) != 1:
        raise UsageError("give one of --namespace, --all-but, --old, --older-than and --temporary")
    if temporary:
        _drop_temporary(where, dry_run, as_json)
    elif where is None:
        raise UsageError("say which ROOT to drop from")
    else:
        _drop_blocks(where, dry_run, as_json, **options)


def _drop_temporary(where: StoreAddress | None, dry_run: bool, as_json: bool) -> None:
    inside = tempfile.gettempdir() if where is None else where.folder
    places = [inside] if where is None else [os.path.dirname(inside), inside]
    found = [folder for place in places for folder in abandoned_folders(place)]
    removed = found if dry_run else [folder for folder in found if remove_abandoned(folder)]
    if as_json:
        document = {"command": "gc", "version": JSON_VERSION, "dry_run": dry_run, "removed": removed}
        click.echo(json.dumps(document, indent=2))
        return
    for folder in removed:
        click.echo(f"{folder} {'would be removed' if dry_run else 'removed'}")
    if not removed:
        click.echo("there is nothing to remove")


def _drop_blocks(where: StoreAddress, dry_run: bool, as_json: bool, older_than: int | None, **options: Any) -> None:
    with store_at(where, Access.CHECK if dry_run else Access.CHANGE) as store:
        about = store.about
        there, total = add_up("reading", about.slots, store.blocks(), _NAMESPACE)
        if older_than is not None and total.blocks and total.oldest_stored_at is None:
            raise UsageError("this store does not keep when its blocks were stored; give --namespace or --old")
        older = _OlderThan(older_than or 0)
        chosen = older if older_than is not None else _choose(about, there, **options)
        title, going = ("reading", store.blocks()) if dry_run else ("dropping", store.drop(chosen))
        dropped, _ = add_up(title, about.slots, going, _NAMESPACE, chosen)
    if older.undated:
        click.echo(f"note: {count_text(older.undated)} blocks stay that do not say when they were stored", err=True)
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


class _OlderThan:
    """Chooses blocks stored at least `seconds` ago. Blocks without a time are kept, and counted in `undated`."""

    def __init__(self, seconds: int) -> None:
        self._before = time.time() - seconds
        self.undated = 0

    def __call__(self, block: StoredBlock) -> bool:
        self.undated += block.stored_at is None
        return block.stored_at is not None and block.stored_at < self._before


def _choose(
    about: StoreAbout, there: Iterable[bytes], drop: tuple[str, ...], keep: tuple[str, ...], old: bool
) -> Chosen:
    """The choice of blocks to drop. Raises UsageError for an unknown digest: a typing error must not drop the
    others."""
    if old:
        return lambda block: block.state is not BlockState.CURRENT
    known = {namespace.digest for namespace in about.namespaces} | set(there)
    named = {_resolve(digits.lower(), known) for digits in drop or keep}
    if drop:
        return lambda block: block.namespace in named
    return lambda block: block.namespace not in named


def _resolve(digits: str, known: set[bytes]) -> bytes:
    found = [digest for digest in known if in_namespace(digest, digits)]
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
