"""`kvtier advise`: what more memory or disk would bring, by a trace."""

from pathlib import Path

import click

from kvtier.cli.terminal import progress
from kvtier.config.layout import read_layout
from kvtier.stack.learned.installed_policies import find_policy
from kvtier.tools.commands.run_report import (
    html_file_option,
    json_file_option,
    layout_option,
    note_times,
    prefill_option,
    report,
    size,
    time_unit_option,
)
from kvtier.tools.whatif.advise import (
    PURCHASES,
    Advice,
    Savings,
    Sizes,
    block_bytes_of,
    costs_of,
    read_prices,
    services_of,
)
from kvtier.tools.whatif.miss_ratio import lru_curve, shadow_rates, shadow_sizes
from kvtier.traces.read import TimeUnit, read_trace


@click.command(short_help="Say what more memory or disk would bring to a trace.")
@click.option("--trace", required=True, type=click.Path(path_type=Path), help="JSON lines, plain or gzip.")
@click.option("--requests", type=click.IntRange(1), metavar="N", help="The first N requests of the trace.")
@click.option("--block-tokens", type=click.IntRange(1), metavar="N", help="Tokens of a block, if not plain from it.")
@time_unit_option
@layout_option
@click.option("--cpu", "cpu_bytes", callback=size, metavar="SIZE", help="The CPU tier there is. [default: none]")
@click.option("--disk", "disk_bytes", callback=size, metavar="SIZE", help="The disk there is. [default: none]")
@click.option("--budget", type=click.FloatRange(min=0, min_open=True), default=1000.0, help="The sum to be spent next.")
@click.option("--prices", type=click.Path(path_type=Path), metavar="FILE", help="YAML with cpu_gib and disk_gib.")
@click.option("--price-cpu", type=click.FloatRange(min=0, min_open=True), help="Price of a GiB of CPU memory.")
@click.option("--price-disk", type=click.FloatRange(min=0, min_open=True), help="Price of a GiB of disk.")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="POLICY",
    help="Run this policy on metadata in tiers of half, one, two and four times the CPU tier, or the knee.",
)
@click.option(
    "--calibration", type=click.Path(path_type=Path), metavar="FILE", help="What `kvtier bench --json` wrote."
)
@prefill_option
@json_file_option
@html_file_option
def advise(
    trace: Path,
    requests: int | None,
    block_tokens: int | None,
    time_unit: TimeUnit | None,
    layout: str,
    cpu_bytes: int | None,
    disk_bytes: int | None,
    budget: float,
    prices: Path | None,
    price_cpu: float | None,
    price_disk: float | None,
    policies: tuple[str, ...],
    calibration: Path | None,
    prefill_tokens_per_second: float,
    json_file: Path | None,
    html_file: Path | None,
) -> None:
    """Say what a trace would hit at every size, what that saves, and where the next money saves most.

    The curve is LRU's, exact; --policy runs others at four sizes. A hit is a whole block of the longest prefix that one
    tier of the size holds.
    """
    kinds = {name: find_policy(name) for name in policies}
    listed, source = read_prices(prices, price_cpu, price_disk), read_trace(trace, requests, block_tokens, time_unit)
    note_times(source)
    block_bytes = block_bytes_of(read_layout(layout).layout(), source.block_tokens)
    services = services_of(block_bytes, calibration)
    have = Sizes(cpu_bytes or 0, disk_bytes or 0)
    with progress(source.name, source.num_requests * (1 + len(policies))) as advance:
        curve = lru_curve(source, advance)
        sizes = shadow_sizes(int(have.cpu_bytes) // block_bytes or curve.knee())
        shadows = {
            name: dict(zip(sizes, shadow_rates(source, kind, sizes, advance), strict=True))
            for name, kind in kinds.items()
        }
    worth = Savings(curve, costs_of(source.block_tokens, block_bytes, prefill_tokens_per_second, services))
    settings: dict[str, object] = {
        "source": source.name,
        "source_seconds": source.seconds,
        "block_tokens": source.block_tokens,
        "block_bytes": block_bytes,
        "layout": layout,
        "prefill_tokens_per_second": prefill_tokens_per_second,
        "cpu_bytes": have.cpu_bytes,
        "disk_bytes": have.disk_bytes,
        "prices": listed and listed.model_dump(),
    }
    bought = worth.purchases(have, listed, budget, PURCHASES) if listed else []
    report(Advice(worth, have, bought, settings, shadows, services), json_file, html_file)
