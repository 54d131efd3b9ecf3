"""`kvtier replay`: drive a stack with a workload or a trace, check every byte, and report the work of each tier."""

from pathlib import Path
from typing import Any, get_args

import click

from kvtier.cli.progress import progress
from kvtier.cli.run_report import json_file_option, report, run_to_end, size
from kvtier.options import PolicyName
from kvtier.replay.run import Replay
from kvtier.replay.setup import ReplayOptions


@click.command(short_help="Serve requests over a stack, and check every byte.")
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
    "--block-tokens",
    type=click.IntRange(1),
    metavar="N",
    help="Tokens of a trace's block, if they do not follow from its lengths.",
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@click.option("--seed", type=int, default=0, help="Seed of a generated workload.")
@json_file_option
@click.option("--gpu-blocks", type=click.IntRange(1), metavar="N", help="Size of the GPU pool of each group.")
@click.option("--cpu-blocks", type=click.IntRange(1), metavar="N", help="Rows of the CPU tier, in place of its budget.")
@click.option("--fs-blocks", type=click.IntRange(1), metavar="N", help="Slots of the fs tier, at least.")
@click.option(
    "--fs-root", type=click.Path(path_type=Path), help="Folder of the fs tier; kept, so a second run hits it."
)
@click.option("--policy", type=click.Choice(get_args(PolicyName)), help="Eviction policy of every tier.")
@click.option("--store-mode", type=click.Choice(["eager", "lazy"]), default="eager")
@click.option("--concurrency", type=click.IntRange(1, 256), default=1, help="Requests at once.")
@click.option(
    "--backlog",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Blocks that may be queued or in flight to lower tiers when the next request begins.",
)
def replay(json_file: Path | None, **options: Any) -> None:
    """Serve requests over the tiers of STACK.yaml, moving and checking real bytes.

    Without a stack file: a GPU pool, a CPU tier and a filesystem tier in a temporary folder. Exits with 1 if a single
    byte was wrong, with 2 and one line for each error if the stack, the trace or an option is.
    """
    prepared = Replay(ReplayOptions(**options))
    with progress(prepared.source.name, prepared.source.num_requests) as advance:
        found = run_to_end(prepared.run(advance))
    report(found, json_file)
