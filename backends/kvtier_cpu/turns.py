"""Hashing short payloads on the event loop, a little in each of its turns."""

from __future__ import annotations

import asyncio
from collections import deque

BYTES_PER_TURN = 4 << 20
"""Hashed in a few tenths of a millisecond."""


class HashTurns:
    """Spreads what is hashed over the turns of an event loop, in the order in which it is asked for.

    For payloads so short that a thread would keep the loop waiting just as long, and the way there and back comes on
    top (`checksum.SHORT_BYTES`). Belongs to one event loop.
    """

    def __init__(self, bytes_per_turn: int = BYTES_PER_TURN) -> None:
        self._bytes_per_turn = bytes_per_turn
        self._taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def room(self, nbytes: int) -> None:
        """Return when the caller may hash so many bytes: in this turn, or the first that has room for them."""
        loop = asyncio.get_running_loop()
        if self._waiting or self._taken >= self._bytes_per_turn:
            mine: asyncio.Future[None] = loop.create_future()
            self._waiting.append((nbytes, mine))
            await mine
            return
        if not self._taken:
            loop.call_soon(self._new_turn, loop)
        self._taken += nbytes

    def _new_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._taken = 0
        while self._waiting and self._taken < self._bytes_per_turn:
            nbytes, waiting = self._waiting.popleft()
            self._taken += nbytes
            if not waiting.done():  # cancelled meanwhile
                waiting.set_result(None)
        if self._taken:
            loop.call_soon(self._new_turn, loop)
