"""A stack in a process of its own beside one in the engine's process, in turns: `python -m benchmarks.stack_process`.

Each driver's engine has a process of its own, which does nothing while the other has its turn; who begins changes.
Figures are medians over the pairs of turns, ratios medians of the ratio of each pair.

`steps`: the engine of `benchmarks.stack` with 32 running requests. CPU time of its thread in the calls of the stack,
the time from a request's arrival to its loaded blocks, both also beside a thread of the engine's process that never
stops working in Python; CPU time of the engine's process and the stack process together, also of an engine that takes
no step; resident memory of the stack process but for shared memory.
`loads`: an engine's loads of 16 blocks from the disk, which alone has them. One by one, beside a thread that is busy in
Python: the share of the speed alone, by the clock of the engine's thread, which itself waits for its interpreter then,
and by the seconds in which the disk tier had a load in flight. Many at once: how late a thread of the engine's process
is that sleeps for 2 ms.
`engines`: requests with hits, from the disk and then from rows, alone and beside another engine's process that stores
as fast as it can: at the same stack process, or with a stack of its own on the same disk.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.beside import JOB_BLOCKS
from benchmarks.options import JSON_FILE, QUICK
from benchmarks.peer import Peer
from benchmarks.report import Report, median, paired_ratio, percentile, table
from benchmarks.stack_process_engine import PROMPTS
from kvtier.cli.temporary_folders import temporary_folder
from kvtier.options import parse_size

MODULE = "benchmarks.stack_process_engine"
EMBEDDED, PROCESS = DRIVERS = ("embedded", "process")
PARTS = ("steps", "loads", "engines")
USUAL_BLOCK_BYTES = 64 << 10
BUSY = "beside a busy thread"
AIMS = {
    "CPU of a step, us": "ratio <= 0.40",
    "step p99, us": "ratio <= 1.10",
    "arrival to loaded p50, ms": "ratio <= 1.05",
    f"arrival to loaded p50, ms, {BUSY}": "ratio <= 0.60",
    "CPU of all processes a step, us": "ratio <= 1.15",
    "CPU of an idle second, ms": "process <= 0.33",
    "memory beyond rows, MiB, after steps": "process <= 120",
    f"64 KiB one by one, {BUSY}, share of the disk tier": "process >= 0.85",
    f"1024 KiB one by one, {BUSY}, share of the disk tier": "process >= 0.90",
    "nap late p99, ms, beside 64 KiB loads": "ratio <= 0.10",
    "hit in rows p99, beside an engine that stores / alone": "process <= 2.0",
    "hit on disk p99, beside an engine that stores / alone": "process <= 2.0",
}
"""Aims: of the ratio process / embedded, or of the figure of the process."""


@dataclass(frozen=True, slots=True)
class Course:
    """Sizes of a run, the engine's process of each driver, and where roots and sockets are made."""

    engines: dict[str, Peer]
    roots: str
    sockets: str
    pairs: int
    steps: int
    warm: int
    sleep_seconds: float
    pass_bytes: int
    turn_seconds: float
    hits: int
    a_second: float

    def place(self, name: str) -> dict[str, str]:
        """The folders of a stack. Engines with the same ones and `process` share it."""
        return {"folder": f"{self.roots}/{name}", "runtime": f"{self.sockets}/{name}"}

    def in_turns(self, turn: Callable[[str], Mapping[str, float]]) -> list[dict[str, Any]]:
        """A row for each figure that turns of a driver have."""
        found: dict[str, dict[str, dict[int, float]]] = {}
        for number in range(self.pairs):
            click.echo(f"pair {number + 1} of {self.pairs}", err=True)
            for driver in DRIVERS[:: 1 if number % 2 else -1]:
                for name, value in turn(driver).items():
                    found.setdefault(name, {}).setdefault(driver, {})[number] = value
        return [self._row(name, series) for name, series in found.items()]

    def _row(self, name: str, series: Mapping[str, Mapping[int, float]]) -> dict[str, Any]:
        medians = {driver: median(values.values()) for driver, values in series.items()}
        ours, theirs = series.get(PROCESS, {}), series.get(EMBEDDED, {})
        pairs = sorted(ours.keys() & theirs.keys())
        ratio = paired_ratio([ours[pair] for pair in pairs], [theirs[pair] for pair in pairs])
        return {"what": name, **medians, "ratio": ratio, "aim": AIMS.get(name, ""), "all": series}


@contextmanager
def engines_of(names: Iterable[str]) -> Iterator[dict[str, Peer]]:
    """An engine's process by each name."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(Peer(sys.executable, MODULE)) for name in names}


def steps(course: Course) -> list[dict[str, Any]]:
    """An engine's steps, and an engine that takes none."""
    for driver, engine in course.engines.items():
        given = course.place(driver) | {"warm": course.warm, "sleep_seconds": course.sleep_seconds}
        engine.ask("open_steps", driver=driver, **given)

    def turn(driver: str) -> dict[str, float]:
        ask, count = course.engines[driver].ask, course.steps
        alone, busy = ask("steps", count=count, busy=False), ask("steps", count=count, busy=True)
        return alone | busy | ask("idle", seconds=course.turn_seconds)

    return course.in_turns(turn)


def loads(course: Course, block_bytes: int) -> list[dict[str, Any]]:
    """An engine's loads from the disk, of one block size."""
    blocks = max(1, course.pass_bytes // block_bytes // JOB_BLOCKS) * JOB_BLOCKS
    setup = {"block_bytes": block_bytes, "blocks": blocks}
    for driver, engine in course.engines.items():
        given = course.place(driver) | {"capacity": 4, "setup": setup, "stored": blocks}
        engine.ask("open_tiers", driver=driver, **given)

    def turn(driver: str) -> dict[str, float]:
        found = course.engines[driver].ask("loads")
        if block_bytes == USUAL_BLOCK_BYTES:
            found |= course.engines[driver].ask("naps", seconds=course.turn_seconds)
        return found

    return course.in_turns(turn)


def two_engines(course: Course) -> list[dict[str, Any]]:
    """Hits of an engine, alone and beside one that stores."""
    setup = {"block_bytes": USUAL_BLOCK_BYTES, "blocks": max(256, course.pass_bytes // USUAL_BLOCK_BYTES)}
    given = {"capacity": 16, "setup": setup}
    with engines_of(DRIVERS) as storing, ThreadPoolExecutor(1) as pool:
        for driver, engine in course.engines.items():
            place, other = course.place(driver), course.place(driver if driver == PROCESS else f"{driver}-stores")
            stored = PROMPTS * JOB_BLOCKS
            engine.ask("open_tiers", driver=driver, engine_id="hits", stored=stored, **place, **given)
            storing[driver].ask("open_tiers", driver=driver, engine_id="stores", stored=0, **other, **given)

        def turn(driver: str) -> dict[str, float]:
            hits = partial(course.engines[driver].ask, "hits", count=course.hits, a_second=course.a_second)
            alone = hits()
            storing[driver].ask("stores", seconds=0.2)
            beside, speed = pool.submit(hits), []
            while not beside.done():
                speed.append(storing[driver].ask("stores", seconds=1.0)["gib_s"])
            return _hit_figures(alone, beside.result()) | {"stored meanwhile, GiB/s": median(speed)}

        return course.in_turns(turn)


def _hit_figures(alone: dict[str, list[float]], beside: dict[str, list[float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    storing = "beside an engine that stores"
    for where, name in (("rows", "in rows"), ("disk", "on disk")):
        if not alone[where] or not beside[where]:
            continue
        for rank in (50, 99):
            both = [percentile(each[where], rank) * 1e3 for each in (alone, beside)]
            label = f"hit {name} p{rank}"
            found |= {f"{label}, ms": both[0], f"{label}, ms, {storing}": both[1]}
            found[f"{label}, {storing} / alone"] = both[1] / both[0]
    for what, name in (("again", "blocks of row hits that came from the disk"), ("lost", "blocks of hits lost")):
        found |= {name: alone[what][0], f"{name}, {storing}": beside[what][0]}
    return found


@click.command()
@click.option("--pairs", default=9, show_default=True, help="Turns of each driver.")
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="Only these; all by default.")
@click.option("--steps", default=400, show_default=True, help="Steps in a turn.")
@click.option("--sizes", default="64KiB,1MiB", show_default=True, help="Block sizes of loads.")
@click.option("--bytes", "total", default="256MiB", show_default=True, help="Payload of a pass of loads.")
@click.option("--turn-seconds", default=2.0, show_default=True, help="Length of an idle turn, and of naps.")
@click.option("--hits", default=100, show_default=True, help="Requests of a turn, ten a second.")
@click.option("--folder", default=None, help="Where the roots are made; a temporary folder by default.")
@QUICK
@JSON_FILE
def main(parts: tuple[str, ...], folder: str | None, quick: bool, json_file: Path | None, **given: Any) -> None:
    """Measure both drivers in turns."""
    report = Report("stack_process", {"parts": parts or PARTS, **given})
    report.notes.append("the CPU time of stack processes counts as that of others in `busy`")
    report.head()
    sizes, total = [parse_size(size) for size in given.pop("sizes").split(",")], parse_size(given.pop("total"))
    counts = given | {"pass_bytes": total, "warm": 600, "sleep_seconds": 0.001, "a_second": 10.0}
    if quick:
        sizes = [64 << 10]
        counts = {"pairs": 1, "steps": 150, "warm": 100, "sleep_seconds": 0.0005}
        counts |= {"pass_bytes": 4 << 20, "turn_seconds": 0.2, "hits": 4, "a_second": 100.0}
    works: dict[str, list[Callable[[Course], list[dict[str, Any]]]]]
    works = {"steps": [steps], "loads": [partial(loads, block_bytes=size) for size in sizes], "engines": [two_engines]}
    columns = ("what", *DRIVERS, "ratio", "aim")
    with engines_of(DRIVERS) as engines:
        for part, work in [(name, work) for name in parts or PARTS for work in works[name]]:
            with temporary_folder("kvtier-process-", folder) as roots, temporary_folder("kvtier-sockets-") as sockets:
                rows = work(Course(engines, roots, sockets, **counts))
                for engine in engines.values():
                    engine.ask("close")
            table(part, columns, [[row.get(column) for column in columns] for row in rows])
            report.results += rows
            report.write(json_file)
    report.verified = True
    report.end(json_file)


if __name__ == "__main__":
    main()
