"""`kvtier du`: how much of a store belongs to whom."""

from __future__ import annotations

from typing import Any

import click

from kvtier.cli.failing import OneLineErrors
from kvtier.cli.stores import (
    about_json,
    json_option,
    note_owner,
    parts_text,
    print_columns,
    print_json,
    printable,
    progress,
    root_argument,
    store_at,
    time_text,
)
from kvtier.cli.text import count_text, size_text
from kvtier.cli.usage import Usage
from kvtier.inspection import Access, BlockState, Inspection, StoreAbout, StoredBlock, StoredNamespace

Place = tuple[str, int]
"""A namespace's digest in hex and a group, or an empty string and a region."""

_BY = {
    "namespace": ("namespace",),
    "group": ("namespace", "group"),
    "region": ("region",),
}
_FIGURES = ("blocks", "payload", "on disk", "leftover")
_NONE = "-"


@click.command(cls=OneLineErrors, short_help="Say how much of a store belongs to whom.")
@root_argument
@click.option("--by", type=click.Choice(list(_BY)), default="namespace", show_default=True)
@json_option
def du(root: str, by: str, as_json: bool) -> None:
    """Add up the blocks of ROOT by namespace, by KV cache group or by region.

    A store in use is read beside whoever uses it. Exits with 2 if the store cannot be read.
    """
    with store_at(root, Access.LOOK) as store:
        about = store.about
        note_owner(about)
        usages, total = _add_up(store, by)
    if as_json:
        _print_json(about, by, usages, total)
    else:
        _show(about, by, usages, total)


def _add_up(store: Inspection, by: str) -> tuple[dict[Place, Usage], Usage]:
    usages: dict[Place, Usage] = {}
    total = Usage()
    with progress("reading", store.about.slots) as advance:
        for listed in store.blocks():
            for block in listed.blocks:
                usages.setdefault(_place(block, by), Usage()).add(block)
                total.add(block)
            advance(listed.slots)
    return dict(sorted(usages.items())), total


def _place(block: StoredBlock, by: str) -> Place:
    if by == "region":
        return "", block.region
    # What lies there of another store is nobody's here, whatever namespace it names.
    digest = "foreign" if block.state is BlockState.FOREIGN else block.namespace.hex()
    return digest, block.group if by == "group" else 0


def _names(place: Place, by: str) -> tuple[str | int, ...]:
    return {"namespace": place[:1], "group": place, "region": place[1:]}[by]


def _print_json(about: StoreAbout, by: str, usages: dict[Place, Usage], total: Usage) -> None:
    known = {namespace.digest.hex(): namespace for namespace in about.namespaces}
    rows = []
    for place, usage in usages.items():
        row: dict[str, Any] = dict(zip(_BY[by], _names(place, by), strict=True))
        row |= usage.to_json()
        namespace = known.get(place[0])
        if by == "namespace":
            row |= {
                "epoch": namespace.epoch if namespace else None,
                "session": namespace.session if namespace else None,
                "opened_at": namespace.opened_at if namespace else None,
                "model": namespace.model if namespace else None,
                "tag": namespace.tag if namespace else None,
            }
        rows.append(row)
    reserved = {"regions": about.regions, "region_bytes": about.region_bytes}
    print_json(about_json("du", about) | reserved | {"by": by, "rows": rows, "total": total.to_json()})


def _show(about: StoreAbout, by: str, usages: dict[Place, Usage], total: Usage) -> None:
    known = {namespace.digest.hex(): namespace for namespace in about.namespaces}
    extra = ("last opened", "model", "tag") if by == "namespace" else ()
    hits = ("hits",) if total.hits is not None else ()
    timed = total.oldest_stored_at is not None
    order = ("oldest stored", "newest stored") if timed else ("generations",)
    rows = []
    for place, usage in usages.items():
        names = map(str, _names(place, by))
        about_it = _about(known.get(place[0])) if extra else ()
        rows.append([*names, *_figures(usage, bool(hits), timed), *about_it])
    blanks = [""] * (len(_BY[by]) - 1)
    rows.append(["total", *blanks, *_figures(total, bool(hits), timed), *[""] * len(extra)])
    print_columns((*_BY[by], *_FIGURES, *hits, *order, *extra), rows, left=len(_BY[by]))
    click.echo(
        f"{parts_text(about)}; leftover: of an older epoch, where nobody looks for it, or foreign, "
        f"and never loaded again"
    )
    for note in about.notes:
        click.echo(f"note: {note}")


def _figures(usage: Usage, hits: bool, timed: bool) -> list[str]:
    cells = [
        count_text(usage.blocks),
        size_text(usage.payload_bytes),
        size_text(usage.stored_bytes),
        size_text(usage.leftover_bytes),
    ]
    if hits:
        cells.append(_NONE if usage.hits is None else count_text(usage.hits))
    if timed:
        cells += [time_text(usage.oldest_stored_at), time_text(usage.newest_stored_at)]
    else:  # generations are all that tells the order
        cells.append(_NONE if usage.blocks == 0 else f"{usage.oldest_generation}..{usage.newest_generation}")
    return cells


def _about(namespace: StoredNamespace | None) -> list[str]:
    if namespace is None:
        return [_NONE] * 3
    return [time_text(namespace.opened_at), printable(namespace.model), printable(namespace.tag)]
