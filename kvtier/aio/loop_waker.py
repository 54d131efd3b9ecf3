"""A loop in another thread, woken without releasing the GIL."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvtier.aio.eventfd import EventFD
from kvtier.aio.weak_call import weak_call


class LoopWaker:
    """Calls `callback` in a loop some time after `wake` was called; one call may serve several wakes.

    `call_soon_threadsafe` writes to a socket and releases the GIL for it: the loop's thread takes the GIL, and the
    calling thread waits until it gets it back. Here the GIL is kept, so the loop runs when that thread next waits.
    `callback` is a method. The reader that the loop keeps does not keep the method's object alive.
    """

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = weak_call(callback)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event: EventFD | None = None
        self._signalled = False

    def attach(self) -> None:
        """Begin to listen. Call in the loop. Raises OSError if no file descriptor is left."""
        self._event = EventFD()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._event.fd, self._on_readable)

    def wake(self) -> None:
        """Wake the loop, unless a wake is pending. From one thread; does nothing once detached."""
        if not self._signalled and self._event is not None:
            self._signalled = True
            self._event.signal()

    def _on_readable(self) -> None:
        assert self._event is not None
        self._event.clear()  # before the callback: a wake from here on signals again
        self._signalled = False
        self._callback()

    def detach(self) -> None:
        """Stop listening. Call in the loop, or once it is closed. Idempotent."""
        if self._event is not None:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._event.fd)
            self._event.close()
            self._event = None
