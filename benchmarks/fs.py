"""kvtier's filesystem tier beside fio, vLLM's fs tier and LMCache's disk backends: stores and loads, checked.

    python -m benchmarks.fs [--sizes 16KiB,64KiB] [--bytes 1GiB] [--folder DIR] [--json FILE] [--quick]

For each block size and repetition every contestant gets an empty folder on the same file system and does the same
passes, pass by pass in turns. `benchmarks/README.md` says how to install the others; who is absent is named so.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import click

from benchmarks.fs_child import FIRST, LOAD, OVERWRITE, Pass, Refused, Setup
from benchmarks.fs_fio import Fio
from benchmarks.options import VLLM_PYTHON
from benchmarks.report import ABSENT, GIB, Report, median, paired_ratio, table
from kvtier.cli.temporary_folders import temporary_folder
from kvtier.options import parse_size

ROOT = Path(__file__).resolve().parent.parent
JOB_BLOCKS = 16
ALL = 1 << 40
MOST_FILES = 8192
SLOW_BLOCKS = 2048
STATED = ("repetitions", "depth", "at_once")


class Entrant(Protocol):
    """A contestant as the benchmark sees it. Raises Refused when it does not do what it is asked.

    `most_blocks` is how many blocks it is given at most: one that takes minutes for what others do in a second would
    hold up all.
    """

    name: str
    most_blocks: int

    def open(self, setup: Setup) -> str: ...
    def run(self, work: Pass) -> dict[str, float]: ...
    def close(self) -> None: ...


class Child:
    """A contestant in a process of its own."""

    def __init__(self, name: str, command: list[str], most_blocks: int = ALL) -> None:
        self.name = name
        self.most_blocks = most_blocks
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it lives as long as the child
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True, cwd=ROOT)

    def _ask(self, **question: object) -> dict[str, object]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = ""
        if self._process.poll() is None:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            raise Refused(f"{self.name} ended with {self._process.wait()}: {last_lines(self._errors)}")
        answer = json.loads(line)
        if "refused" in answer:
            raise Refused(f"{self.name}: {answer['refused']}")
        return answer

    def open(self, setup: Setup) -> str:
        return str(self._ask(ask="open", setup=asdict(setup))["notes"])

    def run(self, work: Pass) -> dict[str, float]:
        return {**self._ask(ask="pass", **{"pass": asdict(work)})}  # type: ignore[dict-item]

    def close(self) -> None:
        self._ask(ask="close")

    def end(self) -> None:
        """Let the process end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
        self._errors.close()


def last_lines(errors: IO[str]) -> str:
    """The end of what a child printed."""
    errors.seek(0)
    return " | ".join(errors.read().strip().splitlines()[-4:])


@dataclass(frozen=True, slots=True)
class Phase:
    """A row of the table: what is done to which part of the blocks. `turn` counts whole rows of memory."""

    name: str
    kind: str
    turn: int
    job_blocks: int = 0
    at_once: int = 1
    share: int = 1

    def work(self, blocks: int) -> Pass:
        """The pass for so many rows. A job is everything unless the phase says otherwise."""
        count = max(JOB_BLOCKS, blocks // self.share)
        return Pass(self.kind, self.turn * blocks, count, self.job_blocks or count, self.at_once)


def phases(at_once: int) -> list[Phase]:
    """What every contestant does, in this order: the overwrites evict what the first writes stored."""
    return [
        Phase("first write, one job", FIRST, 0),
        Phase("first write, many jobs", FIRST, 1, JOB_BLOCKS, at_once),
        Phase("load, one job", LOAD, 0),
        Phase("load, many jobs", LOAD, 1, JOB_BLOCKS, at_once),
        Phase("load, jobs one by one", LOAD, 0, JOB_BLOCKS, 1, share=4),
        Phase("overwrite, one job", OVERWRITE, 2),
        Phase("overwrite, many jobs", OVERWRITE, 3, JOB_BLOCKS, at_once),
        Phase("load of what overwrote", LOAD, 3, JOB_BLOCKS, at_once, share=4),
    ]


@dataclass(frozen=True, slots=True)
class Contest:
    """What all repetitions of all sizes share."""

    folder: Path
    total_bytes: int
    repetitions: int
    depth: int
    at_once: int
    profile: str = ""
    json_file: Path | None = None

    def blocks(self, block_bytes: int) -> int:
        """How many blocks are moved; at least two jobs."""
        return max(2 * JOB_BLOCKS, self.total_bytes // block_bytes)


def compete(contest: Contest, block_bytes: int, entrants: list[Entrant], report: Report) -> None:
    """One repetition of one size: every contestant does every pass, in turns."""
    blocks = contest.blocks(block_bytes)
    with temporary_folder("kvtier-fs-", contest.folder) as place:
        opened: list[Entrant] = []
        try:
            for entrant in entrants:
                folder = Path(place) / entrant.name
                folder.mkdir()
                opened.append(entrant)
                part = min(blocks, entrant.most_blocks)
                how = entrant.open(Setup(str(folder), block_bytes, part, contest.depth, contest.profile))
                note = f"{entrant.name}: {how}"
                if note not in report.notes:
                    report.notes.append(note)
            for phase in phases(contest.at_once):
                for entrant in entrants:
                    work = phase.work(min(blocks, entrant.most_blocks))
                    moved = work.blocks * block_bytes
                    report.results.append(row(entrant.name, phase.name, block_bytes, moved, entrant.run(work)))
        finally:
            for entrant in opened:
                entrant.close()


def row(name: str, phase: str, block_bytes: int, moved: int, measured: dict[str, float]) -> dict[str, object]:
    """One result: who did what how fast, and at what price."""
    return {
        "contestant": name,
        "pass": phase,
        "block_bytes": block_bytes,
        "gib_per_second": moved / GIB / measured["seconds"],
        "blocks_per_second": moved / block_bytes / measured["seconds"],
        "cpu_seconds_per_gib": measured["cpu_seconds"] / (moved / GIB),
        **{key: value for key, value in measured.items() if key.startswith("job_")},
    }


def series(report: Report, field: str, **which: object) -> list[float]:
    """A figure of the results that match, over the repetitions."""
    found = (result for result in report.results if all(result[key] == value for key, value in which.items()))
    return [float(result[field]) for result in found if field in result]  # type: ignore[arg-type]


def show(report: Report, names: list[str], sizes: Iterable[int], at_once: int) -> None:
    """The long table of all contestants, then the short one of ratios."""
    others = [name for name in names if name != "kvtier"]
    long, short = [], []
    for size in sizes:
        for phase in phases(at_once):
            which = {"block_bytes": size, "pass": phase.name}
            ours = series(report, "gib_per_second", contestant="kvtier", **which)
            label = f"{size >> 10} KiB {phase.name}"
            ratios = [paired_ratio(ours, series(report, "gib_per_second", contestant=name, **which)) for name in others]
            cpu = median(series(report, "cpu_seconds_per_gib", contestant="kvtier", **which))
            short.append([label, median(ours), cpu, *ratios])
            for name in names:
                found = {key: series(report, key, contestant=name, **which) for key in FIELDS}
                if found["gib_per_second"]:
                    cells = [median(values) if values else None for values in found.values()]
                    long.append([label, name, *cells])
    table("medians", ["pass", "who", *FIELDS.values()], long)
    columns = ["pass", "kvtier", "CPU s/GiB", *others]
    table("kvtier's GiB/s and CPU, and how many times the GiB/s of others that is", columns, short)


FIELDS = {
    "gib_per_second": "GiB/s",
    "blocks_per_second": "blocks/s",
    "cpu_seconds_per_gib": "CPU s/GiB",
    "job_p50_ms": "job p50 ms",
    "job_p99_ms": "p99 ms",
}


def children(vllm: str | None, lmcache: str | None) -> tuple[list[Child], list[str]]:
    """kvtier, and every other contestant that has a Python to run under; the names of those that have none."""
    started, absent = [Child("kvtier", [sys.executable, "-m", "benchmarks.fs_kvtier"])], []
    for name, python, most in (
        ("vllm", vllm, MOST_FILES),
        ("lmcache-fs", lmcache, SLOW_BLOCKS),
        ("lmcache-disk", lmcache, SLOW_BLOCKS),
    ):
        if python is None:
            absent.append(name)
        else:
            started.append(Child(name, [python, "-m", "benchmarks.fs_peers", name], most))
    return started, absent


def measure(contest: Contest, sizes: list[int], entrants: list[Entrant], report: Report) -> None:
    """Every repetition of every size; who begins changes from one to the next."""
    for repetition in range(contest.repetitions):
        turned = repetition % len(entrants)
        for size in sizes:
            click.echo(f"repetition {repetition + 1} of {contest.repetitions}: {size >> 10} KiB", err=True)
            compete(contest, size, entrants[turned:] + entrants[:turned], report)
            report.write(contest.json_file)
    report.verified = True


@click.command()
@click.option("--sizes", default="16KiB,64KiB,256KiB,1MiB,4MiB", show_default=True, help="Payload of a block.")
@click.option("--bytes", "size_text", default="1GiB", show_default=True, help="Payload moved in a pass.")
@click.option("--repetitions", default=5, show_default=True)
@click.option("--depth", default=32, show_default=True, help="Requests at once, of kvtier and of fio.")
@click.option("--at-once", default=32, show_default=True, help="Jobs at once where there are many.")
@click.option("--folder", default=None, help="Where the stores are made; a temporary folder by default.")
@VLLM_PYTHON
@click.option("--lmcache-python", help="A Python that has LMCache.")
@click.option("--alone", is_flag=True, help="Without fio; with no other Python named, kvtier alone.")
@click.option("--profile", default="", help="Begin of file names: profile kvtier's event loop in each pass.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write every result to this file.")
@click.option("--quick", is_flag=True, help="A toy size, to see that it works.")
def main(sizes: str, json_file: Path | None, quick: bool, **given: Any) -> None:
    """Measure stores and loads through the whole filesystem tier, beside others."""
    if quick:
        sizes, given["size_text"], given["repetitions"] = "64KiB", "2MiB", 1
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what it made in the folder goes
    place = Path(given["folder"] or tempfile.gettempdir()).resolve()
    numbers = given["repetitions"], given["depth"], given["at_once"]
    contest = Contest(place, parse_size(given["size_text"]), *numbers, given["profile"], json_file)
    block_sizes = [parse_size(size) for size in sizes.split(",")]
    stated = {"sizes": sizes, "bytes": given["size_text"]} | {name: given[name] for name in STATED}
    report = Report("fs", stated)
    fio = None if given["alone"] else Fio.version()
    report.versions |= {"fio": fio or ABSENT}
    report.head()
    started, absent = children(given["vllm_python"], given["lmcache_python"])
    entrants: list[Entrant] = [*started, *([Fio()] if fio else [])]
    try:
        measure(contest, block_sizes, entrants, report)
    except Refused as error:
        raise click.ClickException(str(error)) from error
    finally:
        for child in started:
            child.end()
    report.notes += [f"{name}: {ABSENT}" for name in [*absent, *([] if fio else ["fio"])]]
    show(report, [entrant.name for entrant in entrants], block_sizes, contest.at_once)
    report.end(json_file)


if __name__ == "__main__":
    main()
