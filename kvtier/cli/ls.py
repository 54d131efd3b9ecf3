"""`kvtier ls`: the blocks of a store, one line each."""

import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import click

from kvtier.cli import CANNOT
from kvtier.cli.stores import (
    JSON_VERSION,
    StoreAddress,
    about_json,
    in_namespace,
    json_option,
    printable,
    root_argument,
    store_arguments,
    store_at,
    time_text,
)
from kvtier.cli.terminal import progress
from kvtier.errors import UsageError
from kvtier.options import size_text
from kvtier.stack.learned.installed_policies import find_model
from kvtier.stack.learned.model_files import model_path, read
from kvtier.tier.inspection import Access, BlockState, Inspection, StoredBlock
from kvtier.tier.stack_files import MODEL_FILE
from kvtier.types.keys import OffloadKey, key_hash

PREFIX_DIGITS = 12
_LINES_AT_ONCE = 1000
_LINE = "{namespace:<12.12}  {group:>5}  {key:<{width}}  {size:>10}  " + (
    "{generation:>{digits}}  {region:>6}  {slot:>6}  {state}"
)
_HEADINGS = ("namespace", "group", "key", "size", "generation", "region", "slot", "state")

SortKey = Callable[[StoredBlock], Any]
_SORTS: dict[str, SortKey] = {
    "place": lambda block: (block.region, block.slot),
    "namespace": lambda block: (block.namespace, block.group or 0, block.generation),
    "group": lambda block: (block.group or 0, block.namespace, block.generation),
    "size": lambda block: (block.payload_bytes, block.region, block.slot),
    "generation": lambda block: (block.generation, block.region, block.slot),
    "key": lambda block: block.key,
    "used": lambda block: (block.used_at or 0.0, block.region, block.slot),
}


@click.command(short_help="List the blocks of a store.")
@root_argument
@store_arguments
@click.option(
    "--namespace",
    default="",
    show_default=False,
    metavar="DIGEST",
    help="Only blocks of this namespace; its beginning will do.",
)
@click.option(
    "--all", "leftovers", is_flag=True, help="Also blocks that can no longer be loaded: old, orphaned, foreign."
)
@click.option("--sort", type=click.Choice(list(_SORTS)), default="place")
@click.option("--reverse", is_flag=True, help="The largest first.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="At most N blocks.")
@click.option("--full", is_flag=True, help="Print content hashes whole, not only how they begin.")
@click.option("--policy", is_flag=True, help="What the stack's policies have learned instead; ROOT may be a state_dir.")
@json_option
def ls(where: StoreAddress, as_json: bool, policy: bool, **options: Any) -> None:
    """List the blocks of ROOT from their headers; payloads are neither read nor printed.

    A store in use is read beside its owner. Exits with 2 if the store cannot be read.
    """
    if policy:
        if not print_learned(Path(where.folder), as_json):
            raise click.exceptions.Exit(CANNOT)
        return
    with store_at(where, Access.READ) as store:
        blocks = _select(store, options["namespace"].lower(), options["leftovers"])
        chosen = islice(_in_order(blocks, options["sort"], options["reverse"]), options["limit"])
        if as_json:
            _print_json(store, chosen, options["full"])
        else:
            _print(chosen, options["full"])


def _select(store: Inspection, namespace: str, leftovers: bool) -> Iterator[StoredBlock]:
    for block in chain.from_iterable(listed.blocks for listed in store.blocks()):
        if (leftovers or block.state is BlockState.CURRENT) and in_namespace(block.namespace, namespace):
            yield block


def _in_order(blocks: Iterator[StoredBlock], sort: str, reverse: bool) -> Iterable[StoredBlock]:
    """Blocks come by place; any other order has to wait for all of them."""
    if sort == "place" and not reverse:
        return blocks
    with progress("reading"):
        return sorted(blocks, key=_SORTS[sort], reverse=reverse)


def _print(blocks: Iterable[StoredBlock], full: bool) -> None:
    blocks = iter(blocks)
    first = list(islice(blocks, 1))
    # Where generations are times, all have as many digits as the first.
    line = partial(
        _LINE.format,
        width=64 if full else PREFIX_DIGITS,
        digits=max([len("generation"), *(len(str(block.generation)) for block in first)]),
    )
    click.echo(line(**dict(zip(_HEADINGS, _HEADINGS, strict=True))))
    _echo(line(**(_row(block, full) | _cells(block))) + _extra_text(block) + "\n" for block in chain(first, blocks))


def _echo(pieces: Iterator[str]) -> None:
    """Print in large portions: one call for each block would take most of the time."""
    while portion := "".join(islice(pieces, _LINES_AT_ONCE)):
        click.echo(portion, nl=False)


def _cells(block: StoredBlock) -> dict[str, str]:
    """The values that a line shows otherwise than JSON does."""
    return {"size": size_text(block.payload_bytes), "group": "-" if block.group is None else str(block.group)}


def _extra_text(block: StoredBlock) -> str:
    """The values that only some stores keep."""
    hits = "" if block.hits is None else f"  {block.hits} hits"
    stored = "" if block.stored_at is None else f"  stored {time_text(block.stored_at)}"
    used = "" if block.used_at is None else f"  used {time_text(block.used_at)}"
    return f"{hits}{stored}{used}"


def _print_json(store: Inspection, blocks: Iterable[StoredBlock], full: bool) -> None:
    """Prints a block on each line, as they come: a store may hold more than fits into memory."""
    about = json.dumps(about_json("ls", store.about))
    click.echo(f'{about[:-1]}, "blocks": [', nl=False)
    separators = chain(["\n"], repeat(",\n"))
    _echo(separator + json.dumps(_row(block, full)) for separator, block in zip(separators, blocks, strict=False))
    click.echo("\n]}")


def _row(block: StoredBlock, full: bool) -> dict[str, Any]:
    digits = (block.key if block.group is None else key_hash(OffloadKey(block.key))).hex()
    return block._asdict() | {"namespace": block.namespace.hex(), "key": digits if full else digits[:PREFIX_DIGITS]}


def print_learned(folder: Path, as_json: bool) -> bool:
    """Print what is kept in a folder. False if some of it cannot be read; raises UsageError where nothing is kept."""
    try:
        names = sorted(path.name.removeprefix("model-") for path in folder.iterdir() if _is_model(path))
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: {error.strerror}") from None
    if not names:
        raise UsageError(f"{folder} keeps nothing that policies have learned: give the first root, or state_dir")
    models = [_read_model_file(folder, name) for name in names]
    if as_json:
        head = {"command": "ls --policy", "version": JSON_VERSION, "folder": str(folder)}
        click.echo(json.dumps(head | {"models": models}, indent=2))
    else:
        click.echo("\n".join(line for model in models for line in _lines(model)))
    return not any(model["fault"] for model in models)


def _is_model(path: Path) -> bool:
    kept = MODEL_FILE.fullmatch(path.name) is not None and not path.name.endswith(".new")
    return kept and not path.name.startswith("model-writes-")  # what was written to a tier is not learned


def _read_model_file(folder: Path, name: str) -> dict[str, Any]:
    """The file of one model: when it was written, and what was learned or why it cannot be read."""
    found: dict[str, Any] = {"model": name, "bytes": None, "saved_at": None, "learned": [], "fault": None}
    try:
        status = model_path(folder, name).lstat()
        found |= {"bytes": status.st_size, "saved_at": status.st_mtime}
        found["learned"] = _describe_model(name, read(folder, name) or b"")
    except OSError as error:
        found["fault"] = error.strerror
    except ValueError as error:
        found["fault"] = str(error)
    return found


def _describe_model(name: str, saved: bytes) -> list[str]:
    """Raises ValueError for a model of no installed policy, and for what it cannot read."""
    kind = find_model(name)
    if kind is None:
        raise ValueError("no installed policy has a model of this name")
    model = kind()
    model.restore(saved)
    return list(model.describe())


def _lines(model: dict[str, Any]) -> list[str]:
    size = "" if model["bytes"] is None else f", {size_text(model['bytes'])}, saved {time_text(model['saved_at'])}"
    body = [f"cannot be read: {model['fault']}"] if model["fault"] else model["learned"]
    return [f"model {model['model']}{size}", *(f"  {printable(line)}" for line in body)]
