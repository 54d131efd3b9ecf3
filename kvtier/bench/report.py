"""The figures of a measurement as a table with bars for people, and as JSON for programs."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvtier.bench.figures import SCATTERED, Figure, TierFigures

JSON_VERSION = 1
BAR_CELLS = 10
_PARTS = " ▏▎▍▌▋▊▉█"
_NONE = "-"


@dataclass(frozen=True, slots=True)
class BenchReport:
    """What was measured, and what was asked for."""

    tiers: Sequence[TierFigures]
    settings: dict[str, object]

    @property
    def wrong_blocks(self) -> int:
        """Blocks that did not come back as they were stored, refused ones included."""
        refused = sum(figure.bulk.corrupt + figure.single.corrupt for tier in self.tiers for figure in tier.figures)
        return refused + sum(tier.wrong_blocks for tier in self.tiers)

    @property
    def ok(self) -> bool:
        """True when every byte was right."""
        return not self.wrong_blocks

    def to_json(self) -> dict[str, object]:
        """The report for programs."""
        return {
            "command": "bench",
            "version": JSON_VERSION,
            "ok": self.ok,
            "machine": machine(),
            "settings": self.settings,
            "tiers": [tier.to_json() for tier in self.tiers],
        }

    def show(self, console: Console) -> None:
        """Print a table of all tiers, what limits them, and whether every byte was right."""
        told = machine()
        console.print(escape(f"{told['cpu']}, {told['cores']} cores, Linux {told['kernel']}"), soft_wrap=True)
        most = max((figure.bulk.gib_per_second for tier in self.tiers for figure in tier.figures), default=0.0)
        for tier in self.tiers:
            where = f"{tier.name} {tier.place}".strip()
            console.print(escape(f"\n{where}: {tier.mode or tier.skipped}"), soft_wrap=True, highlight=False)
            for note in tier.notes:
                console.print(escape(f"note: {note}"), soft_wrap=True, highlight=False)
            if tier.figures:
                console.print(_table(tier, most))
        checked = sum(tier.checked_blocks for tier in self.tiers)
        verdict = "[green]every byte right[/green]" if self.ok else f"[bold red]{self.wrong_blocks} WRONG[/bold red]"
        console.print(f"{checked:,} blocks compared: {verdict}.")


def _table(tier: TierFigures, most: float) -> Table:
    """One tier's figures; the bars of all tables have one scale."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("move", no_wrap=True, min_width=11)
    for heading, width in (("block", 8), ("GiB/s", 5)):
        table.add_column(heading, justify="right", no_wrap=True, min_width=width)
    table.add_column("", no_wrap=True, min_width=BAR_CELLS)
    for heading, width in (("one: p50", 8), ("p99", 8), ("s/GiB", 5), ("tokens/s", 9)):
        table.add_column(heading, justify="right", no_wrap=True, min_width=width)
    for figure in tier.figures:
        table.add_row(*_cells(figure, most))
    return table


def _cells(figure: Figure, most: float) -> tuple[str, ...]:
    rate, single = figure.bulk.gib_per_second, figure.single
    times = (_time_text(single.percentile_us(share)) if single.jobs else _NONE for share in (0.50, 0.99))
    return (
        "  scattered" if figure.move.endswith(SCATTERED) else figure.move.replace("_", " "),
        _block_text(figure.payload_bytes) if figure.payload_bytes else _NONE,
        f"{rate:.2f}",
        bar(rate / most if most else 0.0),
        *times,
        f"{figure.bulk.cpu_seconds_per_gib:.2f}" if figure.bulk.cpu_seconds else _NONE,
        f"{figure.tokens_per_second:,.0f}" if figure.bytes_per_token else _NONE,
    )


def bar(share: float) -> str:
    """A share of the whole as a bar of BAR_CELLS characters at most, to an eighth of a character."""
    eighths = round(max(0.0, min(1.0, share)) * BAR_CELLS * 8)
    whole, part = divmod(eighths, 8)
    return _PARTS[8] * whole + _PARTS[part].strip()


def _block_text(size_bytes: int) -> str:
    value, unit = float(size_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.4g} {unit}"


def _time_text(microseconds: float) -> str:
    return f"{microseconds:.0f} us" if microseconds < 1000 else f"{microseconds / 1000:.2f} ms"


def machine() -> dict[str, object]:
    """The machine and what runs on it, as far as the figures depend on it."""
    return {
        "cpu": _first(Path("/proc/cpuinfo"), r"^model name\s*:\s*(.+)$") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "kvtier": version("kvtier"),
        "torch": version("torch"),
    }


def _first(path: Path, pattern: str) -> str:
    try:
        found = re.search(pattern, path.read_text(), re.MULTILINE)
    except OSError:
        return ""
    return found[1].strip() if found else ""
