"""The base of both I/O engines: an eventfd that signals completions, and the event loop's part of the work."""

import asyncio
import errno
import logging
import os
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from kvtier.aio.eventfd import EventFD
from kvtier.aio.loop_budget import TimeBudget
from kvtier.errors import ResourceError, UsageError
from kvtier_fs.io.contract import IOEngine, IORequest

_log = logging.getLogger("kvtier.fs")
COMPLETIONS_PER_TURN = 64
"""Completions taken from an engine in one turn of the event loop, at most."""

Ended = tuple[IORequest, int]
"""A request and its result."""


class Completions:
    """Requests that ended. Their `done` is called in the order in which they ended, for some in each turn of the loop.

    `after` is called in each such turn. An exception of a `done` is left to the loop; the requests behind it get their
    call in the next turn.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, budget: TimeBudget, after: Callable[[], None]) -> None:
        self._loop = loop
        self._budget = budget
        self._after = after
        self.ended: deque[Ended] = deque()
        self._called = False
        self._left_at = 0.0

    def complete(self, ended: Iterable[Ended]) -> None:
        """Call `done` for these, at once unless others come before them."""
        self.ended.extend(ended)
        if not self._called:
            self._call()

    def complete_later(self, ended: Iterable[Ended]) -> None:
        """Call `done` for these in a later turn."""
        self.ended.extend(ended)
        if not self._called:
            self._called = True
            self._loop.call_soon(self._call_others)

    def detach(self) -> None:
        """Call nothing any more in a turn. Nothing is to come."""
        self._after = lambda: None

    def _call_others(self) -> None:
        self._called = False
        self._budget.note_delay(time.perf_counter() - self._left_at)
        self._call()

    def _call(self) -> None:
        until = time.perf_counter() + self._budget.seconds
        try:
            while self.ended:
                request, result = self.ended.popleft()
                request.done(request, result)
                if time.perf_counter() >= until:
                    break
        finally:
            if self.ended:
                self.complete_later(())
            try:
                self._after()
            finally:
                self._left_at = time.perf_counter()


class LoopEngine(IOEngine):
    """An engine whose eventfd is readable when requests have ended: nothing on the event loop waits for one of them.

    It works with what the process has that opened it, so in a forked child every call raises UsageError.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, budget: TimeBudget | None = None) -> None:
        self._loop = loop
        self._budget = budget or TimeBudget()
        self._completions = Completions(loop, self._budget, self._after_completions)
        self._failed = False
        self._event: EventFD | None = None
        self._pid = 0
        self._reap_called = False
        self._idle = asyncio.Event()
        self._idle.set()

    def open(self) -> None:
        """Begin to listen for completions. Raises ResourceError."""
        try:
            event = EventFD()
        except OSError as error:
            raise ResourceError(f"the kernel offers no eventfd ({error.strerror})") from error
        self._event = event
        try:
            self._pid = os.getpid()
            self._loop.add_reader(event.fd, self._on_event)
        except OSError as error:
            self._stop_listening()
            raise ResourceError(f"the event loop cannot watch an eventfd ({error.strerror})") from error

    def _stop_listening(self) -> None:
        event = self._event
        if event is not None:
            self._loop.remove_reader(event.fd)
            event.close()
            self._event = None

    @abstractmethod
    def _enqueue(self, requests: Sequence[IORequest]) -> None:
        """Begin requests, or queue them."""

    @abstractmethod
    def _take(self, most: int) -> list[Ended]:
        """The next requests that have ended, in their order."""

    @abstractmethod
    def _pump(self) -> None:
        """Begin requests that are queued, if there is room."""

    @abstractmethod
    def _take_queued(self) -> list[IORequest]:
        """Take back the requests that have not begun."""

    @abstractmethod
    async def _release(self) -> None:
        """Release what the engine works with. No request is in flight."""

    def _check_process(self) -> None:
        if self._pid not in (0, os.getpid()):
            raise UsageError(
                f"the engine belongs to process {self._pid}, and this is process {os.getpid()}, forked from it: "
                f"open a tier of its own after the fork"
            )

    def submit(self, requests: Sequence[IORequest]) -> None:
        self._check_process()
        if self._failed:
            raise OSError(errno.EIO, "the I/O engine has failed")
        if requests:
            self._idle.clear()
            try:
                self._enqueue(requests)
            except Exception:
                self._fail()
                _log.exception("requests were submitted in part")

    def _fail(self) -> None:
        """A step of the engine raised: no request begins any more, and those that wait end as failed."""
        self._failed = True
        self._completions.complete_later((request, -errno.EIO) for request in self._take_queued())

    def _on_event(self) -> None:
        self._check_process()
        if self._event is None:
            return
        self._event.clear()
        ended = self._take(COMPLETIONS_PER_TURN)
        try:
            self._begin_next(len(ended))
        except Exception:
            self._fail()
            raise
        finally:
            self._completions.complete(ended)

    def _call_reap(self) -> None:
        self._reap_called = False
        self._on_event()

    def _begin_next(self, taken: int) -> None:
        """Begin what is queued, so that the disk works while `done` is called; take more if as many had ended as may be
        taken at once."""
        if taken == COMPLETIONS_PER_TURN and not self._reap_called:
            self._reap_called = True
            self._loop.call_soon(self._call_reap)
        if not self._failed:
            self._pump()

    def _after_completions(self) -> None:
        if self.after_turn is not None:
            self.after_turn()
        if not self.in_flight:
            self._idle.set()

    async def close(self, timeout_seconds: float) -> int:
        self._check_process()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()
        if not self.in_flight and self._event is not None:
            await self._release()
            self._stop_listening()
            # these refer back to the engine: without them a closed engine is freed at once, not by the collector
            self.after_turn = None
            self._completions.detach()
        return self.in_flight
