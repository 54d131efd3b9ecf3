"""An eventfd that is written and read without releasing the GIL.

The calls take well under a microsecond. `os` releases the GIL for them, and beside a thread that is busy in Python
getting it back takes a switch interval (5 ms).
"""

import ctypes
import os
from functools import cache


@cache
def _libc() -> ctypes.PyDLL:
    libc = ctypes.PyDLL(None)
    libc.eventfd_write.argtypes = (ctypes.c_int, ctypes.c_uint64)
    libc.eventfd_read.argtypes = (ctypes.c_int, ctypes.c_void_p)
    return libc


class EventFD:
    """A counter whose descriptor is readable while it is not zero. Raises OSError if no descriptor is left."""

    def __init__(self) -> None:
        self._libc = _libc()
        self._count = ctypes.c_uint64()
        self._at = ctypes.addressof(self._count)
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def signal(self) -> None:
        """Make it readable."""
        self._libc.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Make it unreadable until the next signal."""
        self._libc.eventfd_read(self.fd, self._at)

    def close(self) -> None:
        """Close the descriptor. Once only: its number may be another file's afterwards."""
        os.close(self.fd)
