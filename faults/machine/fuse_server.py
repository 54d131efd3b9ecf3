"""A file system that fails and hangs on request: `python fuse_server.py FOLDER MOUNT SWITCH`.

It shows a folder at a mount point. The first byte of the file SWITCH says what it does to requests, bit by bit; the
64-bit words from byte 8 on count requests that succeeded, that failed and that hung. See `fuse`.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import mfusepy

READS, WRITES, HANGS = 1, 2, 4
COUNTERS = struct.Struct("<QQQ")
COUNTERS_AT = 8
_PR_SET_PDEATHSIG = 1
_STAT = ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks", "st_ino", "st_dev")
_DROPPED = os.O_DIRECT | os.O_NOFOLLOW  # the server's own buffers are not aligned


class Switched(mfusepy.Operations):
    """Passes everything on to a folder, unless the switch says otherwise."""

    use_ns = True

    def __init__(self, folder: str, switch: mmap.mmap) -> None:
        self._folder = folder
        self._switch = switch
        self._counts = [0, 0, 0]
        self._lock = threading.Lock()

    def _path(self, path: str) -> str:
        return self._folder + path

    def _count(self, number: int) -> None:
        with self._lock:
            self._counts[number] += 1
            COUNTERS.pack_into(self._switch, COUNTERS_AT, *self._counts)

    def _gate(self, bit: int) -> None:
        """Hang while that is asked for, then fail if requests of this kind are to."""
        if self._switch[0] & HANGS:
            self._count(2)
            while self._switch[0] & HANGS:
                time.sleep(0.005)
        if self._switch[0] & bit:
            self._count(1)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._count(0)

    def _change(self, change: Callable[..., Any], *args: Any) -> int:
        self._gate(WRITES)
        change(*args)
        return 0

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        status = os.fstat(fh) if fh is not None else os.lstat(self._path(path))
        times = {"st_atime": status.st_atime_ns, "st_mtime": status.st_mtime_ns, "st_ctime": status.st_ctime_ns}
        return {name: getattr(status, name) for name in _STAT} | times

    def statfs(self, path: str) -> dict[str, int]:
        status = os.statvfs(self._path(path))
        return {name: getattr(status, name) for name in dir(status) if name.startswith("f_")}

    def readdir(self, path: str, fh: int) -> list[tuple[str, dict[str, int], int]]:
        """Names with their inodes: a name with inode 0 would not be shown."""
        self._gate(READS)
        with os.scandir(self._path(path)) as entries:
            return [(entry.name, {"st_ino": entry.inode(), "st_mode": 0}, 0) for entry in entries]

    def access(self, path: str, amode: int) -> int:
        return 0

    def open(self, path: str, flags: int) -> int:
        self._gate(READS)
        return os.open(self._path(path), flags & ~_DROPPED)

    def create(self, path: str, mode: int, flags: int) -> int:  # type: ignore[override]
        self._gate(WRITES)
        return os.open(self._path(path), flags & ~_DROPPED | os.O_CREAT, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        self._gate(READS)
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._gate(WRITES)
        return os.pwrite(fh, data, offset)

    def fallocate(self, path: str, mode: int, offset: int, size: int, fh: int) -> int:
        if mode:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return self._change(os.posix_fallocate, fh, offset, size)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        return self._change(os.truncate, self._path(path) if fh is None else fh, length)

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        return self._change(os.fsync, fh)

    def mkdir(self, path: str, mode: int) -> int:
        return self._change(os.mkdir, self._path(path), mode)

    def chmod(self, path: str, mode: int) -> int:
        return self._change(os.chmod, self._path(path), mode)

    def unlink(self, path: str) -> int:
        return self._change(os.unlink, self._path(path))

    def rmdir(self, path: str) -> int:
        return self._change(os.rmdir, self._path(path))

    def rename(self, old: str, new: str) -> int:
        return self._change(os.rename, self._path(old), self._path(new))

    def link(self, target: str, source: str) -> int:
        return self._change(os.link, self._path(source), self._path(target))

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        self._gate(WRITES)
        os.utime(self._path(path), ns=times)
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0


def main(folder: str, mount: str, switch: str) -> None:
    """Serve until it is unmounted or the process that started this dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with open(switch, "r+b") as file:
        shared = mmap.mmap(file.fileno(), 0)
    mfusepy.FUSE(
        Switched(folder, shared), mount, foreground=True, allow_other=True, default_permissions=True, fsname="switched",
        max_threads=64, max_idle_threads=16, hard_remove=True, direct_io=True, use_ino=True, attr_timeout=0.0,
        entry_timeout=0.0, negative_timeout=0.0,
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
