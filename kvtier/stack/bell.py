"""Waking an event loop from another thread that has no time to lose.

`call_soon_threadsafe` writes to a socket with the GIL let go: the thread that is woken takes it, and the one that rang
waits until it gets it back. Here the GIL is kept, so the loop begins when the ringing thread next waits for something.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import weakref
from collections.abc import Callable


class Bell:
    """Calls `answer` in a loop some time after `ring` was called; several rings may be answered by one call.

    `answer` is a method. Its object is not kept alive by the bell that hangs in the loop.
    """

    def __init__(self, answer: Callable[[], None]) -> None:
        self._answer = weakref.WeakMethod(answer)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fd = -1
        self._rung = False

    def hang(self) -> None:
        """Begin to listen. Call in the loop. Raises OSError if no file descriptor is left."""
        self._write = ctypes.PyDLL(None).eventfd_write
        self._write.argtypes = (ctypes.c_int, ctypes.c_uint64)
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._listen)

    def ring(self) -> None:
        """Wake the loop, unless it is on its way already. From one thread; does nothing once taken down."""
        if not self._rung and self._fd >= 0:
            self._rung = True
            self._write(self._fd, 1)

    def _listen(self) -> None:
        # Before the answer: whoever rings from here on rings anew.
        os.eventfd_read(self._fd)
        self._rung = False
        answer = self._answer()
        if answer is not None:
            answer()

    def take_down(self) -> None:
        """Stop listening. The loop has stopped. Idempotent."""
        if self._fd >= 0 and self._loop is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
