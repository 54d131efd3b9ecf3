"""A real file system on a loop device with a throttle by cgroup. Needs root, and the blkio of cgroup v1."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvtier_fs.io.uring import probe_uring

_BLKIO = Path("/sys/fs/cgroup/blkio")
_READ_OPERATIONS = "blkio.throttle.read_iops_device"
_NAME = re.compile(r"kvtier-kill-([0-9]+)")
_DISK_BYTES = 48 << 20
_TOOLS = ("losetup", "mkfs.ext4", "mount", "umount")


def cannot() -> str | None:
    """Why this machine has no such disk, None if it has."""
    if os.geteuid() != 0:
        return "loop devices and cgroups need root"
    if not (_BLKIO / _READ_OPERATIONS).exists():
        return "there is no blkio.throttle of cgroup v1"
    lacking = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if lacking or not Path("/dev/loop-control").exists():
        return f"no loop devices ({', '.join(lacking) or '/dev/loop-control is missing'})"
    return probe_uring() or None


class SlowDisk:
    """A mounted disk; `slow_down` and `let_go` act on every process that was put into its group."""

    def __init__(self, device: str, folder: Path, group: Path) -> None:
        numbers = os.stat(device).st_rdev
        self.folder = folder
        self._group = group
        self._device = f"{os.major(numbers)}:{os.minor(numbers)}"

    def take_in(self, pid: int) -> None:
        """From now on the process is as slow as the disk says; so are its children."""
        (self._group / "cgroup.procs").write_text(str(pid))

    def slow_down(self, reads_each_second: int) -> None:
        """Let so many reads through each second."""
        (self._group / _READ_OPERATIONS).write_text(f"{self._device} {reads_each_second}")

    def let_go(self) -> None:
        """Remove the throttle, also for what is waiting."""
        (self._group / _READ_OPERATIONS).write_text(f"{self._device} 0")


@contextmanager
def slow_disk(folder: Path) -> Iterator[SlowDisk]:
    """Make the disk in a folder, and undo everything at the end; what a killed run left is undone at the beginning."""
    _clean(folder)
    name = f"kvtier-kill-{os.getpid()}"
    image, mounted, group = folder / f"{name}.img", folder / "mounted", _BLKIO / name
    mounted.mkdir(mode=0o700)
    device = ""
    try:
        with image.open("wb") as file:
            file.truncate(_DISK_BYTES)
        device = _run("losetup", "--find", "--show", str(image)).strip()
        _run("mkfs.ext4", "-q", "-O", "^has_journal", device)
        _run("mount", device, str(mounted))
        mounted.chmod(0o700)
        group.mkdir()
        yield SlowDisk(device, mounted, group)
    finally:
        _undo(mounted, device, group)
        image.unlink(missing_ok=True)


def _undo(mounted: Path, device: str, group: Path) -> None:
    with suppress(OSError):
        for name in os.listdir(group):
            if name == _READ_OPERATIONS and device:
                numbers = os.stat(device).st_rdev
                (group / name).write_text(f"{os.major(numbers)}:{os.minor(numbers)} 0")
        (_BLKIO / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()
    for command in (("umount", str(mounted)), ("losetup", "--detach", device)):
        if command[-1]:
            subprocess.run(command, check=False, capture_output=True)


def _clean(folder: Path) -> None:
    """Undo what runs left behind whose process is gone."""
    for line in _run("losetup", "--list", "--noheadings", "--output", "NAME,BACK-FILE").splitlines():
        device, _, image = line.partition(" ")
        match = _NAME.search(image)
        if match is None or Path("/proc", match[1]).exists():
            continue
        mounted = Path(image.strip().removesuffix(" (deleted)")).parent / "mounted"
        _undo(mounted, device, _BLKIO / match[0])
    for group in _BLKIO.glob("kvtier-kill-*"):
        match = _NAME.fullmatch(group.name)
        if match is not None and not Path("/proc", match[1]).exists():
            with suppress(OSError):
                group.rmdir()


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
