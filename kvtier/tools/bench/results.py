"""The figures of a measurement, as a table with bars and as JSON."""

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from kvtier.cli.terminal import BAR_CELLS, bar, table
from kvtier.options import size_text
from kvtier.tools.bench.load_generator import Timing
from kvtier.types.keys import Medium

SCATTERED = "_scattered"
"""End of the name of a move whose blocks do not follow each other in the tensors."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Speed of moving blocks of one size in one way: `bulk` with many blocks in flight, `single` one block at a time.

    `payload_bytes` are those of a block, or of one block of each group; 0 where no blocks were moved. A token of the
    layout has `bytes_per_token` in all its groups together; 0 for a size that is not the layout's.
    """

    move: str
    payload_bytes: int
    bulk: Timing
    single: Timing = field(default_factory=Timing)
    bytes_per_token: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the layout; 0 for other sizes."""
        return self.bulk.gib_per_second * (1 << 30) / self.bytes_per_token if self.bytes_per_token else 0.0

    def to_json(self) -> dict[str, Any]:
        """The figure as it stands in the JSON document; what was not measured is null."""
        return {
            "move": self.move,
            "block_bytes": self.payload_bytes or None,
            "bytes": self.bulk.moved_bytes,
            "seconds": round(self.bulk.seconds, 6),
            "gib_per_second": round(self.bulk.gib_per_second, 4),
            "cpu_seconds_per_gib": round(self.bulk.cpu_seconds_per_gib, 4),
            "tokens_per_second": round(self.tokens_per_second) if self.bytes_per_token else None,
            "single_p50_us": round(self.single.percentile_us(50), 1) if self.single.jobs else None,
            "single_p99_us": round(self.single.percentile_us(99), 1) if self.single.jobs else None,
        }


@dataclass(slots=True)
class TierFigures:
    """The figures of one tier in one place. `skipped` is the reason why it was not measured; empty if it was."""

    name: str
    medium: Medium
    place: str = ""
    mode: str = ""
    notes: tuple[str, ...] = ()
    figures: list[Figure] = field(default_factory=list)
    skipped: str = ""
    wrong_blocks: int = 0
    checked_blocks: int = 0

    def to_json(self) -> dict[str, Any]:
        """The tier as it stands in the JSON document."""
        figures = [figure.to_json() for figure in self.figures]
        return asdict(self) | {"skipped": self.skipped or None, "figures": figures}


JSON_VERSION = 1
_NONE = "-"
_BAR = " " * BAR_CELLS
_HEADINGS = ("move       ", "   block", "GiB/s", _BAR, "one: p50", "     p99", "s/GiB", "tokens/s")
"""As wide as usual figures, so that the tables of all tiers have the same columns."""


@dataclass(frozen=True, slots=True)
class BenchReport:
    """The figures of all tiers, and the options they were measured with."""

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

    def to_json(self) -> dict[str, Any]:
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
        here = machine()
        console.print(escape(f"{here['cpu']}, {here['cores']} cores, Linux {here['kernel']}"), soft_wrap=True)
        most = max((figure.bulk.gib_per_second for tier in self.tiers for figure in tier.figures), default=0.0)
        for tier in self.tiers:
            where = f"{tier.name} {tier.place}".strip()
            for line in (f"\n{where}: {tier.mode or tier.skipped}", *(f"note: {note}" for note in tier.notes)):
                console.print(escape(line), soft_wrap=True, highlight=False)
            if tier.figures:
                console.print(
                    table(
                        _HEADINGS, (_cells(figure, most) for figure in tier.figures), words=(0, _HEADINGS.index(_BAR))
                    )
                )
        checked = sum(tier.checked_blocks for tier in self.tiers)
        verdict = "[green]every byte right[/green]" if self.ok else f"[bold red]{self.wrong_blocks} WRONG[/bold red]"
        console.print(f"{checked:,} blocks compared: {verdict}.")


def _cells(figure: Figure, most: float) -> tuple[str, ...]:
    """The cells of one line; the bars of all tables have one scale."""
    rate, single = figure.bulk.gib_per_second, figure.single
    times = (_time_text(single.percentile_us(percent)) if single.jobs else _NONE for percent in (50, 99))
    return (
        "  scattered" if figure.move.endswith(SCATTERED) else figure.move.replace("_", " "),
        size_text(figure.payload_bytes) if figure.payload_bytes else _NONE,
        f"{rate:.2f}",
        bar(rate / most if most else 0.0),
        *times,
        f"{figure.bulk.cpu_seconds_per_gib:.2f}" if figure.bulk.cpu_seconds else _NONE,
        f"{figure.tokens_per_second:,.0f}" if figure.bytes_per_token else _NONE,
    )


def _time_text(microseconds: float) -> str:
    return f"{microseconds:.0f} us" if microseconds < 1000 else f"{microseconds / 1000:.2f} ms"


def machine() -> dict[str, Any]:
    """The machine and what runs on it, as far as the figures depend on it."""
    return {
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "kvtier": version("kvtier"),
        "torch": version("torch"),
    }


def _processor() -> str:
    """The processor's name; its architecture where the system does not state a name."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.machine()
