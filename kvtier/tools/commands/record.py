"""`kvtier record`: what a trace holds, and an anonymised copy of one."""

from pathlib import Path

import click

from kvtier.cli.progress import progress
from kvtier.errors import ConfigError
from kvtier.tools.commands.run_report import json_file_option, report
from kvtier.tools.commands.trace_times import note_times, time_unit_option
from kvtier.tools.traces.convert import convert
from kvtier.tools.traces.summary import summarize
from kvtier.traces.read import TimeUnit, read_trace


@click.command(short_help="Show what a trace holds, or write it anonymised.")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--requests", type=click.IntRange(1), metavar="N", help="Only the first N requests.")
@click.option(
    "--block-tokens",
    type=click.IntRange(1),
    metavar="N",
    help="Tokens of a block, if neither the lines say them nor they follow from the lengths.",
)
@time_unit_option
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE.jsonl.gz",
    help="Write the requests here, gzip'ed, with salted hashes in place of their ids.",
)
@click.option(
    "--salt-file",
    type=click.Path(path_type=Path),
    help="Secret for the hashes of --out, made if absent. A random one when left out.",
)
@json_file_option
def record(
    trace: Path,
    requests: int | None,
    block_tokens: int | None,
    time_unit: TimeUnit | None,
    out: Path | None,
    salt_file: Path | None,
    json_file: Path | None,
) -> None:
    """Show how many requests, tokens and blocks TRACE has, and how much of it a cache could find again.

    A running stack writes traces by itself: see `record` in its stack file.
    """
    if salt_file is not None and out is None:
        raise ConfigError("goes with --out only", "--salt-file")
    source = read_trace(trace, requests, block_tokens, time_unit)
    note_times(source)
    if out is not None:
        with progress(f"writing {out.name}", source.num_requests) as advance:
            convert(source, out, salt_file, advance)
    with progress(source.name, source.num_requests) as advance:
        found = summarize(source, advance)
    report(found, json_file)
