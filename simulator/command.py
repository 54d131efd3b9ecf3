"""`python -m simulator --seeds N --start K`: run the stack on simulated disks, seed by seed.

A seed that breaks a promise is printed with what was broken and the command that replays it. The exit status is 1 if
any did. See docs/simulator.md.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat

import click

from simulator.seed_run import SeedOutcome, Simulator
from simulator.service.world import ServiceSimulator

LAYOUTS = ("slab", "files", "service")
RANGE_SEEDS = 20
"""How many seeds a process runs before it reports."""


@dataclass(frozen=True, slots=True)
class SeedRange:
    """What came of consecutive seeds: the `broken` ones, and what all of them went through."""

    seeds: int
    broken: tuple[SeedOutcome, ...]
    covered: Counter[str]
    cpu_seconds: float


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--seeds", default=200, show_default=True, type=click.IntRange(min=1), help="How many seeds to run.")
@click.option("--start", default=0, show_default=True, type=click.IntRange(min=0), help="The first seed.")
@click.option(
    "--layout",
    default="slab",
    show_default=True,
    type=click.Choice(LAYOUTS),
    help="slab: tier fs; files: tier shared_fs; service: engines at a stack process.",
)
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(1, 256), help="Processes to use.")
@click.option("--seed", "single", type=click.IntRange(min=0), help="Run this one seed.")
@click.option("--trace", "with_trace", is_flag=True, help="With --seed: print all that happened, with virtual times.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each broken seed, and one at the end.")
def simulate(
    seeds: int, start: int, layout: str, jobs: int, single: int | None, with_trace: bool, as_json: bool
) -> None:
    """Run seeded simulations of the whole stack over simulated disks that fail, misreport and crash."""
    if single is not None:
        sys.exit(_replay(single, layout, with_trace, as_json))
    began = time.perf_counter()
    done, broken, cpu_seconds, covered = 0, 0, 0.0, Counter[str]()
    for part in run_ranges(range(start, start + seeds), layout, jobs):
        for outcome in part.broken:
            click.echo(_words(outcome, layout, as_json))
        done += part.seeds
        broken += len(part.broken)
        cpu_seconds += part.cpu_seconds
        covered.update(part.covered)
        if sys.stderr.isatty():
            click.echo(f"\r{done} of {seeds} seeds, {broken} broken", err=True, nl=done == seeds)
    total = {
        "seeds": done,
        "first_seed": start,
        "broken": broken,
        "seconds": round(time.perf_counter() - began, 3),
        "cpu_ms_per_seed": round(1000 * cpu_seconds / done, 2),
        "covered": dict(sorted(covered.items())),
    }
    click.echo(json.dumps(total) if as_json else _summary(total, covered))
    sys.exit(1 if broken else 0)


def run_ranges(seeds: range, layout: str, jobs: int) -> Iterator[SeedRange]:
    """Run seeds over one layout in this process, or in `jobs` others; parts come in order of seeds."""
    parts = [seeds[at : at + RANGE_SEEDS] for at in range(0, len(seeds), RANGE_SEEDS)]
    if jobs == 1:
        yield from map(run_range, parts, repeat(layout))
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_freeze_heap) as pool:
        yield from pool.map(run_range, parts, repeat(layout))


def make_simulator(layout: str) -> Simulator | ServiceSimulator:
    """The simulator of a layout."""
    return ServiceSimulator() if layout == "service" else Simulator(layout=layout)


def run_range(seeds: range, layout: str) -> SeedRange:
    """Run seeds in this process."""
    simulator = make_simulator(layout)
    began = time.process_time()
    broken, covered = [], Counter[str]()
    for seed in seeds:
        outcome = simulator.run(seed)
        covered.update(outcome.covered)
        if outcome.violations:
            broken.append(outcome)
    return SeedRange(len(seeds), tuple(broken), covered, time.process_time() - began)


def _freeze_heap() -> None:
    """A process that only runs seeds: what is loaded now stays, so the collector need not look at it again."""
    gc.collect()
    gc.freeze()


def _replay(seed: int, layout: str, with_trace: bool, as_json: bool) -> int:
    outcome = make_simulator(layout).run(seed)
    if with_trace:
        click.echo("\n".join(outcome.trace))
    click.echo(_words(outcome, layout, as_json))
    return 1 if outcome.violations else 0


def _words(outcome: SeedOutcome, layout: str, as_json: bool) -> str:
    """A seed's outcome, for people or for scripts."""
    other = "" if layout == LAYOUTS[0] else f" --layout {layout}"
    replay = f"python -m simulator{other} --seed {outcome.seed} --trace"
    if as_json:
        fields = {"seed": outcome.seed, "violations": outcome.violations, "trace": outcome.digest, "replay": replay}
        return json.dumps(fields)
    lines = [f"seed {outcome.seed}: trace {outcome.digest}, {len(outcome.violations)} violation(s)"]
    lines += [f"  {violation}" for violation in outcome.violations]
    return "\n".join([*lines, f"  replay: {replay}"])


def _summary(total: dict[str, object], covered: Counter[str]) -> str:
    """What was done, for people: a run that attacked nothing shows here."""
    width = max(map(len, covered), default=0)
    lines = [f"  {name:<{width}}  {count:>12,}" for name, count in sorted(covered.items())]
    head = (
        f"{total['seeds']} seeds from {total['first_seed']}: {total['broken']} broken; "
        f"{total['seconds']} s, {total['cpu_ms_per_seed']} ms of CPU a seed; covered:"
    )
    return "\n".join([head, *lines])
