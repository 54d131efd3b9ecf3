"""The work of one turn of an event loop, bounded so that other coroutines are not kept waiting."""

import asyncio
import math
import time
from collections import deque

TURN_SECONDS = 0.00025
"""How long each kind of work goes on in a turn."""
LATE_TURN_SECONDS = 0.0015
"""The same while the loop is late."""
LATE_SECONDS = 0.002
LATE_FOR_SECONDS = 0.25
BYTES_PER_TURN = 4 << 20
"""Hashed in a few tenths of a millisecond."""


class TimeBudget:
    """The time that a kind of work may take in a turn: more while the loop is late.

    The loop is late while another thread of the process is busy in Python: it then gets the GIL back only every switch
    interval (5 ms), each time it looked for events. One noted delay above LATE_SECONDS makes it late for
    LATE_FOR_SECONDS.
    """

    def __init__(self) -> None:
        self._late_until = -math.inf

    @property
    def seconds(self) -> float:
        """The time for which a kind of work may go on in a turn."""
        return LATE_TURN_SECONDS if time.perf_counter() < self._late_until else TURN_SECONDS

    def note_delay(self, delay_seconds: float) -> None:
        """Something that was ready was handled this number of seconds later."""
        if delay_seconds > LATE_SECONDS:
            self._late_until = time.perf_counter() + LATE_FOR_SECONDS


class ByteBudget:
    """The bytes that calls may work on in a turn, first come, first served. Belongs to one event loop.

    For payloads so short that handing them to a thread takes longer than hashing them (`checksum.SHORT_BYTES`).
    """

    def __init__(self, bytes_per_turn: int = BYTES_PER_TURN) -> None:
        self._bytes_per_turn = bytes_per_turn
        self._used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def reserve(self, nbytes: int) -> None:
        """Return when the caller may work on these bytes: in this turn, or the first that has room for them."""
        if not self.take(nbytes):
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((nbytes, mine))
            await mine

    def take(self, nbytes: int) -> bool:
        """True if this turn has room: then the caller works on these bytes now. Call in the loop."""
        if self._waiting or self._used >= self._bytes_per_turn:
            return False
        if not self._used:
            loop = asyncio.get_running_loop()
            loop.call_soon(self._begin_turn, loop)
        self._used += nbytes
        return True

    def _begin_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._used = 0
        while self._waiting and self._used < self._bytes_per_turn:
            nbytes, waiting = self._waiting.popleft()
            self._used += nbytes
            if not waiting.done():  # cancelled meanwhile
                waiting.set_result(None)
        if self._used:
            loop.call_soon(self._begin_turn, loop)
