"""Backends without a data plane, and distributions that claim to bring backends: for tests of discovery and options."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from kvtier.options import ByteSize, LowerTierOptions, PolicyName, TierOptions
from kvtier.tier.contract import LoadStore, Opened, SlotSpace, TierContext
from kvtier.tier.inspection import Inspectors
from kvtier.tier.registry import Backends, DryRun
from kvtier.types.geometry import Geometry
from kvtier.types.jobs import MISSING, JobResult, TransferJob
from kvtier.types.keys import CPU, FS, GPU, Medium


class Idle(LoadStore):
    """A tier that holds nothing. `opened` counts the calls of open, so a test can say that nothing was opened."""

    medium: ClassVar[Medium] = FS
    Options: ClassVar[type[TierOptions]] = TierOptions
    opened: ClassVar[int] = 0

    def __init__(self, options: TierOptions) -> None:
        self.options = options

    async def open(self, context: TierContext) -> Opened:
        Idle.opened += 1
        return Opened(0)

    async def store(self, job: TransferJob) -> JobResult:
        return JobResult.uniform(job, MISSING)

    async def load(self, job: TransferJob) -> JobResult:
        return JobResult.uniform(job, MISSING)

    async def close(self) -> None:
        """Nothing to release."""


class GPUTier(Idle):
    class _Options(TierOptions):
        device: str = "auto"

    medium = GPU
    Options = _Options


class CPUTier(Idle):
    class _Options(TierOptions):
        CAPACITY_KEY = "cpu_bytes_to_use"

        cpu_bytes_to_use: ByteSize = Field(description="memory for rows, never exceeded")
        policy: PolicyName = "lru"
        huge_pages: bool = True

    medium = CPU
    Options = _Options


class DiskTier(Idle):
    class _Options(LowerTierOptions):
        CAPACITY_KEY = "capacity"

        roots: tuple[Path, ...] = Field(min_length=1)
        capacity: ByteSize
        layout: Literal["slab", "files"] = "slab"
        min_free_bytes: ByteSize = 1 << 30

    medium = FS
    Options = _Options
    BLOCK_SIZE_ALIGNMENT = 4096


class ProbedTier(DiskTier):
    """A disk that wants 3 * 4096 on this machine, and whose folder is called bad when it is named so."""

    async def probe_alignment(self) -> int:
        return 12288

    def dry_run(self, geometry: Geometry, probe: bool) -> DryRun:
        options = self.options
        assert isinstance(options, DiskTier._Options)
        bad = [f"{root}: does not exist; create it" for root in options.roots if probe and root.name == "bad"]
        slot_bytes = tuple(4096 + geometry.aligned_bytes(group) for group in range(geometry.num_groups))
        space = SlotSpace(1 << 20, (options.capacity // (1 << 20),), slot_bytes)
        return DryRun(options.capacity, space, "direct" if probe else "", (), tuple(bad))


class NoMedium(Idle):
    medium = None  # type: ignore[assignment]


class BadAlignment(Idle):
    BLOCK_SIZE_ALIGNMENT = 0


class NoOptions(Idle):
    Options = dict  # type: ignore[assignment]


class Abstract(LoadStore):
    """Implements nothing."""


not_a_class = "a string"

STANDARD = {
    "gpu": "support_backends:GPUTier",
    "cpu": "support_backends:CPUTier",
    "disk": "support_backends:DiskTier",
    "probed": "support_backends:ProbedTier",
}


def add_distribution(
    site: Path, name: str, points: dict[str, str], version: str = "1.0", group: str = "kvtier.backends"
) -> None:
    """Write the metadata of a distribution that brings these backends, or what `group` is for, into a site folder."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = "".join(f"{key} = {value}\n" for key, value in points.items())
    (folder / "entry_points.txt").write_text(f"[{group}]\n{lines}")


def backends_in(*sites: Path) -> Backends:
    """The backends of the distributions in site folders, and no others."""
    return Backends(_points_in(sites))


def inspectors_in(*sites: Path) -> Inspectors:
    """The inspectors of the distributions in site folders, and no others."""
    return Inspectors(_points_in(sites))


def _points_in(sites: Sequence[Path]) -> list[EntryPoint]:
    found = distributions(path=[str(site) for site in sites])
    return [point for distribution in found for point in distribution.entry_points]
