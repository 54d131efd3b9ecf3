"""Lock files whose lock belongs to one process alone, although a fork shares every descriptor.

`flock` locks an open file, and a forked child has the same open file. So the lock of a process that was killed would
last as long as any child of it lives. Therefore a child closes these descriptors right after the fork; the parent keeps
the lock. That covers `os.fork` and multiprocessing; what a program starts by exec loses them by O_CLOEXEC.
"""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PAUSE_SECONDS = 0.02
_locks: set[int] = set()


def keep_from_children(fd: int) -> None:
    """Let children that are forked from now on close this descriptor. Call it before the file is locked."""
    _locks.add(fd)


def share_with_children(fd: int) -> None:
    """Undo `keep_from_children`. Call it before the descriptor is closed, because its number may be used again."""
    _locks.discard(fd)


def _close_in_child() -> None:
    for fd in _locks:
        with suppress(OSError):
            os.close(fd)
    _locks.clear()


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def locked_file(path: str, wait_seconds: float = 0.0) -> Iterator[int]:
    """An open file, made if it is absent, that is locked until the block ends.

    Raises OSError, and TimeoutError if another process has it locked for so long.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    keep_from_children(fd)
    try:
        lock_file(fd, time.monotonic() + wait_seconds)
        yield fd
    finally:
        if fd in _locks:  # a forked child has closed it
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough: a child that C code forked has it too
            share_with_children(fd)
            os.close(fd)


def lock_file(fd: int, deadline: float) -> None:
    """Lock an open file. Raises OSError, and TimeoutError if another process has it locked until the deadline."""
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError(errno.ETIMEDOUT, "another process holds the lock") from None
            time.sleep(PAUSE_SECONDS)
        else:
            return
