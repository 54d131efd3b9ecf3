"""Waking an event loop from another thread that has no time to lose.

`call_soon_threadsafe` writes to a socket with the GIL let go: the thread that is woken takes it, and the one that rang
waits until it gets it back. Here the GIL is kept, so the loop begins when the ringing thread next waits for something.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable

from kvtier.eventfd import EventFD


class Bell:
    """Calls `answer` in a loop some time after `ring` was called; several rings may be answered by one call.

    `answer` is a method. Its object is not kept alive by the bell that hangs in the loop.
    """

    def __init__(self, answer: Callable[[], None]) -> None:
        self._answer = weakref.WeakMethod(answer)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event: EventFD | None = None
        self._rung = False

    def hang(self) -> None:
        """Begin to listen. Call in the loop. Raises OSError if no file descriptor is left."""
        self._event = EventFD()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._event.fd, self._listen)

    def ring(self) -> None:
        """Wake the loop, unless it is on its way already. From one thread; does nothing once taken down."""
        if not self._rung and self._event is not None:
            self._rung = True
            self._event.signal()

    def _listen(self) -> None:
        assert self._event is not None
        self._event.clear()  # before the answer: whoever rings from here on rings anew
        self._rung = False
        answer = self._answer()
        if answer is not None:
            answer()

    def take_down(self) -> None:
        """Stop listening. The loop has stopped. Idempotent."""
        event, self._event = self._event, None
        if event is not None and self._loop is not None:
            self._loop.remove_reader(event.fd)
            event.close()
