"""`kvtier replay`: drive a stack with a workload or a trace, check every byte, and say what each tier did."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvtier.cli.failing import OneLineErrors, fail
from kvtier.errors import ConfigError, IntegrityError, KVTierError
from kvtier.options import parse_size
from kvtier.replay.report import ReplayReport
from kvtier.replay.run import Replay
from kvtier.replay.setup import ReplayOptions

INTERRUPTED = 130


def _size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """A size such as `64KiB`, as in stack files."""
    if value is None:
        return None
    try:
        size = parse_size(int(value) if value.isdecimal() else value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if size < 1:
        raise click.BadParameter("must be at least one byte")
    return size


@click.command(cls=OneLineErrors)
@click.argument("stack", required=False, metavar="[STACK.yaml]", type=click.Path(path_type=Path))
@click.option("--trace", type=click.Path(path_type=Path), help="Replay this trace: JSON lines, plain or gzip.")
@click.option(
    "--workload",
    type=click.Choice(["chat", "agentic", "hybrid"]),
    help="Generate this workload instead. [default: chat]",
)
@click.option("--requests", type=click.IntRange(1), metavar="N", help="Serve N requests, of a trace the first N.")
@click.option(
    "--block-bytes",
    callback=_size,
    metavar="SIZE",
    help="Bytes of a GPU block of the full-attention group. [default: 64KiB, hybrid 16KiB]",
)
@click.option(
    "--block-tokens", type=click.IntRange(1), metavar="N", help="Tokens of a trace's block, if its lengths do not tell."
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of a generated workload.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write the figures here.")
@click.option("--gpu-blocks", type=click.IntRange(1), metavar="N", help="Size of the GPU pool of each group.")
@click.option(
    "--cpu-blocks", type=click.IntRange(1), metavar="N", help="Rows of the CPU tier, whatever the stack says."
)
@click.option("--fs-blocks", type=click.IntRange(1), metavar="N", help="Slots of the fs tier, at least, likewise.")
@click.option(
    "--fs-root", type=click.Path(path_type=Path), help="Folder of the fs tier; kept, so a second run hits it."
)
@click.option("--policy", type=click.Choice(["lru", "arc"]), help="Eviction policy of every tier.")
@click.option("--store-mode", type=click.Choice(["eager", "lazy"]), default="eager", show_default=True)
@click.option("--concurrency", type=click.IntRange(1, 256), default=1, show_default=True, help="Requests at once.")
@click.option(
    "--backlog",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="N",
    help="Blocks that may lag on their way to lower tiers when the next request begins.",
)
def replay(json_file: Path | None, **asked: Any) -> None:
    """Serve requests over the tiers of STACK.yaml, moving and checking real bytes.

    Without a stack file: a GPU pool, a CPU tier and a filesystem tier in a temporary folder. Exits with 1 if a single
    byte was wrong, with 2 and one line for each error if the stack, the trace or an option is.
    """
    try:
        if json_file is not None:
            _check_writable(json_file)
        report = _run(ReplayOptions(**asked))
    except IntegrityError:
        raise
    except KVTierError as error:
        fail(str(error))
    except KeyboardInterrupt:
        click.echo("interrupted; temporary storage is removed", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
    report.show(Console())
    if json_file is not None:
        _write(json_file, json.dumps(report.to_json(), indent=2) + "\n")
    if not report.ok:
        raise click.exceptions.Exit(1)


def _run(options: ReplayOptions) -> ReplayReport:
    """Prepare and run, with a progress bar on a terminal."""
    prepared = Replay(options)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(prepared.source.name, total=prepared.shape.num_requests)
        return asyncio.run(_until_signalled(prepared, lambda: bar.advance(task)))


async def _until_signalled(prepared: Replay, progress: Callable[[], None]) -> ReplayReport:
    """Run; SIGTERM ends it as Ctrl-C does, with everything closed and removed."""
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
        return await prepared.run(progress)
    except asyncio.CancelledError:
        if terminated:
            raise KeyboardInterrupt from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def _check_writable(path: Path) -> None:
    """A bad path is told before the run, not after a long wait."""
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ConfigError(f"cannot write {os.fspath(path)}: not a file in a folder that can be written", "--json")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        fail(str(ConfigError(f"cannot write {os.fspath(path)}: {error.strerror}", "--json")))
