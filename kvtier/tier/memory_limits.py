"""The memory that this machine and its cgroup still offer, read before a single page is touched."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from kvtier.errors import SharedMemoryError

_NO_LIMIT_BYTES = 1 << 62
"""cgroup v1 writes "no limit" as the largest page-aligned integer; anything this large is no limit."""


@dataclass(frozen=True, slots=True)
class Reading:
    """`have_bytes` bytes can still be taken from `where`, of `total_bytes` in all; None where that is not known."""

    where: str
    have_bytes: int
    total_bytes: int | None = None


class MemoryLimits(Protocol):
    """The limits that memory must stay under. Tests pass in their own."""

    def readings(self) -> list[Reading]:
        """Every limit that applies to memory of this process."""


def tightest(limits: MemoryLimits) -> Reading | None:
    """The limit that leaves the least room; None if there is none."""
    return min(limits.readings(), key=lambda reading: reading.have_bytes, default=None)


def require(limits: MemoryLimits, need_bytes: int) -> None:
    """Check that every limit leaves room for `need_bytes`.

    Raises SharedMemoryError naming the tightest limit, what is needed and what it has. Touches nothing.
    """
    reading = tightest(limits)
    if reading is not None and reading.have_bytes < need_bytes:
        raise SharedMemoryError(need_bytes, reading.have_bytes, reading.where)


@dataclass(frozen=True, slots=True)
class SystemLimits:
    """The limits of the running Linux system: MemAvailable, and every enclosing cgroup.

    `proc` is where the kernel's process file system is mounted. A limit that cannot be read is no limit: the
    reservation that follows still ends in a typed error, only later.
    """

    proc: Path = Path("/proc")

    def readings(self) -> list[Reading]:
        return [*self._available(), *self._cgroups()]

    def _available(self) -> Iterator[Reading]:
        figures = _figures(self.proc / "meminfo")
        available_kib, total_kib = figures.get("MemAvailable:"), figures.get("MemTotal:")
        if available_kib is not None:
            yield Reading("MemAvailable", available_kib * 1024, None if total_kib is None else total_kib * 1024)

    def _cgroups(self) -> Iterator[Reading]:
        own = dict(_own_cgroups(self.proc))
        for line in _lines(self.proc / "self" / "mountinfo"):
            before, _, after = line.partition(" - ")
            fields, kind = before.split(), after.split()
            if len(fields) < 5 or len(kind) < 3:
                continue
            if kind[0] == "cgroup2" and "" in own:
                yield from _enclosing(_V2, fields[3], fields[4], own[""])
            elif kind[0] == "cgroup" and "memory" in kind[2].split(",") and "memory" in own:
                yield from _enclosing(_V1, fields[3], fields[4], own["memory"])


@dataclass(frozen=True, slots=True)
class _Files:
    """The names in one cgroup version of limits, its usage, and the file cache it can give back."""

    limits: tuple[str, ...]
    usage: str
    reclaimable: str


_V1 = _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files(("memory.max", "memory.high"), "memory.current", "inactive_file")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _own_cgroups(proc: Path) -> Iterator[tuple[str, str]]:
    """(controller, path) of this process; version 2 has the empty controller."""
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        for controller in controllers.split(","):
            yield controller, path


def _enclosing(files: _Files, mount_root: str, mount_point: str, own: str) -> Iterator[Reading]:
    """A reading of each cgroup from this process's own up to the top of the mount that has a limit."""
    top, place = Path(mount_point), PurePosixPath(own)
    # A mount may show a subtree that does not name this path, as in a container. Its top is what limits the process.
    inside = place.is_relative_to(mount_root) and ".." not in place.parts
    here = top / place.relative_to(mount_root) if inside else top
    for group in (here, *here.parents):
        reading = _reading(files, group)
        if reading is not None:
            yield reading
        if group == top:
            return


def _reading(files: _Files, group: Path) -> Reading | None:
    limits = [value for name in files.limits if (value := _number(group / name)) is not None]
    usage = _number(group / files.usage)
    if not limits or usage is None or min(limits) >= _NO_LIMIT_BYTES:
        return None
    reclaimable = _figures(group / "memory.stat").get(files.reclaimable, 0)
    limit = min(limits)
    return Reading(f"the memory limit of cgroup {group}", max(0, limit - max(0, usage - reclaimable)), limit)


def _figures(path: Path) -> dict[str, int]:
    """The numbers of a file of the kernel by their names, one on each line; none where it cannot be read."""
    rows = [line.split() for line in _lines(path)]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _number(path: Path) -> int | None:
    """The integer in a cgroup file; None where there is no such file or it says `max`."""
    text = "".join(_lines(path)[:1]).strip()
    return int(text) if text.isdigit() else None
