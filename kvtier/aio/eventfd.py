"""An eventfd that is written and read without releasing the GIL.

The calls take well under a microsecond. `os` releases the GIL for them, and beside a thread that is busy in Python
getting it back takes a switch interval (5 ms).
"""

import ctypes
import os
from collections.abc import Callable
from functools import cache, partial


@cache
def _libc() -> ctypes.PyDLL:
    """Without `argtypes`: the arguments are made once, because converting them takes longer than the call."""
    libc = ctypes.PyDLL(None)
    libc.eventfd_write.restype = libc.eventfd_read.restype = None
    return libc


class EventFD:
    """A counter whose descriptor is readable while it is not zero. Raises OSError if no descriptor is left.

    `signal` makes it readable, `clear` makes it unreadable until the next signal.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            libc, fd = _libc(), ctypes.c_int(self.fd)
            self.signal: Callable[[], None] = partial(libc.eventfd_write, fd, ctypes.c_uint64(1))
            self.clear: Callable[[], None] = partial(libc.eventfd_read, fd, ctypes.pointer(ctypes.c_uint64()))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the descriptor. Once only: its number may be another file's afterwards."""
        os.close(self.fd)
