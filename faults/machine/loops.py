"""Small disks that fill up, freeze, slow down and end: file systems on loop devices."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from . import guard
from .undo import Machine, run, without_root

MIB = 1 << 20
MKFS = {
    "ext4": ("mkfs.ext4", "-q", "-m", "0"),
    "btrfs": ("mkfs.btrfs", "-q"),
    "xfs": ("mkfs.xfs", "-q", "-m", "reflink=1"),
}
_THROTTLES = Path("/sys/fs/cgroup/blkio")


@dataclass(frozen=True, slots=True)
class Disk:
    """A mounted file system: where it is mounted, on which block device, from which file."""

    mount: Path
    device: str
    image: Path

    @property
    def free_bytes(self) -> int:
        status = os.statvfs(self.mount)
        return status.f_bavail * status.f_frsize

    @property
    def used_bytes(self) -> int:
        """Everything that the file system itself says is taken, once what it does later has been done."""
        run("sync", "--file-system", self.mount)
        status = os.statvfs(self.mount)
        return (status.f_blocks - status.f_bfree) * status.f_frsize

    @property
    def free_inodes(self) -> int:
        return os.statvfs(self.mount).f_favail

    @property
    def moved_bytes(self) -> int:
        """Bytes the device has read and written since it was made, by the kernel's account."""
        number = os.stat(self.device).st_rdev
        fields = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat").read_text().split()
        return (int(fields[2]) + int(fields[6])) * 512

    def fill(self, leave_bytes: int = 0) -> Path:
        """Take every byte that is left, but for some, as another process would; removing the file frees them."""
        ballast = self.mount / "ballast"
        fd = os.open(ballast, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            for size in (MIB, 4096, 512):
                with suppress(OSError):
                    while self.free_bytes - size >= leave_bytes:
                        os.write(fd, bytes(size))
            os.fsync(fd)
        finally:
            os.close(fd)
        return ballast

    def take_inodes(self, leave: int = 0) -> list[Path]:
        """Take every inode that is left, but for some, as another process would."""
        taken: list[Path] = []
        while self.free_inodes > leave:
            path = self.mount / f"taken-{len(taken)}"
            try:
                path.touch()
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                continue  # the store was faster
            taken.append(path)
        return taken


def without_loops(kind: str = "ext4") -> str | None:
    """Why no small disk with this file system can be made here, if so."""
    missing = next((name for name in ("losetup", MKFS[kind][0], "mount") if not shutil.which(name)), None)
    if missing is not None:
        return f"needs {missing}"
    if kind not in Path("/proc/filesystems").read_text().split() and not _loadable(kind):
        return f"needs a kernel with {kind}"
    return without_root() or (None if os.path.exists("/dev/loop-control") else "needs loop devices")


def _loadable(module: str) -> bool:
    """Whether the kernel has a module by this name, which the first mount loads."""
    command = ["modprobe", "--dry-run", "--quiet", module]
    return shutil.which("modprobe") is not None and not subprocess.run(command, check=False).returncode


def without_throttle() -> str | None:
    """Why no disk can be slowed down here, if so."""
    there = (_THROTTLES / "blkio.throttle.write_bps_device").exists()
    return without_loops() or (None if there else "needs blkio.throttle (cgroup v1)")


@contextmanager
def loop_device(machine: Machine, image: Path, *words: str) -> Iterator[str]:
    """The block device of a file. More arguments go to losetup."""
    with machine.changed("detach", str(image)):
        yield run("losetup", "--find", "--show", *words, image).strip()


@contextmanager
def mounted(kind: str, source: str | Path, folder: Path, options: str = "") -> Iterator[Path]:
    """A file system mounted at a folder, made if it is not there. Raises RuntimeError if it is in use at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    run("mount", "-t", kind, *(["-o", options] if options else []), source, folder)
    try:
        yield folder
    finally:
        unmount(folder)


def unmount(folder: Path) -> None:
    """Unmount a file system. Raises RuntimeError if it stays in use; it is detached all the same then.

    A ring releases its files in the background, and I/O may still be in flight when a store was closed.
    """
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            run("umount", folder)
        except RuntimeError as error:
            busy = error
            if "busy" not in str(error):
                break
            run("sleep", "0.05")
        else:
            return
    run("umount", "--lazy", folder)
    raise busy


@contextmanager
def file_system(
    machine: Machine, kind: str, folder: Path, mib: int, mkfs: Sequence[str] = (), options: str = "", losetup: str = ""
) -> Iterator[Disk]:
    """A file system of its own in a new folder, on a loop device: ext4, btrfs, or XFS with reflinks."""
    folder.mkdir(parents=True)
    image = folder / "image"
    with open(image, "wb") as file:
        file.truncate(mib * MIB)
    with loop_device(machine, image, *losetup.split()) as device:
        run(*MKFS[kind], *mkfs, device)
        with mounted(kind, device, folder / "mount", options) as mount:
            yield Disk(mount, device, image)


def ext4(
    machine: Machine, folder: Path, mib: int = 64, mkfs: tuple[str, ...] = (), options: str = "", losetup: str = ""
) -> AbstractContextManager[Disk]:
    """An ext4 file system of its own in a new folder, on a loop device."""
    return file_system(machine, "ext4", folder, mib, mkfs, options, losetup)


@contextmanager
def frozen(machine: Machine, disk: Disk) -> Iterator[None]:
    """Nothing is written to a disk meanwhile: writers wait. Reading goes on."""
    with machine.changed("thaw", str(disk.mount)):
        guard.freeze(str(disk.mount), guard.FIFREEZE)
        yield


@contextmanager
def throttled(machine: Machine, disk: Disk, what: str, value: int) -> Iterator[None]:
    """At most `value` a second reach a disk and come from it, of `what`: `bps` (bytes) or `iops` (requests)."""
    number = os.stat(disk.device).st_rdev
    name = f"{os.major(number)}:{os.minor(number)}"
    read, write = (str(_THROTTLES / f"blkio.throttle.{way}_{what}_device") for way in ("read", "write"))
    with machine.changed("write", read, f"{name} 0"), machine.changed("write", write, f"{name} 0"):
        for path in (read, write):
            Path(path).write_text(f"{name} {value}")
        yield
