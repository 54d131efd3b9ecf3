"""The number of calls that a tier makes at once, and of those beyond those that its jobs need."""

from __future__ import annotations

import asyncio
import math
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

HELD_SECONDS = 0.05
LOOKUP_WINDOW_SECONDS = 1.0
SHARE_WHILE_ASKED = 2
"""For so long after a question half of the bytes may be in flight: they are what a question waits for."""
TIMES_WHILE_LATE = 3
"""Factor of the bytes in flight while calls wait for a thread that is busy in Python. They wait together
then, above all those that a thread takes up after another without the event loop. Otherwise they only cost CPU time."""
_LATE_SHARE_OF_INTERVAL = 1 / 4
_WEIGHT_OF_ONE = 1 / 16


class CompletionDelay:
    """The delay from the end of a call on a thread to its turn of the event loop, on average over the last calls.

    A loop that waits for its turn of the interpreter gets it after a switch interval; a loop that does not learns of an
    end within a fraction of a millisecond.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def learn(self, seconds: float) -> None:
        """Add the delay after one call."""
        self.seconds += (seconds - self.seconds) * _WEIGHT_OF_ONE

    @property
    def late(self) -> bool:
        """True while calls wait for their turns."""
        return self.seconds > sys.getswitchinterval() * _LATE_SHARE_OF_INTERVAL


class CallLimit:
    """Calls under way at once: at most `most`, and fewer while the server is overloaded. More than one only as long as
    they move at most `most_bytes`, or half of that after a question, and several times that while its calls are late.

    Where that bounds them, no call begins while a question is pending, for at most HELD_SECONDS: a question is short,
    and waits for what is in flight. Questions in a row do not add up, so that calls begin between them.

    The limit is halved for an overload and grows by one for each round of calls that worked (AIMD). Calls that had
    begun before it was halved last do not halve it again: they say nothing of the new one.
    """

    def __init__(self, most: int, most_bytes: int = sys.maxsize, lateness: CompletionDelay | None = None) -> None:
        self.most = most
        self.most_bytes = most_bytes
        self._lateness = lateness or CompletionDelay()
        self.limit = float(most)
        self._under_way = self._bytes_under_way = 0
        self._held: asyncio.TimerHandle | None = None
        self._asked_until = -math.inf
        self._begun = 0
        self._counts_from = 0
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    async def begin(self, num_bytes: int = 0) -> int:
        """Wait for room for a call, in order. Returns its number, for `judge`; `end` must follow."""
        if self._waiting or not self._has_room(num_bytes):
            await self._wait(num_bytes)
        else:
            self._take(num_bytes)
        self._begun += 1
        return self._begun

    @contextmanager
    def lookup_priority(self) -> Iterator[None]:
        """While a question is pending."""
        loop = asyncio.get_running_loop()
        self._asked_until = loop.time() + LOOKUP_WINDOW_SECONDS
        if self._held is not None or self.most_bytes == sys.maxsize:
            yield
            return
        held = self._held = loop.call_later(HELD_SECONDS, self._release)
        try:
            yield
        finally:
            if self._held is held:
                held.cancel()
                self._release()

    def _release(self) -> None:
        self._held = None
        self._begin_waiting()

    def _has_room(self, num_bytes: int) -> bool:
        if self._held is not None:
            return False
        if not self._under_way:
            return True
        if self._under_way >= int(self.limit) or self.most_bytes == sys.maxsize:
            return self._under_way < int(self.limit)
        asked = asyncio.get_running_loop().time() < self._asked_until
        room = self.most_bytes * (TIMES_WHILE_LATE if self._lateness.late else 1) // (SHARE_WHILE_ASKED if asked else 1)
        return self._bytes_under_way + num_bytes <= room

    def _take(self, num_bytes: int) -> None:
        self._under_way += 1
        self._bytes_under_way += num_bytes

    async def _wait(self, num_bytes: int) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((waiter, num_bytes))
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():  # its place in the line is passed over
                self._begin_waiting()
            else:  # it had got its room
                self.end(num_bytes)
            raise

    def judge(self, number: int, overloaded: bool) -> bool:
        """Learn from an answer to a call. Returns True if the limit was halved."""
        if not overloaded:
            if self.limit < self.most:
                self.limit = min(self.most, self.limit + 1 / self.limit)
            return False
        if number <= self._counts_from:
            return False
        self._counts_from = self._begun
        self.limit = max(1.0, self.limit / 2)
        return True

    def end(self, num_bytes: int = 0) -> None:
        """A call of these bytes has ended; the next ones begin."""
        self._under_way -= 1
        self._bytes_under_way -= num_bytes
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        while self._waiting and (self._waiting[0][0].done() or self._has_room(self._waiting[0][1])):
            waiter, num_bytes = self._waiting.popleft()
            if not waiter.done():
                self._take(num_bytes)
                waiter.set_result(None)


class RequestShare:
    """Requests beyond those that jobs need: one for each `one_in` of them, and `at_once` in a row at most.

    So what is repeated, or done twice, does not multiply an overload or an outage.
    """

    def __init__(self, one_in: int, at_once: int) -> None:
        self._one_in = one_in
        self._most = one_in * at_once
        self._saved = 0

    def count(self, requests: int) -> None:
        """Count requests that jobs needed."""
        self._saved = min(self._saved + requests, self._most)

    def take(self) -> bool:
        """True if one more request may be made now."""
        if self._saved < self._one_in:
            return False
        self._saved -= self._one_in
        return True
