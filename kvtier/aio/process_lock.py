"""Lock files whose lock belongs to one process alone, although a fork shares every descriptor.

`flock` locks an open file, and a forked child has the same open file. So the lock of a process that was killed would
last as long as any child of it lives. Therefore a child closes these descriptors right after the fork; the parent keeps
the lock. That covers `os.fork` and multiprocessing; what a program starts by exec loses them by O_CLOEXEC.
"""

import os
from contextlib import suppress

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
