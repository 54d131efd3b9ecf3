"""A POSIX semaphore in memory that processes share: one waits without polling until another posts."""

import ctypes
import os
from functools import cache

import numpy as np
import numpy.typing as npt

SEMAPHORE_BYTES = 32
"""Of `sem_t` on 64-bit Linux."""


@cache
def _libc() -> ctypes.CDLL:
    """Its calls release the GIL."""
    return ctypes.CDLL(None, use_errno=True)


class SharedSemaphore:
    """A count in `memory`, shape (32,), uint8, at an address divisible by 8; it stays mapped as long as this object.

    The process that waits makes it, with `new`, before another posts.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], *, new: bool = False) -> None:
        if memory.nbytes != SEMAPHORE_BYTES or memory.ctypes.data % ctypes.alignment(ctypes.c_uint64):
            raise ValueError(f"a semaphore takes {SEMAPHORE_BYTES} aligned bytes, not {memory.nbytes}")
        self._memory = memory
        self._address = ctypes.c_void_p(memory.ctypes.data)
        if new:
            _call("sem_init", self._address, 1, 0)

    def post(self) -> None:
        """Let one `wait` return, now or later."""
        _call("sem_post", self._address)

    def wait(self) -> None:
        """Return once for each `post`. The thread sleeps until then, for ever if none comes."""
        while True:
            try:
                return _call("sem_wait", self._address)
            except InterruptedError:
                continue


def _call(name: str, *given: object) -> None:
    if getattr(_libc(), name)(*given):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
