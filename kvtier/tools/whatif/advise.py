"""`kvtier advise`: what more memory would bring to a trace: the curve, its worth, and what to buy next.

Both tiers see the same uses, so a disk larger than the CPU tier holds what that holds, and more: the CPU tier hits what
the curve has at its size, the disk what the curve has at its own beyond that. A hit saves the time to compute its
tokens, less the time to load its bytes; a tier that loads more slowly than the engine computes saves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field
from rich.console import Console
from rich.markup import escape

from kvtier.cli.terminal import bar, table
from kvtier.config.load import validate
from kvtier.config.strict_yaml import parse_text, read_text
from kvtier.errors import ConfigError
from kvtier.options import Options, size_text
from kvtier.tools.whatif.miss_ratio import Curve
from kvtier.tools.whatif.page import Part, Series, Table, chart_of, page
from kvtier.tools.whatif.service import Service, describe, read_calibration
from kvtier.types.geometry import Geometry, KVLayout
from kvtier.types.keys import CPU, FS

CURVE_POINTS = 96
PURCHASES = 5
BAR_CELLS = 24
GIB = 1 << 30
SHARES = 40
"""A sum of money is split between CPU and disk in steps of this part of it."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds to compute the tokens of a block, to load it from the CPU tier, and from disk; and a block's bytes."""

    compute_seconds: float
    cpu_seconds: float
    disk_seconds: float
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a CPU tier and of a disk below it."""

    cpu_bytes: float = 0.0
    disk_bytes: float = 0.0


class Prices(Options):
    """Money for a GiB of each: a YAML or JSON file with these keys."""

    cpu_gib: float = Field(gt=0)
    disk_gib: float = Field(gt=0)

    def buy(self, have: Sizes, money: float, cpu_share: float) -> Sizes:
        """Sizes after this share of the money went to the CPU tier and the rest to the disk."""
        cpu = money * cpu_share / self.cpu_gib * GIB
        return Sizes(have.cpu_bytes + cpu, have.disk_bytes + money * (1 - cpu_share) / self.disk_gib * GIB)


@dataclass(frozen=True, slots=True)
class Purchase:
    """The best split of one sum: what is added, and what it brings over the trace."""

    money: float
    cpu_bytes: float
    disk_bytes: float
    sizes: Sizes
    hit_rate: float
    seconds_saved: float
    seconds_gained: float


class Savings:
    """Worth of sizes over a trace of this curve."""

    def __init__(self, curve: Curve, costs: Costs) -> None:
        self.curve = curve
        self.costs = costs

    def hits(self, sizes: Sizes) -> tuple[int, int]:
        """Blocks hit (in the CPU tier, on disk)."""
        cpu = self.curve.hits(int(sizes.cpu_bytes) // self.costs.block_bytes)
        return cpu, max(0, self.curve.hits(int(sizes.disk_bytes) // self.costs.block_bytes) - cpu)

    def hit_rate(self, sizes: Sizes) -> float:
        """Share of the references, both tiers together."""
        return sum(self.hits(sizes)) / self.curve.references if self.curve.references else 0.0

    def seconds_saved(self, sizes: Sizes) -> float:
        """Prefill seconds that the hits save over the whole trace."""
        cpu, disk = self.hits(sizes)
        costs = self.costs
        of_cpu = max(0.0, costs.compute_seconds - costs.cpu_seconds)
        return cpu * of_cpu + disk * max(0.0, costs.compute_seconds - costs.disk_seconds)

    def per_gib(self, have: Sizes, more_bytes: float) -> tuple[float, float]:
        """Seconds saved for each GiB of (CPU, disk), of the next `more_bytes` of it."""
        before = self.seconds_saved(have)
        cpu = self.seconds_saved(Sizes(have.cpu_bytes + more_bytes, have.disk_bytes)) - before
        disk = self.seconds_saved(Sizes(have.cpu_bytes, have.disk_bytes + more_bytes)) - before
        return cpu / (more_bytes / GIB), disk / (more_bytes / GIB)

    def purchases(self, have: Sizes, prices: Prices, money: float, count: int) -> list[Purchase]:
        """The best split of the next sum, and of the one after it, `count` in all."""
        found = []
        for _ in range(count):
            options = [prices.buy(have, money, share / SHARES) for share in range(SHARES + 1)]
            best = max(options, key=self.seconds_saved)
            saved = self.seconds_saved(best)
            gained = saved - self.seconds_saved(have)
            added = (best.cpu_bytes - have.cpu_bytes, best.disk_bytes - have.disk_bytes)
            found.append(Purchase(money, *added, best, self.hit_rate(best), saved, gained))
            have = best
        return found


def table_sizes(curve: Curve, block_bytes: int, more: Sequence[float]) -> list[int]:
    """Sizes in blocks worth a line: halves and doubles of the knee, the working set, and sizes in bytes."""
    most, knee = curve.working_set, curve.knee()
    sizes = {knee >> power for power in range(8)} | {min(most, knee << power) for power in (1, 2)} | {most}
    sizes |= {int(size) // block_bytes for size in more}
    return sorted(size for size in sizes if size > 0)


def read_prices(path: Path | None, cpu_gib: float | None, disk_gib: float | None) -> Prices | None:
    """The prices of a file or of two options; None without any."""
    if path is not None:
        return validate(Prices, parse_text(read_text(path)), "prices")
    if (cpu_gib is None) != (disk_gib is None):
        raise ConfigError("give the price of a GiB of both, CPU and disk", "--price-cpu, --price-disk")
    return None if cpu_gib is None or disk_gib is None else Prices(cpu_gib=cpu_gib, disk_gib=disk_gib)


def block_bytes_of(layout: KVLayout, block_tokens: int) -> int:
    """Bytes of a block of these tokens in a layout, all groups and workers together."""
    geometry = Geometry(layout, 1)
    groups = range(geometry.num_groups)
    per_token = (geometry.kv_bytes_per_block(group) / geometry.layout.groups[group].block_size for group in groups)
    return round(sum(per_token) * block_tokens)


def services_of(block_bytes: int, calibration: Path | None = None) -> dict[str, Service]:
    """The speed of a CPU tier and of a disk, by a calibration or as assumed.

    Raises ConfigError for a calibration that did not measure a CPU tier.
    """
    measured = read_calibration(calibration)
    found = {name: measured.of_medium(medium, block_bytes) for name, medium in (("cpu", CPU), ("disk", FS))}
    if calibration is not None and found["cpu"].source == "assumed":
        raise ConfigError("has no figures of a CPU tier", str(calibration))
    return found


def costs_of(
    block_tokens: int, block_bytes: int, prefill_tokens_per_second: float, services: Mapping[str, Service]
) -> Costs:
    """Seconds of a block with these services of `cpu` and `disk`. A load from disk passes the CPU tier."""
    cpu, disk = (block_bytes / services[name].load.bytes_per_second for name in ("cpu", "disk"))
    return Costs(block_tokens / prefill_tokens_per_second, cpu, cpu + disk, block_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class Advice:
    """The curve of a trace and what follows from it. `shadows` are hit rates by policy and size in blocks, `services`
    the speeds that it counts on."""

    worth: Savings
    have: Sizes
    purchases: Sequence[Purchase]
    settings: dict[str, object]
    shadows: dict[str, dict[int, float]] = field(default_factory=dict)
    services: Mapping[str, Service] = field(default_factory=dict)
    ok: bool = True

    @property
    def curve(self) -> Curve:
        """LRU's."""
        return self.worth.curve

    def knee(self, policy: str) -> int:
        """The size at which a shadow is farthest above the straight line from nothing to the working set, of those that
        it was run at. What holds the working set hits as much with any policy."""
        curve, rates = self.curve, self.shadows[policy]
        slope = curve.hit_rate(curve.working_set) / max(1, curve.working_set)
        return max(rates, key=lambda blocks: rates[blocks] - slope * min(blocks, curve.working_set))

    def to_json(self) -> dict[str, Any]:
        """The advice for programs."""
        curve, block_bytes = self.curve, self.worth.costs.block_bytes
        points = set(np.geomspace(1, max(1, curve.working_set), CURVE_POINTS).round().astype(int).tolist())
        return {
            "command": "advise",
            "version": 1,
            "settings": self.settings,
            "references": curve.references,
            "working_set_blocks": curve.working_set,
            "working_set_bytes": curve.working_set * block_bytes,
            "knee_blocks": curve.knee(),
            "knee_bytes": curve.knee() * block_bytes,
            "lru": [self._point(blocks) for blocks in sorted(points)],
            "shadows": {
                policy: [{"blocks": blocks, "hit_rate": rate} for blocks, rate in rates.items()]
                for policy, rates in self.shadows.items()
            },
            "shadow_knees": {policy: self.knee(policy) for policy in self.shadows},
            "services": {name: service.to_json() for name, service in self.services.items()},
            "costs": asdict(self.worth.costs),
            "purchases": [asdict(purchase) for purchase in self.purchases],
        }

    def _point(self, blocks: int) -> dict[str, float]:
        size = blocks * self.worth.costs.block_bytes
        return {
            "blocks": blocks,
            "bytes": size,
            "hit_rate": self.curve.hit_rate(blocks),
            "cpu_seconds_saved": self.worth.seconds_saved(Sizes(cpu_bytes=size)),
            "disk_seconds_saved": self.worth.seconds_saved(Sizes(disk_bytes=size)),
        }

    # -- for people ----------------------------------------------------------------------------------------------

    def show(self, console: Console) -> None:
        """Print the curve as a table with bars, the policies' shadows, and what to buy."""
        for line in self._lines():
            console.print(escape(line), soft_wrap=True, highlight=False)
        best = self.curve.hit_rate(self.curve.working_set) or 1.0
        rows = [(*row, bar(self.curve.hit_rate(blocks) / best, BAR_CELLS)) for blocks, row in self._rows()]
        console.print(table([*_COLUMNS, "hits of LRU"], rows, words=(0, len(_COLUMNS))))
        for line in self._shadow_lines() + self._purchase_lines():
            console.print(escape(line), soft_wrap=True, highlight=False)

    def to_html(self) -> str:
        """A page with the curve, its worth, and the advice."""
        found = self.to_json()
        points, block_bytes = found["lru"], self.worth.costs.block_bytes
        gib = [point["bytes"] / GIB for point in points]
        rates = [Series("lru", gib, [point["hit_rate"] for point in points])]
        for policy, sizes in self.shadows.items():
            rates.append(Series(policy, [size * block_bytes / GIB for size in sizes], list(sizes.values())))
        saved = [Series(name, gib, [point[f"{name}_seconds_saved"] for point in points]) for name in ("cpu", "disk")]
        parts: list[Part] = [
            *self._lines(),
            chart_of("Blocks hit by one tier of a size", "GiB", "share of the references", rates, log_x=True),
            chart_of("Prefill seconds saved over the trace", "GiB", "seconds", saved, log_x=True),
            Table(_COLUMNS, [row for _, row in self._rows()]),
            *self._shadow_lines(),
            *self._purchase_lines(),
        ]
        return page("kvtier advise", parts, found)

    def _lines(self) -> list[str]:
        curve, block_bytes = self.curve, self.worth.costs.block_bytes
        return [
            f"{self.settings['source']}: {curve.references:,} blocks of {curve.block_tokens} tokens "
            f"({size_text(block_bytes)} each), {curve.working_set:,} different whole ones "
            f"({size_text(curve.working_set * block_bytes)}). At most {100 * curve.hit_rate(curve.working_set):.2f} % "
            f"can be hit.",
            f"The knee is at {size_text(curve.knee() * block_bytes)}: {100 * curve.hit_rate(curve.knee()):.2f} % hit. "
            f"Computed at {self.settings['prefill_tokens_per_second']:,.0f} tokens/s.",
            describe([*self.services.items()]) + ".",
        ]

    def _rows(self) -> Sequence[tuple[int, tuple[str, ...]]]:
        """(blocks, cells) of each size; seconds for a GiB are of the next one eighth more."""
        block_bytes, rows = self.worth.costs.block_bytes, []
        for blocks in table_sizes(self.curve, block_bytes, (self.have.cpu_bytes, self.have.disk_bytes)):
            size = blocks * block_bytes
            more = max(block_bytes, size / 8)
            cpu, _ = self.worth.per_gib(Sizes(cpu_bytes=size), more)
            _, disk = self.worth.per_gib(Sizes(disk_bytes=size), more)
            cells = (f"{100 * self.curve.hit_rate(blocks):.2f}", f"{cpu:,.1f}", f"{disk:,.1f}")
            rows.append((blocks, (size_text(size), f"{blocks:,}", *cells)))
        return rows

    def _shadow_lines(self) -> list[str]:
        return [
            f"{policy}: "
            + ", ".join(f"{100 * rate:.2f} % in {size:,} blocks" for size, rate in rates.items())
            + f". Of these its knee is {self.knee(policy):,} blocks."
            for policy, rates in self.shadows.items()
        ]

    def _purchase_lines(self) -> list[str]:
        lines = []
        for number, purchase in enumerate(self.purchases):
            parts = [
                f"{size_text(int(size))} of {name}"
                for name, size in (("CPU memory", purchase.cpu_bytes), ("disk", purchase.disk_bytes))
                if size
            ]
            start = f"The next {purchase.money:,.10g} go to" if not number else f"Another {purchase.money:,.10g} go to"
            gain = f"{purchase.seconds_gained:,.1f} s more saved, {100 * purchase.hit_rate:.2f} % hit"
            if purchase.seconds_gained <= 0:
                lines.append(f"Another {purchase.money:,.10g} would save nothing more on this trace.")
                break
            lines.append(f"{start} {' and '.join(parts)}: {gain}.")
        return lines


_COLUMNS = ("size", "blocks", "% hit", "s/GiB of CPU", "s/GiB of disk")


__all__ = ["PURCHASES", "Advice", "costs_of", "read_prices", "services_of"]
