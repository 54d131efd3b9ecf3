"""`kvtier bench`: the speed of the tiers of a stack file on this machine. Their stored blocks are not touched."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from kvtier.cli.terminal import progress
from kvtier.config import load_stack
from kvtier.config.layout import read_layout
from kvtier.errors import ConfigError
from kvtier.tools.bench.results import BenchReport
from kvtier.tools.bench.run import Bench, Bounds
from kvtier.tools.commands.run_report import json_file_option, layout_option, report, run_to_end, size
from kvtier.tools.replay.engine import choose_device

DEFAULT_SIZES = "64KiB,256KiB,1MiB,4MiB"
SIZE_MAX = 64 << 20


def _sizes(ctx: click.Context, param: click.Parameter, text: str) -> tuple[int, ...]:
    """`64KiB,1MiB` as bytes; empty text for none."""
    found = tuple(size(ctx, param, part.strip()) or 0 for part in text.split(",") if part.strip())
    if any(number > SIZE_MAX for number in found):
        raise ConfigError(f"a block has at most {SIZE_MAX >> 20} MiB", "--sizes")
    return found


@click.command(short_help="Measure the tiers of a stack file on this machine.")
@click.argument("stack", metavar="STACK.yaml", type=click.Path(path_type=Path))
@layout_option
@click.option("--factor", type=click.IntRange(1, 4096), help="GPU blocks in one offloaded block.")
@click.option("--sizes", callback=_sizes, default=DEFAULT_SIZES, help="Further block sizes of lower tiers.")
@click.option("--seconds", type=click.FloatRange(0.01, 3600.0), default=1.0, help="How long each figure is measured.")
@click.option("--bytes", "num_bytes", callback=size, default="256MiB", help="Space used at a time.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@click.option("--seed", type=int, default=0, help="Seed of the blocks' content.")
@json_file_option
def bench(stack: Path, json_file: Path | None, layout: str, factor: int | None, **options: Any) -> None:
    """Measure the speed of the tiers of STACK.yaml on this machine, and check every byte.

    Works on a separate memory region instead of the CPU tier's, and in new folders beside the roots instead of the
    roots: no stored block is read, evicted or changed, and the folders are removed. Exits with 1 if a single byte was
    wrong, with 2 and one line for each error if a tier cannot be measured.
    """
    config = load_stack(stack)
    kv_layout = read_layout(layout).layout(1, factor or config.block_size_factor)
    settings = {"stack": str(stack), "layout": layout, "block_size_factor": kv_layout.block_size_factor}
    bounds = Bounds(**options | {"device": choose_device(options["device"])})
    with progress("opening") as advance:
        tiers = run_to_end(Bench(config, kv_layout, bounds).run(lambda what: advance(title=what)))
    report(BenchReport(tiers, settings | asdict(bounds) | {"bytes": bounds.num_bytes}), json_file)
