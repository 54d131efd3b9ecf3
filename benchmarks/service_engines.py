"""Engines at a `kvtier serve`: how soon a new one has its first hit, and the round trips of eight.

    python -m benchmarks.service_engines [--part start] [--part steps] [--folder DIR] [--json FILE] [--quick]

`start`: the rows of a service hold blocks. A new engine's process, once its modules are loaded (those of tiers too),
connects, and loads 16 blocks of 64 KiB that are in rows. Beside it, in turns, a bare process says hello as a worker
does, maps all rows and reads as many bytes of them, or all bytes. Once with rows in pages of 4 KiB, once when the
service has made huge pages of all. Rows take at most half of the memory that is available; larger sizes are
extrapolated from the smallest and the largest.

`steps`: eight engines take a step every 10 ms, and each begins with a lookup whose answer is waited for. Another engine
has blocks loaded from the disk at half of its full speed. Beside that, in turns, the same processes send messages of
the same sizes to a bare echo process over the same kind of socket, at the same load. Percentiles are over the round
trips of all engines in a turn, figures medians over turns, ratios medians of the ratio of each pair.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.beside import JOB_BLOCKS
from benchmarks.options import JSON_FILE, QUICK
from benchmarks.peer import Peer
from benchmarks.report import GIB, Report, median, paired_ratio, percentile, table
from benchmarks.served import Served, served
from kvtier.cli.temporary_folders import temporary_folder
from kvtier.options import parse_size
from kvtier.tier.memory_limits import SystemLimits, tightest

ENGINE, BARE = "benchmarks.service_engines_process", "benchmarks.service_engines_bare"
PARTS = ("start", "steps")
BLOCK_BYTES = 64 << 10
HIT_BYTES = JOB_BLOCKS * BLOCK_BYTES
FILL_BLOCKS = 1024
PAGES = ("4 KiB", "huge")
ESTIMATED_GIB = (16, 64)
START_AIM = 1.5
HUGE_SECONDS_A_GIB = 60.0
"""How long a service may take to make huge pages of its rows."""

STEP_SECONDS = 0.01
LEAD_SECONDS = 0.5
"""The loads begin so long before the steps."""
KEYS = 32
"""Keys of a lookup."""
ROWS_BYTES = 64 << 20
STEPS_AIM = 3.0
MS = 1e3


# -- the first hit of a new engine -------------------------------------------------------------------------------


def first_hits(folder: Path, size: int, pages: str, turns: int) -> dict[str, Any]:
    """A row: rows of so many bytes in pages of one kind."""
    text = f"tiers:\n  - {{type: cpu, cpu_bytes_to_use: {size}, huge_pages: {str(pages != PAGES[0]).lower()}}}\n"
    numbers, found = size // BLOCK_BYTES, list[dict[str, float]]()
    with served(text, folder) as service:
        with Peer(sys.executable, ENGINE) as engine:
            engine.ask("open", path=service.path, block_bytes=BLOCK_BYTES, blocks=min(FILL_BLOCKS, numbers))
            engine.ask("store", numbers=numbers)
            engine.ask("close")
        if pages != PAGES[0]:
            service.wait_for_line("event=huge_pages", HUGE_SECONDS_A_GIB * max(1.0, size / GIB))
        works: list[Callable[[int], dict[str, float]]] = [
            lambda at: _new_engine(service, at),
            lambda _: _bare(service, "hit", HIT_BYTES),
            lambda _: _bare(service, "all", 0),
        ]
        for turn in range(turns):
            at = numbers - (turn + 1) * JOB_BLOCKS
            found.append({name: ms for work in works[:: 1 if turn % 2 else -1] for name, ms in work(at).items()})
    medians = {name: median(each[name] for each in found) for name in sorted(found[0])}
    ratios = {
        name: paired_ratio([each["engine"] for each in found], [each[f"bare {name}"] for each in found])
        for name in ("hit", "all")
    }
    return {
        "what": f"start, {size / GIB:g} GiB, {pages} pages",
        "gib": size / GIB,
        "pages": pages,
        "medians_ms": medians,
        "engine / bare that touches what is hit": ratios["hit"],
        "engine / bare that touches all rows": ratios["all"],
        "aim": START_AIM,
        "all": found,
    }


def _new_engine(service: Served, at: int) -> dict[str, float]:
    """Milliseconds of a new engine's process until it has its first hit, its modules aside."""
    begun = time.perf_counter()
    with Peer(sys.executable, ENGINE) as engine:
        engine.ask("ready")
        loaded = (time.perf_counter() - begun) * MS
        opened = engine.ask("open", path=service.path, block_bytes=BLOCK_BYTES, blocks=JOB_BLOCKS)["ms"]
        hit = engine.ask("hit", start=at)["ms"]
        again = engine.ask("hit", start=at)["ms"]
        engine.ask("close")
    return {
        "engine": opened + hit,
        "engine: to be served": opened,
        "engine: first hit": hit,
        "engine: the same hit again": again,
        "engine: process and modules before": loaded,
    }


def _bare(service: Served, name: str, touched_bytes: int) -> dict[str, float]:
    """Milliseconds of a bare process."""
    with Peer(sys.executable, BARE) as bare:
        bare.ask("ready")
        found = bare.ask("touch", path=service.path, page_bytes=BLOCK_BYTES, touched_bytes=touched_bytes)
    return {f"bare {name}": found["ms"], f"bare {name}: hello": found["hello_ms"]}


def estimates(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows for sizes that no memory is there for, on the line through the smallest and the largest size.

    A time that became less with more rows did not depend on them.
    """
    found = []
    for pages in PAGES:
        sizes = [row for row in rows if row["pages"] == pages]
        if len(sizes) < 2:
            continue
        small, large = sizes[0], sizes[-1]
        for gib in (gib for gib in ESTIMATED_GIB if gib > large["gib"]):
            ms = {}
            for name in ("engine", "bare hit", "bare all"):
                one, other = (row["medians_ms"][name] for row in (small, large))
                ms[name] = other + max(0.0, other - one) * (gib - large["gib"]) / (large["gib"] - small["gib"])
            found.append({"what": f"start, {gib} GiB, {pages} pages, estimated", "pages": pages, "medians_ms": ms})
    return found


def start(report: Report, sizes: Sequence[int], turns: int, json_file: Path | None) -> None:
    """Every size and kind of page that there is memory for."""
    rows: list[dict[str, Any]] = []
    limit = tightest(SystemLimits())
    for size in sizes:
        if limit is not None and 2 * size > limit.have_bytes:
            report.notes.append(f"start, {size / GIB:g} GiB: more than half of the memory, estimated")
            continue
        for pages in PAGES:
            click.echo(f"start, {size / GIB:g} GiB, {pages} pages", err=True)
            with temporary_folder("kvtier-start-") as folder:
                rows.append(first_hits(Path(folder), size, pages, turns))
            report.results.append(rows[-1])
            report.write(json_file)
    report.results += (more := estimates(rows))
    names = ("engine", "engine: to be served", "engine: first hit", "bare hit", "bare all")
    ratios = ("engine / bare that touches what is hit", "engine / bare that touches all rows")
    table(
        "a new engine to its first hit, ms",
        ("what", *names, "/ bare hit", "/ bare all"),
        [
            [row["what"], *(row["medians_ms"].get(name) for name in names), *map(row.get, ratios)]
            for row in [*rows, *more]
        ],
    )


# -- the steps of several ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Course:
    """Sizes of a run of steps."""

    engines: int
    pairs: int
    seconds: float
    disk_blocks: int


def steps(course: Course, roots: str, folder: Path) -> list[dict[str, Any]]:
    """Rows: round trips beside loads, and without."""
    disk_bytes = 2 * course.disk_blocks * (BLOCK_BYTES + 8192)
    text = (
        f"tiers:\n  - {{type: cpu, cpu_bytes_to_use: {ROWS_BYTES}}}\n"
        f"  - {{type: fs, roots: ['{roots}/root'], capacity: {disk_bytes}, min_free_bytes: 0}}\n"
    )
    with ExitStack() as open_now:
        service = open_now.enter_context(served(text, folder))
        loader, *engines = (open_now.enter_context(Peer(sys.executable, ENGINE)) for _ in range(1 + course.engines))
        echo = open_now.enter_context(Peer(sys.executable, BARE))
        given = {"path": service.path, "block_bytes": BLOCK_BYTES}
        loader.ask("open", blocks=course.disk_blocks, engine_id="loads", **given)
        loader.ask("store", numbers=course.disk_blocks, to_disk=True)
        for number, engine in enumerate(engines):
            engine.ask("open", blocks=JOB_BLOCKS, engine_id=f"steps-{number}", **given)
        sizes = loader.ask("message_bytes", numbers=KEYS)
        echo.ask("echo", path=f"{folder}/echo", answer_bytes=sizes["answered"])
        pool = open_now.enter_context(ThreadPoolExecutor(1 + course.engines))
        full = loader.ask("load", seconds=course.seconds, a_second=0.0)
        works: dict[str, dict[str, Any]] = {
            "service": {"work": "steps", "keys": KEYS, "numbers": course.disk_blocks},
            "echo": {"work": "echo", "path": f"{folder}/echo", **sizes},
        }

        def turn(who: str, a_second: float | None) -> dict[str, float]:
            """Figures of a turn, with so many loads a second, if any."""
            loads, seconds = None, course.seconds
            if a_second is not None:
                length = seconds + 2 * LEAD_SECONDS
                loads = pool.submit(loader.ask, "load", seconds=length, a_second=a_second)
                time.sleep(LEAD_SECONDS)
            offsets = (STEP_SECONDS * number / course.engines for number in range(course.engines))
            cpu, begun = service.cpu_seconds, time.perf_counter()
            asked = [
                pool.submit(engine.ask, course=(seconds, STEP_SECONDS, offset), **works[who])
                for engine, offset in zip(engines, offsets, strict=True)
            ]
            trips = [each for answer in asked for each in answer.result()["seconds"]]
            busy = (service.cpu_seconds - cpu) / (time.perf_counter() - begun)
            found = {f"p{rank}": percentile(trips, rank) * MS for rank in (50, 99, 100)}
            found |= {"trips": float(len(trips)), "cores of the service": busy}
            return found if loads is None else found | {f"loads {k}": v for k, v in loads.result().items()}

        half = full["jobs_a_second"] / 2
        rows = [_row("beside loads", turn, half, course.pairs), _row("alone", turn, None, course.pairs)]
    return [row | {"message_bytes": sizes, "full_speed": full, "half_jobs_a_second": half} for row in rows]


def _row(
    name: str, turn: Callable[[str, float | None], dict[str, float]], a_second: float | None, pairs: int
) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {"service": [], "echo": []}
    for number in range(pairs):
        click.echo(f"steps {name}, pair {number + 1} of {pairs}", err=True)
        for who in list(found)[:: 1 if number % 2 else -1]:
            found[who].append(turn(who, a_second))
    ratios = {
        f"{figure} ratio": paired_ratio(*([each[figure] for each in found[who]] for who in found))
        for figure in ("p50", "p99")
    }
    medians = {
        f"{who} {figure}": median(each[figure] for each in turns) for who, turns in found.items() for figure in turns[0]
    }
    aim = None if a_second is None else STEPS_AIM
    return {"what": f"steps {name}", **ratios, "aim": aim, "medians": medians, "all": found}


# -- both --------------------------------------------------------------------------------------------------------


@click.command()
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="Only these; all by default.")
@click.option("--sizes", default="2GiB,4GiB,8GiB,16GiB", show_default=True, help="Bytes of rows.")
@click.option("--turns", default=7, show_default=True, help="New engines at rows of each kind.")
@click.option("--engines", default=8, show_default=True, help="Engines that take steps.")
@click.option("--pairs", default=9, show_default=True, help="Turns of steps at the service, and at the echo.")
@click.option("--turn-seconds", default=5.0, show_default=True, help="Length of a turn of steps.")
@click.option("--folder", default=None, help="Where the root is made; a temporary folder by default.")
@QUICK
@JSON_FILE
def main(parts: tuple[str, ...], folder: str | None, quick: bool, json_file: Path | None, **given: Any) -> None:
    """Measure a new engine's first hit, and the steps of several."""
    report = Report("service_engines", {"parts": parts or PARTS, "quick": quick, **given})
    report.notes.append("the CPU time of services counts as that of others in `busy`")
    report.head()
    sizes, turns = [parse_size(size) for size in given["sizes"].split(",")], given["turns"]
    course = Course(given["engines"], given["pairs"], given["turn_seconds"], 4096)
    if quick:
        sizes, turns, course = [64 << 20], 1, Course(2, 1, 0.5, 2048)
    if "start" in (parts or PARTS):
        start(report, sizes, turns, json_file)
    if "steps" in (parts or PARTS):
        with temporary_folder("kvtier-steps-", folder) as roots, temporary_folder("kvtier-sockets-") as sockets:
            rows = steps(course, roots, Path(sockets))
        report.results += rows
        names = ("service p50", "echo p50", "service p99", "echo p99")
        table(
            "round trips of engines, ms",
            ("what", *names, "p50 ratio", "p99 ratio", "aim"),
            [
                [row["what"], *(row["medians"][name] for name in names), row["p50 ratio"], row["p99 ratio"], row["aim"]]
                for row in rows
            ],
        )
    report.verified = True
    report.end(json_file)


if __name__ == "__main__":
    main()
