"""What commands that run for a while share: sizes as arguments, a file for the figures, an orderly end on a signal."""

import asyncio
import json
import os
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

import click
from rich.console import Console

from kvtier.errors import ConfigError
from kvtier.options import parse_size

T = TypeVar("T")


class Figures(Protocol):
    """What a run found: a table, a record, and whether every byte was right."""

    @property
    def ok(self) -> bool: ...
    def show(self, console: Console) -> None: ...
    def to_json(self) -> dict[str, Any]: ...


def report(found: Figures, json_file: Path | None) -> None:
    """Show what was found and write it to the file, if there is one. Exits with 1 if a byte was wrong."""
    found.show(Console())
    if json_file is not None:
        try:
            json_file.write_text(json.dumps(found.to_json(), indent=2) + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write {os.fspath(json_file)}: {error.strerror}", "--json") from None
    if not found.ok:
        raise click.exceptions.Exit(1)


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run it. SIGTERM ends it as Ctrl-C does, with everything closed and removed: KeyboardInterrupt."""

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    try:
        return asyncio.run(main())
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise KeyboardInterrupt("temporary storage is removed") from None


def size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """A size such as `64KiB`, as in stack files."""
    if value is None:
        return None
    try:
        found = parse_size(value)
    except ValueError as error:
        raise ConfigError(str(error), param.opts[0]) from None
    if found < 1:
        raise ConfigError("must be at least one byte", param.opts[0])
    return found


def _writable(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a bad path for the figures before the run, not after a long wait."""
    if path and (path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK)):
        raise ConfigError(f"cannot write {os.fspath(path)}: not a file in a folder that can be written", "--json")
    return path


json_file_option = click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path),
    callback=_writable,
    metavar="FILE",
    help="Write the figures here.",
)
