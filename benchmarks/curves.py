"""What the curves of a running stack (`curves: true`) cost, and how far they are from the exact curve of a trace.

    python -m benchmarks.curves --trace FILE [--requests N] [--interval N ...] [BLOCKS ...]

Each size is that of a tier in blocks. The curve keeps one block in so many; by default it is tried with 1, with 10, and
with what a stack takes. Compared are the shares of whole blocks hit at half, one, two and four times the size. CPU
nanoseconds are those for a block of a prompt, chosen or not. Bytes are those of a full curve, the keys included.
"""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from time import process_time_ns

import click

from kvtier.control.tiers.size_curve import SIZES, SizeCurve
from kvtier.tier.contract import SlotSpace
from kvtier.tools.whatif.miss_ratio import Curve, lru_curve
from kvtier.traces.read import read_trace
from kvtier.traces.requests import KeyChain, RequestSource, group_keys
from kvtier.types.keys import make_key

BLOCKS = (1_000, 4_000, 16_000, 64_000)


def take_all(source: RequestSource, curves: list[SizeCurve]) -> list[int]:
    """Give each curve the whole blocks of all prompts. Returns the CPU nanoseconds of each."""
    chain, spent = KeyChain(), [0] * len(curves)
    for request in source.requests():
        keys = group_keys(chain.digests(request)[: request.prompt_tokens // source.block_tokens], 0)
        for index, curve in enumerate(curves):
            start = process_time_ns()
            curve.use(keys)
            spent[index] += process_time_ns() - start
    return spent


def errors_of(exact: Curve, curve: SizeCurve, blocks: int) -> list[float]:
    """Share of the whole blocks hit at each size, less the exact one."""
    return [
        (curve.used - missed - exact.hits(int(size * blocks))) / curve.used for size, missed in curve.missed.items()
    ]


def allocated_bytes(blocks: int, interval: int) -> int:
    """Bytes of a full curve."""
    tracemalloc.start()
    curve = SizeCurve(SlotSpace(blocks, (1,), (1,)), interval)
    for number in range(int(1.1 * SIZES[-1] * blocks)):
        curve.use([make_key(number.to_bytes(16, "big"), 0)])
    allocated = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return allocated


@click.command(help=__doc__)
@click.option("--trace", required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--requests", type=click.IntRange(min=1))
@click.option("--interval", "intervals", multiple=True, type=click.IntRange(min=1))
@click.argument("blocks", nargs=-1, type=click.IntRange(min=1))
def main(trace: Path, requests: int | None, intervals: tuple[int, ...], blocks: tuple[int, ...]) -> None:
    """Print one line for each size and interval."""
    source = read_trace(trace, requests)
    tried = [(size, interval) for size in blocks or BLOCKS for interval in intervals or (1, 10, None)]
    curves = [SizeCurve(SlotSpace(size, (1,), (1,)), interval) for size, interval in tried]
    spent, exact = take_all(source, curves), lru_curve(source)
    click.echo(f"{source.name}: {curves[0].used} whole blocks; errors at {SIZES} times the size")
    for (size, interval), curve, nanoseconds in zip(tried, curves, spent, strict=True):
        errors = errors_of(exact, curve, size)
        mean, worst = sum(map(abs, errors)) / len(errors), max(map(abs, errors))
        each = " ".join(f"{error:+.4f}" for error in errors)
        by = f"1/{curve.interval}{'' if interval else ' (default)'}"
        cost = f"{nanoseconds / curve.used:.0f} ns {allocated_bytes(size, curve.interval)} B"
        click.echo(f"{size:7} {by:15} mean {mean:.4f} worst {worst:.4f} [{each}] {cost}")


if __name__ == "__main__":
    main()
