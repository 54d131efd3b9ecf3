"""`kvtier replay`: drive a stack with a workload or a trace, check every byte, and say what each tier did."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvtier.cli.failing import OneLineErrors
from kvtier.cli.running import report, size, until_signalled
from kvtier.replay.report import ReplayReport
from kvtier.replay.run import Replay
from kvtier.replay.setup import ReplayOptions


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
    callback=size,
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
    report(lambda: _run(ReplayOptions(**asked)), json_file)


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
        return asyncio.run(until_signalled(prepared.run(lambda: bar.advance(task))))
