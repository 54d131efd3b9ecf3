"""What both I/O engines share: an eventfd that signals completions, and the event loop's part of the work."""

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
_LOOK_SECONDS = 0.01


class Completions:
    """Requests that ended. Their `done` is called in the order in which they ended, for some in each turn of the loop.

    `after` is called in each such turn. An exception of a `done` is left to the loop; the requests behind it get their
    call in the next turn. `failed` is called first: a request may have lost its call.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        budget: TimeBudget,
        after: Callable[[], None],
        failed: Callable[[], None] | None = None,
    ) -> None:
        self._loop = loop
        self._budget = budget
        self._after = after
        self._failed = failed or _nothing
        self.ended: deque[Ended] = deque()
        self._called = False
        self._left_at = 0.0

    def complete(self, ended: Iterable[Ended]) -> None:
        """Call `done` for these, at once unless others come before them."""
        self.ended.extend(ended)
        if not self._called:
            self._call()

    def call_rest(self) -> None:
        """Call all of them now. What one raises is left to the loop."""
        while self.ended:
            request, result = self.ended.popleft()
            try:
                request.done(request, result)
            except Exception as error:
                self._loop.call_exception_handler({"message": "a request has ended", "exception": error})

    def detach(self) -> None:
        """Call nothing any more in a turn. Nothing is to come."""
        self._after = self._failed = _nothing

    def _call_others(self) -> None:
        self._called = False
        try:
            self._budget.note_delay(time.perf_counter() - self._left_at)
            self._call()
        except BaseException:
            self._failed()
            raise

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
                self._called = True
                self._loop.call_soon(self._call_others)
            try:
                self._after()
            finally:
                self._left_at = time.perf_counter()


def _nothing() -> None:
    """Called in the turns of an engine that is closed."""


class LoopEngine(IOEngine):
    """An engine whose eventfd is readable when requests have ended: nothing on the event loop waits for one of them.

    It works with what the process has that opened it, so in a forked child every call raises UsageError.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, budget: TimeBudget | None = None) -> None:
        self._loop = loop
        self._budget = budget or TimeBudget()
        self._completions = Completions(loop, self._budget, self._after_completions, self._lose)
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
    def _forget_queued(self) -> None:
        """Drop what has not begun. From then on `in_flight` says whether buffers are in use, whatever went before."""

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
                _log.exception("requests were submitted in part")
                self._fail()

    def _fail(self) -> None:
        """An exception such as MemoryError left a step half done: no request begins any more."""
        if not self._failed:
            self._failed = True
            self._idle.clear()
            self._loop.call_soon(self._wait_idle)
            self._lose()

    def _lose(self) -> None:
        """An exception kept a request from its call, perhaps."""
        self._loop.call_soon(self._call_rest)
        if self.after_failure is not None:
            self.after_failure()

    def _call_rest(self) -> None:
        self._completions.call_rest()
        self._after_completions()

    def _wait_idle(self) -> None:
        """After a failure: look again and again whether the system still has requests."""
        try:
            self._forget_queued()
            self._completions.ended.extend(self._take(COMPLETIONS_PER_TURN))
            self._call_rest()
        finally:
            if not self._idle.is_set():
                self._loop.call_later(_LOOK_SECONDS, self._wait_idle)

    def _on_event(self) -> None:
        try:
            self._check_process()
            if self._event is not None:
                self._event.clear()
            ended = self._reap()
        except UsageError:  # in a forked child
            raise
        except BaseException:
            self._fail()
            raise
        try:
            self._completions.complete(ended)
        except BaseException:
            self._lose()
            raise

    def _call_reap(self) -> None:
        self._reap_called = False
        self._on_event()

    def _reap(self) -> list[Ended]:
        """Take what has ended and begin what is queued, so that the disk works while `done` is called."""
        if self._event is None:
            return []
        ended = self._take(COMPLETIONS_PER_TURN)
        if len(ended) == COMPLETIONS_PER_TURN and not self._reap_called:
            self._reap_called = True
            self._loop.call_soon(self._call_reap)
        if not self._failed:
            self._pump()
        return ended

    def _after_completions(self) -> None:
        if self.after_turn is not None:
            self.after_turn()
        if not self.in_flight:
            self._idle.set()

    async def close(self, timeout_seconds: float) -> int:
        self._check_process()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_seconds)
        if not self.in_flight and self._event is not None:
            await self._release()
            self._stop_listening()
            # these refer back to the engine: without them a closed engine is freed at once, not by the collector
            self.after_turn = self.after_failure = None
            self._completions.detach()
        return self.in_flight
