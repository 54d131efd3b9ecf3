"""How much memory this machine, its mount and its cgroup still offer, read before a single page is touched."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvtier.errors import SharedMemoryError

_NO_LIMIT_BYTES = 1 << 62
"""cgroup v1 writes "no limit" as the largest page-aligned integer; anything this large is no limit."""


@dataclass(frozen=True, slots=True)
class Reading:
    """`have_bytes` bytes can still be taken from `where`."""

    where: str
    have_bytes: int


class MemoryLimits(Protocol):
    """Whoever knows the limits a region must stay under. Tests hand in their own."""

    def readings(self, directory: str | None) -> list[Reading]:
        """Every limit that applies to shared memory in `directory` (None: a memfd, which has no mount)."""


def require(limits: MemoryLimits, need_bytes: int, directory: str | None) -> None:
    """Check that every limit leaves room for `need_bytes`.

    Raises SharedMemoryError naming the tightest limit, what is needed and what it has. Touches nothing.
    """
    tightest = min(limits.readings(directory), key=lambda reading: reading.have_bytes, default=None)
    if tightest is not None and tightest.have_bytes < need_bytes:
        raise SharedMemoryError(need_bytes, tightest.have_bytes, tightest.where)


@dataclass(frozen=True, slots=True)
class SystemLimits:
    """The limits of the running Linux system: free space of the mount, MemAvailable, and every enclosing cgroup.

    `proc` is where the kernel's process file system is mounted. A limit that cannot be read is no limit: the
    reservation that follows still ends in a typed error, only later.
    """

    proc: Path = Path("/proc")

    def readings(self, directory: str | None) -> list[Reading]:
        return [*_mount(directory), *self._mem_available(), *self._cgroups()]

    def _mem_available(self) -> Iterator[Reading]:
        for line in _lines(self.proc / "meminfo"):
            if line.startswith("MemAvailable:"):
                yield Reading("MemAvailable", int(line.split()[1]) * 1024)

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
    """What one cgroup version calls its limits, its usage, and the file cache it can give back."""

    limits: tuple[str, ...]
    usage: str
    reclaimable: str


_V1 = _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files(("memory.max", "memory.high"), "memory.current", "inactive_file")


def _mount(directory: str | None) -> Iterator[Reading]:
    if directory is None:
        return
    try:
        stat = os.statvfs(directory)
    except OSError:
        return
    if stat.f_blocks:  # a tmpfs mounted with size=0 has no limit and reports none
        yield Reading(directory, stat.f_bavail * stat.f_frsize)


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
    top = Path(mount_point)
    if mount_root != "/" and not own.startswith(mount_root):
        inner = ""  # the mount shows a subtree this path is not named in, as in a container: its top is what binds us
    else:
        inner = own.removeprefix(mount_root if mount_root != "/" else "").strip("/")
    here = top / inner
    if ".." in here.parts:
        here = top
    while True:
        reading = _reading(files, here)
        if reading is not None:
            yield reading
        if here == top:
            return
        here = here.parent


def _reading(files: _Files, group: Path) -> Reading | None:
    limits = [value for name in files.limits if (value := _number(group / name)) is not None]
    usage = _number(group / files.usage)
    if not limits or usage is None or min(limits) >= _NO_LIMIT_BYTES:
        return None
    reclaimable = 0
    for line in _lines(group / "memory.stat"):
        name, _, text = line.partition(" ")
        if name == files.reclaimable and text.isdigit():
            reclaimable = int(text)
    return Reading(f"the memory limit of cgroup {group}", max(0, min(limits) - max(0, usage - reclaimable)))


def _number(path: Path) -> int | None:
    """The integer in a cgroup file; None where there is no such file or it says `max`."""
    text = "".join(_lines(path)[:1]).strip()
    return int(text) if text.isdigit() else None
