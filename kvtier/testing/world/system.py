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

from kvtier.testing.world.disk import BLOCK_BYTES, DiskFile, Disks, Folder
from kvtier.testing.world.loop import VirtualLoop
from kvtier.testing.world.weather import Weather

FIRST_FD = 1_000_000
DISK_BYTES = 1 << 40


class Killed(BaseException):
    """The process is dead: no call of it returns any more."""


@dataclass(slots=True)
class OpenFile:
    """An open file or folder of a process."""

    folder: Folder
    file: DiskFile | None
    name: str
    position: int = 0


class System:
    """One process's system calls, by the names of the module `os`. Dead once killed, at a random call if so planned."""

    def __init__(self, disks: Disks, loop: VirtualLoop, dice: Random, pid: int) -> None:
        self.disks = disks
        self.loop = loop
        self.dice = dice
        self.pid = pid
        self.weather = Weather()
        self.fds: dict[int, OpenFile] = {}
        self.calls = 0
        self.die_at_call = 0
        self.writes = 0
        self.die_at_write = 0
        self.on_death: Callable[[], None] = lambda: None
        self.on_time: Callable[[], None] = lambda: None
        self.on_change: Callable[[], None] = lambda: None
        self.alive = True
        self.path = _Paths(self)
        self._next_fd = FIRST_FD

    def __getattr__(self, name: str) -> Any:
        if name.isupper() or name in ("strerror", "fspath", "stat_result", "PathLike"):
            return getattr(os, name)
        raise AttributeError(f"the simulated system has no os.{name}")

    def _call(self, may_fail: bool = False) -> None:
        self.calls += 1
        if self.alive and self.calls == self.die_at_call:
            self.kill()
            self.on_death()
        if not self.alive:
            raise Killed
        if may_fail and self.dice.random() < self.weather.call_fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def writing(self, seconds: float) -> None:
        """The engine begins a write that takes this long; the process may be planned to die while it is under way."""
        self.writes += 1
        if self.writes == self.die_at_write:
            self.loop.outside(self.dice.random() * seconds, self.on_time)

    def kill(self) -> None:
        """The process dies here. Its locks go; what it wrote stays."""
        self.alive = False
        for open_file in self.fds.values():
            if open_file.file is not None and open_file.file.owner == self.pid:
                open_file.file.owner = 0

    def _of(self, fd: int) -> OpenFile:
        try:
            return self.fds[fd]
        except KeyError:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF)) from None

    def file(self, fd: int) -> DiskFile:
        """The file behind a descriptor. Raises OSError for a folder or a closed one."""
        file = self._of(fd).file
        if file is None:
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        return file

    def _folder(self, path: str) -> Folder:
        folder = self.disks.folders.get(path)
        if folder is None or not folder.exists:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return folder

    def _add(self, open_file: OpenFile) -> int:
        self._next_fd += 1
        self.fds[self._next_fd] = open_file
        return self._next_fd

    # -- names ---------------------------------------------------------------------------------------------------

    def open(self, path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        self._call()
        if dir_fd is None:
            return self._add(OpenFile(self._folder(path), None, path))
        folder = self._of(dir_fd).folder
        file = folder.names.get(path)
        if file is None:
            if not flags & os.O_CREAT:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            file = folder.names[path] = self.disks.new_file()
            file.mode = mode & 0o777
        elif flags & os.O_EXCL and flags & os.O_CREAT:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        if flags & os.O_TRUNC:
            file.truncate(0)
        return self._add(OpenFile(folder, file, path))

    def close(self, fd: int) -> None:
        self._call()
        gone = self._of(fd)
        del self.fds[fd]
        if (
            gone.file is not None
            and gone.file.owner == self.pid
            and gone.file not in [o.file for o in self.fds.values()]
        ):
            gone.file.owner = 0

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        self._call()
        self.disks.folders[path].exists = True

    def chmod(self, path: str, mode: int) -> None:
        self._call()

    def fchmod(self, fd: int, mode: int) -> None:
        self._call()
        self.file(fd).mode = mode

    def listdir(self, fd: int) -> list[str]:
        self._call()
        return sorted(self._of(fd).folder.names)

    def unlink(self, name: str, *, dir_fd: int) -> None:
        self._call()
        if self._of(dir_fd).folder.names.pop(name, None) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)

    remove = unlink

    def replace(self, source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        self._call()
        names = self._of(src_dir_fd).folder.names
        if source not in names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
        self._of(dst_dir_fd).folder.names[target] = names.pop(source)

    rename = replace

    # -- what files are ------------------------------------------------------------------------------------------

    def fstat(self, fd: int) -> SimpleNamespace:
        self._call()
        open_file = self._of(fd)
        return _status(open_file.folder, open_file.file)

    def stat(self, name: str | int, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> SimpleNamespace:
        if isinstance(name, int):
            return self.fstat(name)
        self._call()
        if dir_fd is None:
            return _status(self._folder(name), None)
        folder = self._of(dir_fd).folder
        if name not in folder.names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return _status(folder, folder.names[name])

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

    def access(self, path: str, mode: int, **more: object) -> bool:
        self._call()
        return self.path.isdir(path)

    # -- bytes ---------------------------------------------------------------------------------------------------

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        self._call(may_fail=True)
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
        self._call(may_fail=True)
        self.file(fd).write(offset, data)
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

    def open_object(self, fd: int, mode: str = "rb", buffering: int = -1, closefd: bool = True) -> io.BufferedIOBase:
        """Stands in for the built-in `open` of a descriptor."""
        raw = _RawFile(self, fd, closefd)
        return io.BufferedReader(raw) if mode == "rb" else io.BufferedWriter(raw)

    fdopen = open_object

    def fsync(self, fd: int) -> None:
        self._call(may_fail=True)
        open_file = self._of(fd)
        if open_file.file is None:
            open_file.folder.flush()
        else:
            open_file.file.flush()

    fdatasync = fsync

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        """Stands in for the backend's own raw system call."""
        self._call()
        if self.dice.random() < self.weather.disk_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.file(fd).reserve(offset, length)
        self.on_change()

    # -- the process ---------------------------------------------------------------------------------------------

    def getpid(self) -> int:
        return self.pid

    def geteuid(self) -> int:
        return 0

    getuid = geteuid

    def urandom(self, count: int) -> bytes:
        return self.dice.randbytes(count)

    def flock(self, fd: int, operation: int) -> None:
        """Stands in for `fcntl.flock`; a lock is given up with the process."""
        self._call()
        file = self.file(fd)
        if operation & fcntl.LOCK_UN:
            file.owner = 0 if file.owner == self.pid else file.owner
        elif file.owner not in (0, self.pid):
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))
        else:
            file.owner = self.pid


class _RawFile(io.RawIOBase):
    """A descriptor as a file object."""

    def __init__(self, system: System, fd: int, closefd: bool) -> None:
        self._system, self._fd, self._closefd = system, fd, closefd

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._system.read(self._fd, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def write(self, data: Any) -> int:
        return self._system.write(self._fd, bytes(data))

    def close(self) -> None:
        if not self.closed and self._closefd and self._system.alive:
            self._system.close(self._fd)
        super().close()


class _Paths:
    """What `os.path` is asked."""

    def __init__(self, system: System) -> None:
        self._system = system

    def __getattr__(self, name: str) -> Any:
        if name in ("dirname", "basename", "join", "normpath", "isabs", "split"):
            return getattr(os.path, name)
        raise AttributeError(f"the simulated system has no os.path.{name}")

    def isdir(self, path: str) -> bool:
        folders = self._system.disks.folders
        if path in folders:
            return folders[path].exists
        return any(os.path.dirname(known) == path for known in folders)

    exists = isdir

    def islink(self, path: str) -> bool:
        return False


def _status(folder: Folder, file: DiskFile | None) -> SimpleNamespace:
    if file is None:
        return SimpleNamespace(st_mode=stat.S_IFDIR | folder.mode, st_size=BLOCK_BYTES, st_uid=0, st_blocks=8)
    blocks = len(file.blocks) * (BLOCK_BYTES // 512)
    return SimpleNamespace(
        st_mode=stat.S_IFREG | file.mode, st_size=len(file.data), st_uid=0, st_blocks=blocks, st_nlink=1, st_mtime=0.0
    )
