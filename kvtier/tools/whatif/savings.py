"""What hits are worth: prefill seconds saved by a CPU tier and a disk below it, and where money brings most of them.

Both tiers see the same uses, so a disk larger than the CPU tier holds what that holds, and more: the CPU tier hits what
the curve says for its size, the disk what the curve says for its own beyond that. A hit saves the time to compute its
tokens, less the time to load its bytes; a tier that loads more slowly than the engine computes saves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.tools.whatif.miss_ratio import Curve

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


@dataclass(frozen=True, slots=True)
class Prices:
    """Money for a GiB of each."""

    cpu_gib: float
    disk_gib: float

    def buy(self, have: Sizes, money: float, cpu_share: float) -> Sizes:
        """What there is after so much of the money went to the CPU tier and the rest to the disk."""
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
    """What sizes are worth over a trace of this curve."""

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
        """Seconds saved for each GiB of (CPU, disk), of the next so many bytes of it."""
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
