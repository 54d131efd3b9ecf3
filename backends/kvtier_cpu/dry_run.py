"""A dry run of the CPU tier for `kvtier check`: whether this machine can ever have the rows, and whether now."""

from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.options import size_text
from kvtier.tier.memory_limits import MemoryLimits, Reading
from kvtier.tier.registry import DryRun
from kvtier.types.geometry import round_up
from kvtier_cpu.region.populate import HUGE_BYTES
from kvtier_cpu.region.shared_region import RegionSpec

RESERVED_PAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")


def dry_run(spec: RegionSpec, limits: MemoryLimits, pages: Path = RESERVED_PAGES) -> DryRun:
    """The problems and notes of opening a region. It is a problem where a limit is too low whatever is in use, a note
    where memory is only taken now, perhaps by this very stack. Takes no memory; `pages` is the kernel's folder of
    huge pages of 2 MiB.
    """
    in_memory = spec.control_bytes if spec.reserved else spec.size_bytes + spec.control_bytes
    needs = [(in_memory, reading, "cpu_bytes_to_use") for reading in limits.readings()]
    if spec.reserved:
        needs.append((round_up(spec.size_bytes, HUGE_BYTES), _reserved(pages, spec.where), "reserved_huge_pages"))
    problems, notes = [], []
    for need, reading, option in needs:
        reason = f"needs {size_text(need)}; {reading.where}: "
        if reading.total_bytes is not None and reading.total_bytes < need:
            problems.append(ConfigError(f"{reason}{size_text(reading.total_bytes)} at most", option))
        elif reading.have_bytes < need:
            notes.append(f"{reason}{size_text(reading.have_bytes)} now")
    return DryRun(notes=tuple(notes), problems=tuple(problems))


def _reserved(pages: Path, where: str) -> Reading:
    """The reading of huge pages that were set aside; those that the kernel may add when they are wanted count too."""
    total, free, promised, more, added = (
        _number(pages / name)
        for name in ("nr_hugepages", "free_hugepages", "resv_hugepages", "nr_overcommit_hugepages", "surplus_hugepages")
    )
    left = max(0, more - added)
    return Reading(where, max(0, free - promised + left) * HUGE_BYTES, (total + left) * HUGE_BYTES)


def _number(path: Path) -> int:
    """The number in a file of the kernel; 0 where there is none."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0
