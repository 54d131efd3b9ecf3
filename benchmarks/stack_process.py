"""A stack in a process of its own, and what it does to its engine: `python -m benchmarks.stack_process`.

Figures are medians over turns. `--before CHECKOUT`, with the environment `.venv` in it, is a commit that still had
stacks in the engine's own process: an engine over such a one has its turns between. Each engine has a process of its
own, which does nothing while the other has its turn; who begins changes. Ratios are medians of the ratio of each pair.

`steps`: the engine of `benchmarks.stack` with 32 running requests. CPU time of its thread in the calls of the stack,
the time from a request's arrival to its loaded blocks, both also beside a thread of the engine's process that never
stops working in Python; CPU time of the engine's process and the stack process together, also of an engine that takes
no step; resident memory of the stack process but for shared memory.
`loads`: an engine's loads of 16 blocks from the disk, which alone has them. One by one, beside a thread that is busy in
Python: the share of the speed alone, by the clock of the engine's thread, which itself waits for its interpreter then,
and by the seconds in which the disk tier had a load in flight. Many at once: how late a thread of the engine's process
is that sleeps for 2 ms.
`engines`: requests with hits, from the disk and then from rows, alone and beside another engine's process that stores
as fast as it can: at the same stack process, or, before, with a stack of its own on the same disk.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
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
BEFORE, PROCESS = "before", "process"
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
"""Aims: of the ratio process / before, or of the figure of the process."""


@dataclass(frozen=True, slots=True)
class Course:
    """Sizes of a run, the process of each engine, and where roots and sockets are made."""

    engines: dict[str, Peer]
    before: Path | None
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
        """A row for each figure that turns of an engine have."""
        names = tuple(self.engines)
        found: dict[str, dict[str, dict[int, float]]] = {}
        for number in range(self.pairs):
            click.echo(f"pair {number + 1} of {self.pairs}", err=True)
            for engine in names[:: 1 if number % 2 else -1]:
                for name, value in turn(engine).items():
                    found.setdefault(name, {}).setdefault(engine, {})[number] = value
        return [self._row(name, series) for name, series in found.items()]

    def _row(self, name: str, series: Mapping[str, Mapping[int, float]]) -> dict[str, Any]:
        medians = {engine: median(values.values()) for engine, values in series.items()}
        ours, theirs = series.get(PROCESS, {}), series.get(BEFORE, {})
        pairs = sorted(ours.keys() & theirs.keys())
        ratio = paired_ratio([ours[pair] for pair in pairs], [theirs[pair] for pair in pairs])
        return {"what": name, **medians, "ratio": ratio, "aim": AIMS.get(name, ""), "all": series}


@contextmanager
def engines_of(before: Path | None) -> Iterator[dict[str, Peer]]:
    """An engine's process by its name; one of a checkout of before if it is given."""
    with ExitStack() as stack:
        engines = {PROCESS: stack.enter_context(Peer(sys.executable, MODULE))}
        if before is not None:
            engines[BEFORE] = stack.enter_context(Peer(str(before / ".venv/bin/python"), MODULE, before))
        yield engines


def driver_of(name: str) -> dict[str, str]:
    """What the engine of a checkout of before is told of its driver."""
    return {"driver": "embedded"} if name == BEFORE else {}


def steps(course: Course) -> list[dict[str, Any]]:
    """An engine's steps, and an engine that takes none."""
    for name, engine in course.engines.items():
        given = course.place(name) | {"warm": course.warm, "sleep_seconds": course.sleep_seconds}
        engine.ask("open_steps", **driver_of(name), **given)

    def turn(name: str) -> dict[str, float]:
        ask, count = course.engines[name].ask, course.steps
        alone, busy = ask("steps", count=count, busy=False), ask("steps", count=count, busy=True)
        return alone | busy | ask("idle", seconds=course.turn_seconds)

    return course.in_turns(turn)


def loads(course: Course, block_bytes: int) -> list[dict[str, Any]]:
    """An engine's loads from the disk, of one block size."""
    blocks = max(1, course.pass_bytes // block_bytes // JOB_BLOCKS) * JOB_BLOCKS
    setup = {"block_bytes": block_bytes, "blocks": blocks}
    for name, engine in course.engines.items():
        given = course.place(name) | {"capacity": 4, "setup": setup, "stored": blocks}
        engine.ask("open_tiers", **driver_of(name), **given)

    def turn(name: str) -> dict[str, float]:
        found = course.engines[name].ask("loads")
        if block_bytes == USUAL_BLOCK_BYTES:
            found |= course.engines[name].ask("naps", seconds=course.turn_seconds)
        return found

    return course.in_turns(turn)


def two_engines(course: Course) -> list[dict[str, Any]]:
    """Hits of an engine, alone and beside one that stores."""
    setup = {"block_bytes": USUAL_BLOCK_BYTES, "blocks": max(256, course.pass_bytes // USUAL_BLOCK_BYTES)}
    given = {"capacity": 16, "setup": setup}
    with engines_of(course.before) as storing, ThreadPoolExecutor(1) as pool:
        for name, engine in course.engines.items():
            place, other = course.place(name), course.place(name if name == PROCESS else f"{name}-stores")
            stored, driver = PROMPTS * JOB_BLOCKS, driver_of(name)
            engine.ask("open_tiers", engine_id="hits", stored=stored, **driver, **place, **given)
            storing[name].ask("open_tiers", engine_id="stores", stored=0, **driver, **other, **given)

        def turn(name: str) -> dict[str, float]:
            hits = partial(course.engines[name].ask, "hits", count=course.hits, a_second=course.a_second)
            alone = hits()
            storing[name].ask("stores", seconds=0.2)
            beside, speed = pool.submit(hits), []
            while not beside.done():
                speed.append(storing[name].ask("stores", seconds=1.0)["gib_s"])
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
@click.option("--pairs", default=9, show_default=True, help="Turns of each engine.")
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="Only these; all by default.")
@click.option("--steps", default=400, show_default=True, help="Steps in a turn.")
@click.option("--sizes", default="64KiB,1MiB", show_default=True, help="Block sizes of loads.")
@click.option("--bytes", "total", default="256MiB", show_default=True, help="Payload of a pass of loads.")
@click.option("--turn-seconds", default=2.0, show_default=True, help="Length of an idle turn, and of naps.")
@click.option("--hits", default=100, show_default=True, help="Requests of a turn, ten a second.")
@click.option("--before", type=click.Path(exists=True, path_type=Path), help="A checkout that is compared, see above.")
@click.option("--folder", default=None, help="Where the roots are made; a temporary folder by default.")
@QUICK
@JSON_FILE
def main(
    parts: tuple[str, ...], before: Path | None, folder: str | None, quick: bool, json_file: Path | None, **given: Any
) -> None:
    """Measure."""
    report = Report("stack_process", {"parts": parts or PARTS, "before": str(before or ""), **given})
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
    columns = ("what", BEFORE, PROCESS, "ratio", "aim") if before else ("what", PROCESS, "aim")
    with engines_of(before) as engines:
        for part, work in [(name, work) for name in parts or PARTS for work in works[name]]:
            with temporary_folder("kvtier-process-", folder) as roots, temporary_folder("kvtier-sockets-") as sockets:
                rows = work(Course(engines, before, roots, sockets, **counts))
                for engine in engines.values():
                    engine.ask("close")
            table(part, columns, [[row.get(column) for column in columns] for row in rows])
            report.results += rows
            report.write(json_file)
    report.verified = True
    report.end(json_file)


if __name__ == "__main__":
    main()
