"""The learned tables of a stack's policies in words, from the files that it keeps in a folder."""

import json
from pathlib import Path
from typing import Any

import click

from kvtier.cli.stores import JSON_VERSION, printable, time_text
from kvtier.errors import UsageError
from kvtier.options import size_text
from kvtier.stack.learned.installed_policies import find_model
from kvtier.stack.learned.model_files import model_path, read
from kvtier.tier.stack_files import MODEL_FILE


def print_learned(folder: Path, as_json: bool) -> bool:
    """Print what is kept in a folder. False if some of it cannot be read; raises UsageError where nothing is kept."""
    try:
        names = sorted(path.name.removeprefix("model-") for path in folder.iterdir() if _is_model(path))
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: {error.strerror}") from None
    if not names:
        raise UsageError(f"{folder} keeps nothing that policies have learned: give the first root, or state_dir")
    models = [_learned(folder, name) for name in names]
    if as_json:
        head = {"command": "ls --policy", "version": JSON_VERSION, "folder": str(folder)}
        click.echo(json.dumps(head | {"models": models}, indent=2))
    else:
        click.echo("\n".join(line for model in models for line in _lines(model)))
    return not any(model["fault"] for model in models)


def _is_model(path: Path) -> bool:
    kept = MODEL_FILE.fullmatch(path.name) is not None and not path.name.endswith(".new")
    return kept and not path.name.startswith("model-writes-")  # what was written to a tier is not learned


def _learned(folder: Path, name: str) -> dict[str, Any]:
    """The file of one model: when it was written, and what was learned or why it cannot be read."""
    found: dict[str, Any] = {"model": name, "bytes": None, "saved_at": None, "learned": [], "fault": None}
    try:
        status = model_path(folder, name).lstat()
        found |= {"bytes": status.st_size, "saved_at": status.st_mtime}
        found["learned"] = _described(name, read(folder, name) or b"")
    except OSError as error:
        found["fault"] = error.strerror
    except ValueError as error:
        found["fault"] = str(error)
    return found


def _described(name: str, saved: bytes) -> list[str]:
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
