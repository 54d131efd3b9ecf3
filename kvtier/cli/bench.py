"""`kvtier bench`: what the tiers of a stack file do on this machine, without touching what is stored in them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvtier.bench.report import BenchReport
from kvtier.bench.run import Bench, Bounds
from kvtier.cli.failing import OneLineErrors
from kvtier.cli.running import report, size, until_signalled
from kvtier.config import load_stack
from kvtier.config.layout import DEFAULT_LAYOUT, read_layout
from kvtier.errors import ConfigError
from kvtier.options import parse_size
from kvtier.replay.engine import choose_device

DEFAULT_SIZES = "64KiB,256KiB,1MiB,4MiB"
SIZE_MAX = 64 << 20


@click.command(cls=OneLineErrors, short_help="Measure the tiers of a stack file on this machine.")
@click.argument("stack", metavar="STACK.yaml", type=click.Path(path_type=Path))
@click.option(
    "--layout", default=DEFAULT_LAYOUT, metavar="LAYOUT", help="KV layout, as for `check`. [default: 8B model]"
)
@click.option("--factor", type=click.IntRange(1, 4096), help="GPU blocks in one offloaded block.")
@click.option("--sizes", default=DEFAULT_SIZES, show_default=True, help="Further block sizes of tiers below the CPU.")
@click.option(
    "--seconds",
    type=click.FloatRange(0.01, 3600.0),
    default=1.0,
    show_default=True,
    help="How long each figure is measured.",
)
@click.option("--bytes", "num_bytes", callback=size, default="256MiB", show_default=True, help="Space used at a time.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the blocks' content.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write the figures here.")
def bench(stack: Path, json_file: Path | None, layout: str, factor: int | None, sizes: str, **asked: object) -> None:
    """Measure what the tiers of STACK.yaml do on this machine, and check every byte.

    A region of memory of its own takes the place of the CPU tier's, folders of its own beside the roots that of the
    roots: nothing stored is read, evicted or changed, and nothing is left. Exits with 1 if a single byte was wrong,
    with 2 and one line for each error if a tier cannot be measured.
    """
    report(lambda: _run(stack, layout, factor, _sizes(sizes), asked), json_file)


def _run(stack: Path, layout: str, factor: int | None, sizes: tuple[int, ...], asked: dict[str, object]) -> BenchReport:
    """Measure, with a line that says what is measured on a terminal."""
    config = load_stack(stack)
    kv_layout = read_layout(layout).layout(1, factor or config.block_size_factor)
    settings = {"stack": str(stack), "layout": layout, "block_size_factor": kv_layout.block_size_factor}
    bounds = Bounds(sizes=sizes, **(asked | {"device": choose_device(str(asked["device"]))}))  # type: ignore[arg-type]
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as shown:
        task = shown.add_task("opening", total=None)
        work = Bench(config, kv_layout, bounds).run(lambda what: shown.update(task, description=what))
        tiers = asyncio.run(until_signalled(work))
    return BenchReport(tiers, settings | bounds.to_json())


def _sizes(text: str) -> tuple[int, ...]:
    """`64KiB,1MiB` as bytes; empty text for none."""
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            found.append(parse_size(int(part) if part.isdecimal() else part))
        except ValueError as error:
            raise ConfigError(str(error), "--sizes") from None
        if not 1 <= found[-1] <= SIZE_MAX:
            raise ConfigError(f"{part} is not between 1 byte and {SIZE_MAX >> 20} MiB", "--sizes")
    return tuple(found)
