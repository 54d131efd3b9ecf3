"""What a policy and the recorder add to an engine's step: `python -m benchmarks.step [--pairs N] [--json FILE]`.

The engine is that of `benchmarks.stack`, with 32 running requests. Three of them are open at once: over `lru`, over
`reuse` in both tiers, and over `lru` with the recorder on. They take the same steps in turns, a few at a time; who
comes first changes. A turn's figure is the CPU time of the engine's thread in calls of the stack, added up over its
steps, so arrivals and ends of requests count. The ratios are medians over pairs of turns.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import click

from benchmarks.options import JSON_FILE
from benchmarks.report import Report, median, paired_ratio, table
from benchmarks.stack import Engine, Spent, engine_over
from kvtier.temporary_folders import temporary_folder

BASE = "lru"
CASES = (BASE, "reuse", "recorder")
US = 1e6


@click.command()
@click.option("--pairs", default=21, show_default=True, help="Turns of each engine that are measured.")
@click.option("--steps", default=200, show_default=True, help="Steps in a turn.")
@click.option("--warm", default=600, show_default=True, help="Steps of each before the first.")
@click.option("--sleep-ms", default=1.0, show_default=True, help="How long a step of the engine takes without us.")
@click.option("--folder", default=None, help="Where the roots are made; a temporary folder by default.")
@click.option("--quick", is_flag=True, help="A toy size.")
@JSON_FILE
def main(
    pairs: int, steps: int, warm: int, sleep_ms: float, folder: str | None, quick: bool, json_file: Path | None
) -> None:
    """Measure and print."""
    report = Report("step", {"pairs": pairs, "steps": steps, "warm": warm, "sleep_ms": sleep_ms})
    report.head()
    if quick:
        pairs, steps, warm, sleep_ms = 3, 20, 20, 0.1
    with temporary_folder("kvtier-step-", folder) as scratch, ExitStack() as stack:
        engines = {case: stack.enter_context(_engine(Path(scratch), case)) for case in CASES}
        for engine in engines.values():
            _turn(engine, warm, sleep_ms / 1000)
        turns: dict[str, list[Spent]] = {case: [] for case in CASES}
        for number in range(pairs):
            first = number % len(CASES)
            for case in CASES[first:] + CASES[:first]:
                turns[case].append(_turn(engines[case], steps, sleep_ms / 1000))
        loaded = {case: engine.loaded for case, engine in engines.items()}
    report.results = [{**_figures(case, turns), "blocks_loaded": loaded[case]} for case in CASES]
    report.verified = True
    columns = ("what", "step_us", "median_step_us", "ratio", "ratio_of_medians", "blocks_loaded")
    table("CPU time of a step, microseconds", columns, ([row[name] for name in columns] for row in report.results))
    report.end(json_file)


def _engine(folder: Path, case: str) -> AbstractContextManager[Engine]:
    """A context with the engine of a case."""
    traces = folder / "traces" if case == "recorder" else None
    return engine_over(folder / case, 4096, "reuse" if case == "reuse" else "lru", traces)


def _turn(engine: Engine, steps: int, sleep_seconds: float) -> Spent:
    """What the stack's calls cost in so many steps."""
    engine.spent = Spent()
    for _ in range(steps):
        engine.step()
        time.sleep(sleep_seconds)
    return engine.spent


def _figures(case: str, turns: dict[str, list[Spent]]) -> dict[str, object]:
    means = {name: [sum(one.steps_cpu) / len(one.steps_cpu) for one in turns[name]] for name in (case, BASE)}
    middles = {name: [median(one.steps_cpu) for one in turns[name]] for name in (case, BASE)}
    return {
        "what": case,
        "step_us": median(means[case]) * US,
        "median_step_us": median(middles[case]) * US,
        "ratio": paired_ratio(means[case], means[BASE]),
        "ratio_of_medians": paired_ratio(middles[case], middles[BASE]),
    }


if __name__ == "__main__":
    main()
