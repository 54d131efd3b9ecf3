"""`kvtier du`: how much of a store belongs to which namespace, group or region."""

from dataclasses import asdict
from typing import Any

import click

from kvtier.cli.stores import (
    StoreAddress,
    Usage,
    add_up,
    json_option,
    parts_text,
    print_columns,
    print_json,
    printable,
    root_argument,
    store_arguments,
    store_at,
    time_text,
)
from kvtier.options import count_text, size_text
from kvtier.tier.inspection import Access, BlockState, StoreAbout, StoredBlock, StoredNamespace

Row = tuple[dict[str, Any], Usage, StoredNamespace | None]
"""A place (a namespace's digest in hex, one with a group, or a region), what it holds, and its namespace if known."""

_BY = {
    "namespace": ("namespace",),
    "epoch": ("namespace", "epoch"),
    "group": ("namespace", "group"),
    "region": ("region",),
}
_OF_NAMESPACE = ("epoch", "session", "opened_at", "model", "tag")
_NONE = "-"


@click.command(short_help="Print how much of a store belongs to which namespace.")
@root_argument
@store_arguments
@click.option("--by", type=click.Choice(list(_BY)), default="namespace")
@json_option
def du(where: StoreAddress, by: str, as_json: bool) -> None:
    """Add up the blocks of ROOT by namespace, by its epochs, by KV cache group or by region.

    A store in use is read beside its owner. Exits with 2 if the store cannot be read.
    """
    with store_at(where, Access.READ) as store:
        about = store.about
        usages, total = add_up("reading", about.slots, store.blocks(), lambda block: _place(block, by))
    known = {namespace.digest.hex(): namespace for namespace in about.namespaces}
    rows = [(dict(zip(_BY[by], place, strict=True)), usage, known.get(place[0])) for place, usage in usages.items()]
    if as_json:
        _print_json(about, by, rows, total)
    else:
        _show(about, by, rows, total)


def _place(block: StoredBlock, by: str) -> tuple[Any, ...]:
    if by == "region":
        return (block.region,)
    # A block of another store belongs to none of these namespaces, even if its header names one.
    digest = "foreign" if block.state is BlockState.FOREIGN else block.namespace.hex()
    return {"epoch": (digest, block.epoch), "group": (digest, block.group)}.get(by, (digest,))


def _print_json(about: StoreAbout, by: str, rows: list[Row], total: Usage) -> None:
    recorded = _OF_NAMESPACE if by == "namespace" else ()
    listed = [
        place | asdict(usage) | {name: getattr(namespace, name, None) for name in recorded}
        for place, usage, namespace in rows
    ]
    reserved = {"regions": about.regions, "region_bytes": about.region_bytes}
    print_json("du", about, reserved | {"by": by, "rows": listed, "total": asdict(total)})


def _show(about: StoreAbout, by: str, rows: list[Row], total: Usage) -> None:
    cells = [_place_cells(place) | _figures(usage, total) | _namespace_row(by, place, of) for place, usage, of in rows]
    last = dict.fromkeys(_BY[by], "") | {_BY[by][0]: "total"}
    cells.append(last | _figures(total, total) | dict.fromkeys(_namespace_row(by, {}, None), ""))
    print_columns(cells, left=len(_BY[by]))
    click.echo(f"{parts_text(about)}; leftover: of an older epoch, out of place, or foreign, and never loaded again")
    for note in about.notes:
        click.echo(f"note: {note}")


def _place_cells(place: dict[str, Any]) -> dict[str, str]:
    return {name: _NONE if part is None else str(part) for name, part in place.items()}


def _namespace_row(by: str, place: dict[str, Any], namespace: StoredNamespace | None) -> dict[str, str]:
    """The cells of what the store records of a namespace, or of one of its epochs."""
    if by == "epoch":
        return {"current": "yes" if namespace is not None and namespace.epoch == place["epoch"] else "no"}
    if by != "namespace":
        return {}
    opened_at, model, tag = (getattr(namespace, name, None) for name in ("opened_at", "model", "tag"))
    return {"last opened": time_text(opened_at), "model": printable(model), "tag": printable(tag)}


def _figures(usage: Usage, total: Usage) -> dict[str, str]:
    """The cells of a row by heading. Hits and times have columns only where the store keeps them."""
    cells = {
        "blocks": count_text(usage.blocks),
        "payload": size_text(usage.payload_bytes),
        "on disk": size_text(usage.stored_bytes),
        "leftover": size_text(usage.leftover_bytes),
    }
    if total.hits is not None:
        cells["hits"] = _NONE if usage.hits is None else count_text(usage.hits)
    if total.oldest_stored_at is not None:
        times = {"oldest stored": usage.oldest_stored_at, "newest stored": usage.newest_stored_at}
        return cells | {heading: time_text(at) for heading, at in times.items()}
    order = _NONE if usage.blocks == 0 else f"{usage.oldest_generation}..{usage.newest_generation}"
    return cells | {"generations": order}
