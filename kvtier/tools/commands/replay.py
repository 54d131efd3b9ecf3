"""`kvtier replay`: drive a stack with a workload or a trace, check every byte, and report the work of each tier."""

import time
from pathlib import Path
from typing import Any

import click

from kvtier.cli.terminal import progress
from kvtier.tools.commands.run_report import (
    backlog_option,
    html_file_option,
    json_file_option,
    note_times,
    report,
    run_to_end,
    size,
    store_mode_option,
    time_unit_option,
)
from kvtier.tools.replay.run import Replay
from kvtier.tools.replay.setup import ReplayOptions
from kvtier.tools.replay.timeline import Timeline
from kvtier.tools.whatif.run_page import WatchedReplay


@click.command(short_help="Serve requests over a stack, and check every byte.")
@click.argument("stack", required=False, metavar="[STACK.yaml]", type=click.Path(path_type=Path))
@click.option("--service", metavar="SOCKET", help="Serve over the stack of this `kvtier serve` instead.")
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
@time_unit_option
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@click.option("--seed", type=int, default=0, help="Seed of a generated workload.")
@json_file_option
@html_file_option
@click.option("--gpu-blocks", type=click.IntRange(1), metavar="N", help="Size of the GPU pool of each group.")
@click.option("--cpu-blocks", type=click.IntRange(1), metavar="N", help="Rows of the CPU tier, in place of its budget.")
@click.option("--fs-blocks", type=click.IntRange(1), metavar="N", help="Slots of the fs tier, at least.")
@click.option(
    "--fs-root", type=click.Path(path_type=Path), help="Folder of the fs tier; kept, so a second run hits it."
)
@click.option(
    "--server",
    type=click.Choice(["embedded"]),
    help="Try STACK.yaml out on this machine: a server of its own for each tier on one, disks in a temporary folder.",
)
@click.option("--server-blocks", type=click.IntRange(1), metavar="N", help="Room of an embedded server, about.")
@click.option("--policy", metavar="NAME", help="Eviction policy of every tier.")
@store_mode_option
@click.option("--concurrency", type=click.IntRange(1, 256), default=1, help="Requests at once.")
@backlog_option
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Serve metrics on http://127.0.0.1:PORT/metrics meanwhile.",
)
def replay(json_file: Path | None, html_file: Path | None, **options: Any) -> None:
    """Serve requests over the tiers of STACK.yaml, moving and checking real bytes.

    Without a stack file: a GPU pool, a CPU tier and a filesystem tier in a temporary folder. Those are also the sizes
    of the tiers with `--server embedded`, which needs `pip install 'kvtier[embedded]'`. Exits with 1 if a single
    byte was wrong, with 2 and one line for each error if the stack, the trace or an option is.
    """
    prepared = Replay(ReplayOptions(**options))
    note_times(prepared.source)
    with progress(prepared.source.name, prepared.source.num_requests) as advance:
        timeline = Timeline(time.monotonic, "real") if html_file else None
        found = run_to_end(prepared.run(advance, timeline))
    report(found if timeline is None else WatchedReplay(found, timeline), json_file, html_file)
