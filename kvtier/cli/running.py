"""What commands that run for a while share: sizes as arguments, a file for the figures, an orderly end on a signal."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

import click
from rich.console import Console

from kvtier.cli.failing import fail
from kvtier.errors import ConfigError, IntegrityError, KVTierError
from kvtier.options import parse_size

INTERRUPTED = 130
T = TypeVar("T")


class Figures(Protocol):
    """What a run found: a table, a record, and whether every byte was right."""

    @property
    def ok(self) -> bool: ...
    def show(self, console: Console) -> None: ...
    def to_json(self) -> dict[str, Any]: ...


def report(run: Callable[[], Figures], json_file: Path | None) -> None:
    """Run, show what was found and write it to the file, if there is one.

    Exits with 1 if a byte was wrong, with 2 and one line if the run was refused or its figures cannot be written.
    """
    try:
        if json_file is not None:
            _check_writable(json_file)
        found = run()
    except IntegrityError:
        raise
    except KVTierError as error:
        fail(str(error))
    except KeyboardInterrupt:
        click.echo("interrupted; temporary storage is removed", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
    found.show(Console())
    if json_file is not None:
        _write(json_file, json.dumps(found.to_json(), indent=2) + "\n")
    if not found.ok:
        raise click.exceptions.Exit(1)


def size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """A size such as `64KiB`, as in stack files."""
    if value is None:
        return None
    try:
        found = parse_size(int(value) if value.isdecimal() else value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if found < 1:
        raise click.BadParameter("must be at least one byte")
    return found


async def until_signalled(work: Coroutine[Any, Any, T]) -> T:
    """Await it; SIGTERM ends it as Ctrl-C does, with everything closed and removed: KeyboardInterrupt."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    terminated = False

    def terminate() -> None:
        nonlocal terminated
        terminated = True
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, terminate)
    try:
        return await work
    except asyncio.CancelledError:
        if terminated:
            raise KeyboardInterrupt from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def _check_writable(path: Path) -> None:
    """A bad path for the figures is told before the run, not after a long wait."""
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ConfigError(f"cannot write {os.fspath(path)}: not a file in a folder that can be written", "--json")


def _write(path: Path, text: str) -> None:
    """Write the figures; what keeps them from being written is one line and exit status 2."""
    try:
        path.write_text(text)
    except OSError as error:
        fail(str(ConfigError(f"cannot write {os.fspath(path)}: {error.strerror}", "--json")))
