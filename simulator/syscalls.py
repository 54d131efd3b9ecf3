"""The operating system as the fs backend sees it: the calls of one process on files of simulated disks.

A call that is not simulated is an error that names it, so nothing reaches the real machine.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

from simulator.disk import BLOCK_BYTES, DiskFile, Disks, Folder, SimulatedRoot
from simulator.fault_profile import FaultProfile
from simulator.file_objects import RawFile, SimulatedPaths
from simulator.loop import VirtualLoop

FIRST_FD = 1_000_000
DISK_BYTES = 1 << 40
NAMES_FAIL = 0.25


class Killed(BaseException):
    """The process is dead: none of its calls returns any more."""


@dataclass(slots=True)
class OpenFile:
    """An open file or folder of a process."""

    folder: Folder
    file: DiskFile | None
    name: str
    position: int = 0


class SimulatedSystem:
    """One process's system calls, by the names of the module `os`. A planned crash kills it at one of them."""

    def __init__(self, disks: Disks, loop: VirtualLoop, rng: Random, pid: int) -> None:
        self.disks = disks
        self.loop = loop
        self.rng = rng
        self.pid = pid
        self.fault_profile = FaultProfile()
        self.clock_off_seconds = 0.0
        self.fds: dict[int, OpenFile] = {}
        self.calls = 0
        self.die_at_call = 0
        self.writes = 0
        self.die_at_write = 0
        self.on_death: Callable[[], None] = lambda: None
        self.on_time: Callable[[], None] = lambda: None
        self.on_change: Callable[[], None] = lambda: None
        self.alive = True
        self.renames_new = rng.random() < 0.8
        self.path = SimulatedPaths(self)
        self._next_fd = FIRST_FD

    def __getattr__(self, name: str) -> Any:
        if name.isupper() or name in ("strerror", "fspath", "fsencode", "stat_result", "PathLike"):
            return getattr(os, name)
        raise AttributeError(f"the simulated system has no os.{name}")

    def _call(self, may_fail: float = 0.0) -> None:
        """Every call begins here. `may_fail` weighs the chance of an error; looking names up fails more rarely."""
        self.calls += 1
        if self.alive and self.calls == self.die_at_call:
            self.kill()
            self.on_death()
        if not self.alive:
            raise Killed
        if may_fail and self.rng.random() < may_fail * self.fault_profile.call_fails:
            raise _error(errno.EIO)

    def writing(self, seconds: float) -> None:
        """The engine begins a write that takes this long; a planned crash may come while it is in flight."""
        self.writes += 1
        if self.writes == self.die_at_write:
            self.loop.outside(self.rng.random() * seconds, self.on_time)

    def kill(self) -> None:
        """The process dies here. Its locks are released; what it wrote stays."""
        self.alive = False
        for fd, open_file in self.fds.items():
            if open_file.file is not None and open_file.file.owner == (self.pid, fd):
                open_file.file.owner = None

    def _of(self, fd: int) -> OpenFile:
        try:
            return self.fds[fd]
        except KeyError:
            raise _error(errno.EBADF) from None

    def file(self, fd: int) -> DiskFile:
        """The file behind a descriptor. Raises OSError for a folder or a closed one."""
        file = self._of(fd).file
        if file is None:
            raise _error(errno.EISDIR)
        return file

    def _root(self, path: str) -> SimulatedRoot:
        folder = self.disks.folders.get(path)
        if folder is None or not folder.exists:
            raise _error(errno.ENOENT, path)
        return folder

    def _entry(self, name: str, dir_fd: int) -> DiskFile | Folder:
        folder = self._of(dir_fd).folder
        entry = folder if name == "." else folder.names.get(name)
        if entry is None:
            raise _error(errno.ENOENT, name)
        return entry

    def _add(self, open_file: OpenFile) -> int:
        self._next_fd += 1
        self.fds[self._next_fd] = open_file
        return self._next_fd

    # -- names ---------------------------------------------------------------------------------------------------

    def open(self, path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        self._call(may_fail=NAMES_FAIL if dir_fd is not None else 0)
        if dir_fd is None:
            return self._add(OpenFile(self._root(path), None, path))
        folder = self._of(dir_fd).folder
        entry = folder if path == "." else folder.names.get(path)
        if entry is None:
            if not flags & os.O_CREAT:
                raise _error(errno.ENOENT, path)
            entry = folder.names[path] = self.disks.new_file(self.loop.time())
            entry.mode = mode & 0o777
        elif flags & os.O_EXCL and flags & os.O_CREAT:
            raise _error(errno.EEXIST, path)
        if isinstance(entry, Folder):
            return self._add(OpenFile(entry, None, path))
        if flags & os.O_DIRECTORY:
            raise _error(errno.ENOTDIR, path)
        if flags & os.O_TRUNC:
            entry.truncate(0)
        return self._add(OpenFile(folder, entry, path))

    def close(self, fd: int) -> None:
        self._call()
        gone = self._of(fd)
        del self.fds[fd]
        if gone.file is not None and gone.file.owner == (self.pid, fd):
            gone.file.owner = None

    def mkdir(self, path: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._call(may_fail=NAMES_FAIL if dir_fd is not None else 0)
        if dir_fd is None:
            self.disks.folders[path].exists = True
            return
        names = self._of(dir_fd).folder.names
        if path in names:
            raise _error(errno.EEXIST, path)
        names[path] = self.disks.new_folder()

    def chmod(self, path: str, mode: int) -> None:
        self._call()

    def fchmod(self, fd: int, mode: int) -> None:
        self._call()
        open_file = self._of(fd)
        (open_file.file or open_file.folder).mode = mode

    def listdir(self, fd: int) -> list[str]:
        self._call(may_fail=NAMES_FAIL)
        return sorted(self._of(fd).folder.names)

    def unlink(self, name: str, *, dir_fd: int) -> None:
        self._call(may_fail=NAMES_FAIL)
        if isinstance(self._entry(name, dir_fd), Folder):
            raise _error(errno.EISDIR, name)
        del self._of(dir_fd).folder.names[name]

    remove = unlink

    def replace(self, source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        self._call(may_fail=NAMES_FAIL)
        entry = self._entry(source, src_dir_fd)
        del self._of(src_dir_fd).folder.names[source]
        self._name(entry, target, dst_dir_fd)

    rename = replace

    def link(self, source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int, follow_symlinks: bool = True) -> None:
        self._call(may_fail=NAMES_FAIL)
        if not self.renames_new:
            raise _error(errno.EPERM, target)
        self._give(self._entry(source, src_dir_fd), target, dst_dir_fd)

    def rename_new(self, old: str, new: str, old_folder_fd: int, new_folder_fd: int) -> bool:
        """Stands in for the backend's own system call: False where the file system has no such promise."""
        self._call(may_fail=NAMES_FAIL)
        if not self.renames_new:
            return False
        self._give(self._entry(old, old_folder_fd), new, new_folder_fd)
        del self._of(old_folder_fd).folder.names[old]
        return True

    def _give(self, entry: DiskFile | Folder, name: str, dir_fd: int) -> None:
        if name in self._of(dir_fd).folder.names:
            raise _error(errno.EEXIST, name)
        self._name(entry, name, dir_fd)

    def _name(self, entry: DiskFile | Folder, name: str, dir_fd: int) -> None:
        self._of(dir_fd).folder.names[name] = entry
        if isinstance(entry, DiskFile):
            entry.final_name = name

    # -- what files are ------------------------------------------------------------------------------------------

    def fstat(self, fd: int) -> SimpleNamespace:
        self._call()
        open_file = self._of(fd)
        return _status(open_file.folder, open_file.file)

    def stat(self, name: str | int, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> SimpleNamespace:
        if isinstance(name, int):
            return self.fstat(name)
        self._call(may_fail=NAMES_FAIL if dir_fd is not None else 0)
        if dir_fd is None:
            return _status(self._root(name), None)
        entry = self._entry(name, dir_fd)
        return _status(entry, None) if isinstance(entry, Folder) else _status(self._of(dir_fd).folder, entry)

    def utime(
        self,
        path: str | int,
        times: tuple[float, float] | None = None,
        *,
        dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        self._call(may_fail=NAMES_FAIL)
        if isinstance(path, int):
            entry: DiskFile | Folder = self.file(path)
        else:
            assert dir_fd is not None
            entry = self._entry(path, dir_fd)
        if isinstance(entry, DiskFile):
            entry.touched = self.wall() if times is None else times[1]

    def fstatvfs(self, fd: int) -> SimpleNamespace:
        self._call()
        free = DISK_BYTES // BLOCK_BYTES
        return SimpleNamespace(f_bavail=free, f_bfree=free, f_blocks=free, f_frsize=BLOCK_BYTES, f_bsize=BLOCK_BYTES)

    def ftruncate(self, fd: int, length: int) -> None:
        self._call()
        file = self.file(fd)
        if length < len(file.data):
            file.truncate(length)
        file.grow(length)

    def access(self, path: str, mode: int, *, dir_fd: int | None = None, **more: object) -> bool:
        self._call()
        return self.path.isdir(path) if dir_fd is None else path in self._of(dir_fd).folder.names

    # -- bytes ---------------------------------------------------------------------------------------------------

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        self._call(may_fail=1.0)
        return bytes(self.file(fd).data[offset : offset + length])

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        data = self.pread(fd, sum(map(len, buffers)), offset)
        done = 0
        for buffer in buffers:
            part = data[done : done + len(buffer)]
            buffer[: len(part)] = part
            done += len(part)
        return done

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        self._call(may_fail=1.0)
        file = self.file(fd)
        file.write(offset, data)
        file.touched = self.wall()
        self.on_change()
        return len(data)

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        return self.pwrite(fd, b"".join(buffers), offset)

    def read(self, fd: int, length: int) -> bytes:
        self._call()
        open_file = self._of(fd)
        data = bytes(self.file(fd).data[open_file.position : open_file.position + length])
        open_file.position += len(data)
        return data

    def write(self, fd: int, data: bytes | memoryview) -> int:
        open_file = self._of(fd)
        written = self.pwrite(fd, data, open_file.position)
        open_file.position += written
        return written

    def open_object(
        self, fd: int | str, mode: str = "rb", buffering: int = -1, closefd: bool = True
    ) -> io.BufferedIOBase:
        """Stands in for the built-in `open`: of a descriptor, or of what the kernel says of a process."""
        if isinstance(fd, str):
            return io.BytesIO(self._proc_file(fd))
        raw = RawFile(self, fd, closefd)
        return io.BufferedReader(raw) if mode == "rb" else io.BufferedWriter(raw)

    fdopen = open_object

    def _proc_file(self, path: str) -> bytes:
        """/proc/PID/stat of this process, the only one there is; its pid is also when it began."""
        if path != f"/proc/{self.pid}/stat":
            raise _error(errno.ENOENT, path)
        return b"%d (simulated) S " % self.pid + b"0 " * 18 + b"%d 0" % self.pid

    def fsync(self, fd: int) -> None:
        self._call(may_fail=1.0)
        open_file = self._of(fd)
        if open_file.file is None:
            open_file.folder.flush()
        else:
            open_file.file.flush()

    fdatasync = fsync

    def fallocate(self, fd: int, offset: int, length: int) -> bool:
        """Stands in for the backend's own raw system call."""
        self._call()
        if self.rng.random() < self.fault_profile.disk_full:
            raise _error(errno.ENOSPC)
        self.file(fd).reserve(offset, length)
        self.on_change()
        return True

    # -- the process ---------------------------------------------------------------------------------------------

    def getpid(self) -> int:
        return self.pid

    def geteuid(self) -> int:
        return 0

    getuid = geteuid

    def urandom(self, count: int) -> bytes:
        return self.rng.randbytes(count)

    def wall(self) -> float:
        """The time of day."""
        return 1.7e9 + self.loop.time() + self.clock_off_seconds

    def flock(self, fd: int, operation: int) -> None:
        """Stands in for `fcntl.flock`; a lock goes with the open file that took it, or with the process."""
        self._call()
        file = self.file(fd)
        if operation & fcntl.LOCK_UN:
            if file.owner == (self.pid, fd):
                file.owner = None
        elif file.owner not in (None, (self.pid, fd)):
            raise _error(errno.EWOULDBLOCK)
        else:
            file.owner = self.pid, fd


def _error(number: int, *about: str) -> OSError:
    return OSError(number, os.strerror(number), *about)


def _status(folder: Folder, file: DiskFile | None) -> SimpleNamespace:
    if file is None:
        return SimpleNamespace(
            st_mode=stat.S_IFDIR | folder.mode, st_size=BLOCK_BYTES, st_uid=0, st_blocks=8, st_ino=folder.inode
        )
    return SimpleNamespace(
        st_mode=stat.S_IFREG | file.mode,
        st_size=len(file.data),
        st_uid=0,
        st_blocks=len(file.blocks) * (BLOCK_BYTES // 512),
        st_nlink=1,
        st_ino=file.inode,
        st_mtime=file.touched,
        st_mtime_ns=int(file.touched * 1e9),
    )
