"""`kvtier simulate`: what a stack would do with a trace, in virtual time, and what others would."""

from pathlib import Path
from typing import Any, Literal

import click

from kvtier.cli.terminal import progress
from kvtier.errors import ConfigError
from kvtier.tools.commands.run_report import (
    backlog_option,
    html_file_option,
    json_file_option,
    note_times,
    prefill_option,
    report,
    size,
    store_mode_option,
    time_unit_option,
)
from kvtier.tools.replay.setup import ReplayOptions
from kvtier.tools.whatif.report import SimulationReport
from kvtier.tools.whatif.simulate import SimulateOptions, Simulation
from kvtier.tools.whatif.variants import grid


@click.command(short_help="Say what a stack would do with a trace.")
@click.argument("stack", metavar="STACK.yaml", type=click.Path(path_type=Path))
@click.option("--trace", required=True, type=click.Path(path_type=Path), help="JSON lines, plain or gzip.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="TIER.OPTION=VALUE[,VALUE...]",
    help="Change an option; `bytes` is a tier's capacity, `blocks` one that holds so many. Several values, or several "
    "--set, make a grid.",
)
@click.option("--requests", type=click.IntRange(1), metavar="N", help="The first N requests of the trace.")
@click.option("--block-bytes", callback=size, metavar="SIZE", help="Bytes of a block of the trace. [default: 64KiB]")
@click.option("--block-tokens", type=click.IntRange(1), metavar="N", help="Tokens of a block, if not plain from it.")
@time_unit_option
@click.option("--gpu-blocks", type=click.IntRange(1), metavar="N", help="Size of the GPU pool. [default: as replay]")
@store_mode_option
@backlog_option
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="What `kvtier bench STACK.yaml --json FILE` measured, in place of assumed speeds.",
)
@prefill_option
@click.option(
    "--arrivals",
    type=click.Choice(["serial", "trace"]),
    default="serial",
    help="serial: each request comes when the one before has ended, as in a replay; trace: at the times of the trace.",
)
@click.option("--concurrency", type=click.IntRange(1, 256), default=1, help="Requests at once, with --arrivals trace.")
@json_file_option
@html_file_option
def simulate(
    stack: Path,
    json_file: Path | None,
    html_file: Path | None,
    settings: tuple[str, ...],
    calibration: Path | None,
    prefill_tokens_per_second: float,
    arrivals: Literal["serial", "trace"],
    **options: Any,
) -> None:
    """Run the control plane of STACK.yaml over a trace in virtual time, moving no bytes.

    Requests come one after another, as in `kvtier replay --concurrency 1`, whose hits these are, or at their own times.
    Tiers begin empty.
    """
    if arrivals == "serial" and options["concurrency"] > 1:
        raise ConfigError("goes with --arrivals trace only", "--concurrency")
    replay = ReplayOptions(stack=stack, **options)
    chosen = SimulateOptions(stack, replay, calibration, prefill_tokens_per_second, arrivals)
    prepared = Simulation(chosen, grid(settings))
    note_times(prepared.source)
    with progress(prepared.source.name, prepared.source.num_requests * len(prepared.variants)) as advance:
        variants = list(prepared.run(advance, watched=html_file is not None))
    found = SimulationReport(variants, prepared.settings())
    report(found, json_file, html_file)
