"""A listening Unix socket at a path of its own, for this user alone, also after a process that was killed.

Beside it lies `PATH.lock`, locked as long as the process lives, with the identity of the socket file in it. So a socket
that a killed process left is known, and nothing else at the path is ever removed. `LockTouches` has the lock file
outlive programs that clean up /tmp: those spare the socket of a process that runs, and files that were used of late.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import stat
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.aio.process_lock import keep_from_children, lock_file, share_with_children
from kvtier.errors import ResourceError

WAITING_MAX = 64
"""Connections that wait to be accepted, at most."""
TOUCH_SECONDS = 3600.0
"""How often the lock file is touched. Files in /tmp are removed after days."""
_IDENTITY_BYTES_MAX = 128
_TRIES = 8
_NO_SOCKET = b"other"


@dataclass(slots=True)
class SocketFile:
    """A socket of type `kind` that listens at `path`. `fd` is non-blocking. Children that are forked do not have it."""

    path: str
    kind: int
    fd: int
    lock: int
    identity: bytes

    @classmethod
    def claim(cls, path: str, kind: int = socket.SOCK_STREAM, wait_seconds: float = 0.0) -> SocketFile:
        """Listen at a path. Raises ResourceError if another process does, also after a while, or it is not free else.

        The call makes file calls, which a disk may hold up.
        """
        try:
            lock = _lock(path, time.monotonic() + wait_seconds)
            try:
                _remove_left_behind(path, lock)
                return _listen(path, kind, lock)
            except BaseException:
                if not (os.path.lexists(path) and os.fstat(lock).st_size):  # it says nothing of a socket
                    os.unlink(_lock_path(path))
                _unlock(lock)
                raise
        except OSError as error:
            raise ResourceError(f"{path}: {error.strerror or error}") from error

    def accept(self) -> socket.socket:
        """The next connection. Raises BlockingIOError if none waits."""
        with _borrowed(self.fd, self.kind) as listening:
            return listening.accept()[0]

    def touch(self) -> None:
        """Have the lock file look used. Where that fails nothing changes."""
        with suppress(OSError):
            os.utime(_lock_path(self.path), follow_symlinks=False)

    def withdraw(self) -> None:
        """Remove the socket, unless there is something else at its path: no process connects any more. Idempotent."""
        with suppress(OSError):
            if _identity(self.path) == self.identity:
                os.unlink(self.path)
        if self.fd >= 0:
            _close(self.fd)
            self.fd = -1

    def release(self) -> None:
        """Withdraw the socket, and then let another process claim the path."""
        self.withdraw()
        with suppress(OSError):
            os.unlink(_lock_path(self.path))
        _unlock(self.lock)


class LockTouches:
    """Touches the lock file of a socket again and again, from this event loop on, in a thread of `pool`, until `end`.

    A file system that does not answer holds up nothing, and gets no second call.
    """

    def __init__(self, file: SocketFile, pool: DaemonPool) -> None:
        self._file, self._pool = file, pool
        self._loop = asyncio.get_running_loop()
        self._last: Future[None] | None = None
        self._begin_wait()

    def _begin_wait(self) -> None:
        self._timer = self._loop.call_later(TOUCH_SECONDS, self._touch)

    def _touch(self) -> None:
        if self._last is None or self._last.done():
            with suppress(OSError):  # the system has no thread to give
                self._last = self._pool.submit(self._file.touch)
        self._begin_wait()

    def end(self) -> None:
        """Touch it no more. Idempotent."""
        self._timer.cancel()


def _lock_path(path: str) -> str:
    return f"{path}.lock"


def _lock(path: str, deadline: float) -> int:
    """The locked file beside the socket. It may have been removed by its last owner before it was locked: once more."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    for _ in range(_TRIES):
        fd = os.open(_lock_path(path), flags, 0o600)
        keep_from_children(fd)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise ResourceError(f"{_lock_path(path)} is not a file of this user")
            lock_file(fd, deadline)
            if os.path.samestat(found, os.stat(_lock_path(path), follow_symlinks=False)):
                return fd
        except TimeoutError:
            _close(fd)
            raise ResourceError(f"{path} is the socket of another stack that runs") from None
        except FileNotFoundError:
            pass
        except BaseException:
            _close(fd)
            raise
        _close(fd)
    raise ResourceError(f"{_lock_path(path)} is removed again and again")


def _remove_left_behind(path: str, lock: int) -> None:
    """Remove the socket that the lock's last owner left. Raises ResourceError if anything else is at the path."""
    found = _identity(path)
    if not found:
        return
    if found == _NO_SOCKET or found != os.pread(lock, _IDENTITY_BYTES_MAX, 0):
        raise ResourceError(f"{path} exists, and is no socket that a stack left: remove it, or choose another path")
    os.unlink(path)


def _listen(path: str, kind: int, lock: int) -> SocketFile:
    fd = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK).detach()
    keep_from_children(fd)
    try:
        os.fchmod(fd, 0o600)  # before the file exists: Linux gives it the mode of the socket
        with _borrowed(fd, kind) as listening:
            listening.bind(path)
            identity = _identity(path)
            try:
                os.ftruncate(lock, 0)
                os.pwrite(lock, identity, 0)
                listening.listen(WAITING_MAX)
            except BaseException:
                os.unlink(path)
                raise
        return SocketFile(path, kind, fd, lock, identity)
    except BaseException:
        _close(fd)
        raise


class _borrowed:
    """A socket object for a descriptor, which stays open. No object keeps it: a forked child closes it by number."""

    def __init__(self, fd: int, kind: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, kind, 0, fd)

    def __enter__(self) -> socket.socket:
        return self._socket

    def __exit__(self, *error: object) -> None:
        self._socket.detach()


def _identity(path: str) -> bytes:
    """The identity of the socket file at the path; empty if there is none."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return b""
    if not stat.S_ISSOCK(found.st_mode):
        return _NO_SOCKET
    return f"socket {found.st_dev} {found.st_ino} {found.st_mtime_ns}\n".encode()


def _unlock(lock: int) -> None:
    fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough: a child that C code forked has it too
    _close(lock)


def _close(fd: int) -> None:
    share_with_children(fd)
    os.close(fd)
