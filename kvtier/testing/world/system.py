"""The operating system as the fs backend sees it: files of simulated disks, threads of simulated time.

`inhabit` puts it under the backend's own modules: wherever one of them uses `os`, `fcntl` and the like it finds these
instead. A call that is not simulated is an error that names it, so nothing reaches the real machine.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import io
import os
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

import aiofiles

from kvtier.testing.world.disk import BLOCK_BYTES, DiskFile, Disks, Folder
from kvtier.testing.world.loop import VirtualLoop
from kvtier.testing.world.weather import Weather

P = ParamSpec("P")
T = TypeVar("T")

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
        self.on_death: Callable[[], None] = lambda: None
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
            file.owner = 0
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


class Threads(Executor):
    """The backend's threads: each call runs whole at a time of its own, between any two callbacks of the loop."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        system = self._system

        def work() -> None:
            self._under_way -= 1
            if future.set_running_or_notify_cancel():
                try:
                    result = fn(*args, **kwargs)
                except Killed:
                    return
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
            if not self._under_way:
                system.loop.call_soon(self._idle.set)

        self._under_way += 1
        self._idle.clear()
        system.loop.outside(system.weather.thread_seconds(system.dice), work)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing to let go of."""

    async def close(self, timeout_seconds: float) -> int:
        """Wait for the calls under way. Returns how many are stuck at the deadline."""
        try:
            if self._under_way:
                await asyncio.wait_for(self._idle.wait(), timeout_seconds)
        except TimeoutError:
            return self._under_way
        return 0


class _AsyncFile:
    """What `aiofiles.open` gives: the calls run on the executor that was named."""

    def __init__(self, system: System, fd: int, executor: Executor) -> None:
        self._system, self._fd, self._executor = system, fd, executor

    async def _run(self, fn: Callable[..., T], *args: object) -> T:
        return await self._system.loop.run_in_executor(self._executor, fn, self._fd, *args)

    async def read(self, length: int = 1 << 20) -> bytes:
        return await self._run(self._system.read, length)

    async def write(self, data: bytes) -> int:
        return await self._run(self._system.write, data)

    async def close(self) -> None:
        await self._run(self._system.close)


def _aiofiles(system: System) -> SimpleNamespace:
    async def open_file(name: str, mode: str, opener: Callable[[str, int], int], executor: Executor) -> _AsyncFile:
        flags = os.O_RDONLY if mode == "rb" else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        fd = await system.loop.run_in_executor(executor, opener, name, flags)
        return _AsyncFile(system, fd, executor)

    return SimpleNamespace(open=open_file)


_MODULES: dict[int, str] = {
    id(os): "os",
    id(fcntl): "fcntl",
    id(time): "time",
    id(socket): "socket",
    id(aiofiles): "aio",
}
_FUNCTIONS = ("fallocate", "filesystem_magic", "statx_direct", "RootThreads")

Opening = tuple[dict[str, Any], str, str]
"""A module's names, one of them, and what stands in for it."""


def openings(package: str) -> list[Opening]:
    """Where the loaded modules of a backend's package touch the machine."""
    found: list[Opening] = []
    for module_name in sorted(sys.modules):
        if module_name == package or module_name.startswith(f"{package}."):
            names = vars(sys.modules[module_name])
            for name, value in list(names.items()):
                own = name in _FUNCTIONS and str(getattr(value, "__module__", "")).startswith(f"{package}.")
                stand_in = name if own else _MODULES.get(id(value))
                if stand_in is not None:
                    found.append((names, name, stand_in))
            found.append((names, "open", "open"))
    return found


@contextmanager
def inhabit(places: Iterable[Opening], system: System) -> Iterator[None]:
    """Let the modules that `openings` listed run on a simulated system, until the block ends."""
    clock = SimpleNamespace(
        time=lambda: 1.7e9 + system.loop.time(),
        monotonic=system.loop.time,
        perf_counter=system.loop.time,
        strftime=time.strftime,
        localtime=time.gmtime,
    )
    locks = {name: getattr(fcntl, name) for name in ("LOCK_EX", "LOCK_SH", "LOCK_NB", "LOCK_UN")}
    stand_ins: dict[str, object] = {
        "os": system,
        "fcntl": SimpleNamespace(flock=system.flock, **locks),
        "time": clock,
        "socket": SimpleNamespace(gethostname=lambda: "simulated"),
        "aio": _aiofiles(system),
        "open": system.open_object,
        "fallocate": system.fallocate,
        "filesystem_magic": lambda fd: 0xEF53,
        "statx_direct": lambda fd: None,
        "RootThreads": lambda name, limit: Threads(system),
    }
    missing = object()
    before = [(names, name, names.get(name, missing)) for names, name, _ in places]
    for names, name, stand_in in places:
        names[name] = stand_ins[stand_in]
    try:
        yield
    finally:
        for names, name, value in before:
            if value is missing:
                del names[name]
            else:
                names[name] = value
