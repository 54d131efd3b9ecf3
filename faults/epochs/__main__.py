"""`python -m faults.epochs [--seeds 100000] [--jobs 2]`: simulate epochs of shared tiers; exit 1 if a promise broke."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import click

from .seed import run_range, run_seed

_AT_ONCE = 200


@click.command()
@click.option("--seeds", default=200, show_default=True, type=click.IntRange(min=1), help="How many seeds to run.")
@click.option("--start", default=0, show_default=True, type=click.IntRange(min=0), help="The first seed.")
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(1, 256), help="Processes to use.")
@click.option("--seed", "single", type=click.IntRange(min=0), help="Run this one and print all that happened.")
def main(seeds: int, start: int, jobs: int, single: int | None) -> None:
    """Hosts open, reset and end in any order, over stores that forget, come back from a dump, or are forged."""
    if single is not None:
        outcome = run_seed(single)
        click.echo("\n".join(outcome.trace))
        raise SystemExit(bool(outcome.violations))
    began, count, covered = time.perf_counter(), 0, Counter[str]()
    firsts = range(start, start + seeds, _AT_ONCE)
    lasts = [min(first + _AT_ONCE, start + seeds) for first in firsts]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for last, (broken, some) in zip(lasts, pool.map(run_range, firsts, lasts), strict=True):
            count += len(broken)
            covered += some
            for outcome in broken:
                click.echo(
                    f"seed {outcome.seed}: {outcome.violations[0]}; `python -m faults.epochs --seed {outcome.seed}`"
                )
            click.echo(f"{last - start} of {seeds} seeds, {count} broken", err=True)
    ended = {"seeds": seeds, "first_seed": start, "broken": count, "seconds": round(time.perf_counter() - began)}
    click.echo(json.dumps(ended | {"covered": dict(sorted(covered.items()))}))
    raise SystemExit(bool(count))


if __name__ == "__main__":
    main()
