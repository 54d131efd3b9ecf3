"""Closing a stack when a signal arrives, before the signal takes the course it would have taken.

Plain handlers, not those of the event loop: those send a forked child's signals to its parent too (up to Python 3.11),
and hide the handler that was there before.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any

from kvtier.errors import UsageError
from kvtier.types.checks import check_types

Handler = Callable[[int, FrameType | None], Any] | int


class ClosingSignals:
    """Handlers that run `close` in a loop, then restore what was there and send the signal once more.

    A second signal does not wait for the first one's closing. A child forked meanwhile takes signals as if this were
    not here.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._loop = loop
        self._close = close
        self._pid = os.getpid()
        self._previous: dict[int, Handler] = {}
        self._arrived = False
        self._closing: asyncio.Task[None] | None = None

    def install(self, numbers: tuple[int, ...]) -> None:
        """Handle these signals. Call it in the loop. Raises UsageError unless that runs in the main thread, and for a
        signal that cannot be handled; none is handled then that was not before."""
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("signals arrive in the main thread; only a stack in its event loop can be closed on one")
        check_types("a signal", *((number, int) for number in numbers))
        added = [number for number in numbers if number not in self._previous]
        try:
            for number in added:
                previous = signal.signal(number, self._handle)
                # None: a handler that Python did not install and cannot put back
                self._previous[number] = signal.SIG_DFL if previous is None else previous
        except (OSError, ValueError, OverflowError) as error:
            self._restore(added)
            raise UsageError(f"signal {number} cannot be handled ({error})") from error

    def restore(self) -> None:
        """Put back the handlers that were there before, but none that was replaced meanwhile. Idempotent."""
        self._restore(list(self._previous))

    def _restore(self, numbers: list[int]) -> None:
        for number in numbers:
            previous = self._previous.pop(number, None)
            if previous is not None and signal.getsignal(number) == self._handle:
                signal.signal(number, previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, between any two instructions."""
        first, self._arrived = not self._arrived, True
        if first and os.getpid() == self._pid and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._begin, number)
        else:
            self._go_on(number)

    def _begin(self, number: int) -> None:
        self._closing = self._loop.create_task(self._close_and_go_on(number), name="kvtier close on signal")

    async def _close_and_go_on(self, number: int) -> None:
        try:
            await self._close()
        finally:
            self._go_on(number)

    def _go_on(self, number: int) -> None:
        self.restore()
        signal.raise_signal(number)
