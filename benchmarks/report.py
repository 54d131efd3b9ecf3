"""What every benchmark says beside its figures: machine, versions, how busy it was, medians, a table, a JSON record."""

from __future__ import annotations

import json
import os
import resource
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from rich.console import Console

from kvtier.cli.terminal import table as text_table
from kvtier.tools.bench.load_generator import percentile
from kvtier.tools.bench.results import machine

__all__ = ["ABSENT", "GIB", "Report", "figure", "median", "paired_ratio", "percentile", "table", "versions"]

GIB = 1 << 30
ABSENT = "absent"
OURS = ("kvtier", "liburing", "numpy", "torch", "xxhash")


def versions(distributions: Iterable[str] = OURS) -> dict[str, str]:
    """The installed version of each distribution, or `absent`."""
    found = {}
    for name in distributions:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ABSENT
    return found


def median(values: Iterable[float]) -> float:
    """The median of repetitions."""
    return statistics.median(values)


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """The median over repetitions of ours / theirs, each pair from one repetition; None without a pair."""
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=False) if other]
    return statistics.median(ratios) if ratios else None


class Busy:
    """How busy the machine was with other things while a benchmark ran. Our children count once they have ended."""

    def __init__(self) -> None:
        self._load = os.getloadavg()[0]
        self._start = time.perf_counter()
        self._all, self._own = _busy_seconds(), _own_seconds()

    def figures(self) -> dict[str, float]:
        """Load averages before and after, and the cores that others kept busy on average."""
        seconds = max(time.perf_counter() - self._start, 1e-9)
        others = (_busy_seconds() - self._all) - (_own_seconds() - self._own)
        return {
            "load_before": round(self._load, 2),
            "load_after": round(os.getloadavg()[0], 2),
            "cores_used_by_others": round(max(0.0, others / seconds), 2),
        }


def _busy_seconds() -> float:
    """Seconds that all cores together have worked, the kernel's included; idle, waiting and stolen time left out."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    usages = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@dataclass(slots=True)
class Report:
    """One run of one benchmark. `results` are flat rows; `verified` says that the data moved was compared."""

    benchmark: str
    settings: dict[str, object]
    results: list[dict[str, object]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=versions)
    notes: list[str] = field(default_factory=list)
    verified: bool = False
    machine: dict[str, object] = field(default_factory=machine)
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    busy: Busy = field(default_factory=Busy)

    def record(self) -> dict[str, object]:
        """The run as JSON has it."""
        return {
            "benchmark": self.benchmark,
            "date": self.date,
            "machine": self.machine,
            "busy": self.busy.figures(),
            "versions": self.versions,
            "settings": self.settings,
            "verified": self.verified,
            "notes": self.notes,
            "results": self.results,
        }

    def head(self) -> None:
        """Print what was run where."""
        console = Console()
        what = {"benchmark": self.benchmark, "date": self.date, **self.machine, **self.versions, **self.settings}
        console.print(", ".join(f"{name} {value}" for name, value in what.items()), highlight=False, soft_wrap=True)

    def end(self, json_file: Path | None) -> None:
        """Print the notes and how busy the machine was; write the record if a file is named."""
        record = self.record()
        console = Console()
        for note in self.notes:
            console.print(note, highlight=False, soft_wrap=True)
        console.print(f"data verified: {self.verified}; busy: {record['busy']}", highlight=False, soft_wrap=True)
        self.write(json_file)

    def write(self, json_file: Path | None) -> None:
        """Write the record as it is now, if a file is named: a long run that is ended early keeps what it has."""
        if json_file is not None:
            json_file.write_text(json.dumps(self.record(), indent=1) + "\n")


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; the first column is text, the others are figures. None is an empty cell."""
    cells = (["" if cell is None else figure(cell) for cell in row] for row in rows)
    console = Console()
    console.width = max(console.width, 120)
    console.print(text_table(columns, cells, title=title))


def figure(value: object) -> str:
    """A figure in about three digits; anything else as it is."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
