"""What loads and another thread of the process take from each other.

    python -m benchmarks.beside [--sizes 64KiB,1MiB] [--bytes 512MiB] [--folder DIR] [--json FILE] [--quick]

Loads through the whole filesystem tier (jobs of 16 blocks, as in `fs`) alone, beside a thread that is busy in Python
all the time and never waits, and beside one that sleeps 2 ms again and again: how much later than it asked it goes on.
The interpreter hands the GIL over every `--switch-interval` seconds (5 ms unless a program says otherwise). Every byte
that is loaded is compared. Medians over interleaved repetitions, percentiles over all naps.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from benchmarks.fs_child import FIRST, LOAD, Content, Contestant, Pass, Setup
from benchmarks.fs_kvtier import KVTier
from benchmarks.options import JSON_FILE, QUICK
from benchmarks.report import GIB, Report, median, paired_ratio, percentile, table
from kvtier.cli.temporary_folders import temporary_folder
from kvtier.options import parse_size

NAP_SECONDS = 0.002
JOB_BLOCKS = 16
Work = Callable[["Neighbour"], None]


class Neighbour:
    """Another thread of the process, while a `with` lasts. `delays` are seconds, of one that naps."""

    def __init__(self, work: Work | None) -> None:
        self.delays: list[float] = []
        self.leave = False
        self._thread = threading.Thread(target=work, args=(self,), daemon=True) if work is not None else None

    def __enter__(self) -> Neighbour:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.leave = True
        if self._thread is not None:
            self._thread.join()


def spin(neighbour: Neighbour) -> None:
    """Work in Python without ever waiting."""
    count = 0
    while not neighbour.leave:
        count += 1


def nap(neighbour: Neighbour) -> None:
    """Wait without the GIL, and note how much longer than asked that took."""
    while not neighbour.leave:
        begun = time.perf_counter()
        time.sleep(NAP_SECONDS)
        neighbour.delays.append(time.perf_counter() - begun - NAP_SECONDS)


def measure(folder: Path, block_bytes: int, total: int, repetitions: int) -> list[dict[str, Any]]:
    """The rows of one block size."""
    blocks = max(JOB_BLOCKS, total // block_bytes)
    tier = KVTier()
    content = Content(tier.open(Setup(str(folder), block_bytes, blocks, 32)))
    found: list[dict[str, Any]] = []
    try:
        run(tier, content, Pass(FIRST, 0, blocks, blocks, 1), None)
        for name, at_once in (("many jobs", 32), ("jobs one by one", 1)):
            load = Pass(LOAD, 0, blocks, JOB_BLOCKS, at_once)
            seconds: dict[str, list[float]] = {"alone": [], "busy": []}
            delays: list[float] = []
            for _ in range(repetitions):
                seconds["alone"].append(run(tier, content, load, None)[0])
                seconds["busy"].append(run(tier, content, load, spin)[0])
                delays += run(tier, content, load, nap)[1]
            size = blocks * block_bytes / GIB
            found.append(
                {
                    "what": f"{block_bytes >> 10} KiB, {name}",
                    "alone_gib_s": size / median(seconds["alone"]),
                    "busy_gib_s": size / median(seconds["busy"]),
                    "ratio": paired_ratio(seconds["alone"], seconds["busy"]),
                    "nap_p50_ms": percentile(delays, 50) * 1e3,
                    "nap_p99_ms": percentile(delays, 99) * 1e3,
                    "naps": len(delays),
                    "all": seconds,
                }
            )
    finally:
        tier.close()
    return found


def run(tier: Contestant, content: Content, work: Pass, beside: Work | None) -> tuple[float, list[float]]:
    """A pass beside another thread: its seconds, and the delays of one that naps. What was loaded is compared."""
    jobs = work.jobs()
    (content.spoil if work.kind == LOAD else content.fill)(work)
    tier.prepare(work, jobs)
    with Neighbour(beside) as neighbour:
        begun = time.perf_counter()
        tier.move(work, jobs)
        seconds = time.perf_counter() - begun
    if work.kind == LOAD:
        content.check(work)
    return seconds, neighbour.delays


@click.command()
@click.option("--sizes", default="64KiB,1MiB", show_default=True, help="Block sizes.")
@click.option("--bytes", "total", default="512MiB", show_default=True, help="Payload of a pass.")
@click.option("--repetitions", default=5, show_default=True)
@click.option(
    "--switch-interval", default=0.005, show_default=True, help="Seconds; the interpreter's for this process."
)
@click.option("--folder", help="Where the tier's root is made; a temporary folder by default.")
@QUICK
@JSON_FILE
def main(
    sizes: str,
    total: str,
    repetitions: int,
    switch_interval: float,
    folder: str | None,
    quick: bool,
    json_file: Path | None,
) -> None:
    """Measure loads beside another thread."""
    wanted, nbytes = [parse_size(size) for size in sizes.split(",")], parse_size(total)
    if quick:
        wanted, nbytes, repetitions = [16 << 10], 4 << 20, 2
    sys.setswitchinterval(switch_interval)
    report = Report("beside", {"bytes": nbytes, "repetitions": repetitions, "switch_interval": switch_interval})
    report.head()
    for size in wanted:
        with temporary_folder("kvtier-beside-", folder) as scratch:
            report.results += measure(Path(scratch), size, nbytes, repetitions)
    report.verified = True
    table(
        "loads beside another thread of the process",
        ("load", "alone GiB/s", "beside a busy thread", "share", "nap late p50 ms", "p99 ms", "naps"),
        [
            [row[name] for name in ("what", "alone_gib_s", "busy_gib_s", "ratio", "nap_p50_ms", "nap_p99_ms", "naps")]
            for row in report.results
        ],
    )
    report.end(json_file)


if __name__ == "__main__":
    main()
