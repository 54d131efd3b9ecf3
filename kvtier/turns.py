"""Hashing short payloads on the event loop, a little in each of its turns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

BYTES_PER_TURN = 4 << 20
"""Hashed in a few tenths of a millisecond."""


class HashTurns:
    """Spreads calls that hash over the turns of an event loop, in the order in which they come.

    For payloads so short that hashing them holds the GIL wherever it happens (`checksum.SHORT_BYTES`): a thread
    would keep the loop waiting just as long, and the way there and back comes on top. Belongs to one event loop.
    """

    def __init__(self, bytes_per_turn: int = BYTES_PER_TURN) -> None:
        self._bytes_per_turn = bytes_per_turn
        self._taken = 0
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()

    def begin(self, nbytes: int, call: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        """Call what hashes `nbytes`: now if this turn has room for it, else in the first that has."""
        if self._waiting or self._taken >= self._bytes_per_turn:
            self._waiting.append((nbytes, call))
            return
        if not self._taken:
            loop.call_soon(self._new_turn, loop)
        self._taken += nbytes
        call()

    async def room(self, nbytes: int) -> None:
        """Return when the caller may hash so many bytes on the loop."""
        loop = asyncio.get_running_loop()
        mine: asyncio.Future[None] = loop.create_future()
        self.begin(nbytes, partial(_wake, mine), loop)
        await mine

    def _new_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._taken = 0
        while self._waiting and self._taken < self._bytes_per_turn:
            nbytes, call = self._waiting.popleft()
            self._taken += nbytes
            loop.call_soon(call)
        if self._taken:
            loop.call_soon(self._new_turn, loop)


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():  # cancelled meanwhile
        waiting.set_result(None)
