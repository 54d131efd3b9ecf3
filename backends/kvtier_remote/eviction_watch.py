"""The number of names that a server has evicted, read now and then beside the work."""

import asyncio
from collections import Counter
from contextlib import suppress

from kvtier.tier.contract import Clock
from kvtier_remote.transport import CountsEvictions, Transport

PAUSE_SECONDS = 5.0
EVICTED = "server.evicted"


class EvictionWatch:
    """Counts in `server.evicted` what the server has evicted since `begin`, of all clients.

    A server evicts only while clients store, so it is asked when this tier has work, and at most once in
    `PAUSE_SECONDS`. A transport that cannot tell is never asked, and then there is no such counter.
    """

    def __init__(self, transport: Transport, clock: Clock, counters: Counter[str]) -> None:
        self._transport = transport if isinstance(transport, CountsEvictions) else None
        self._clock = clock
        self._counters = counters
        self._seen: int | None = None
        self._next_at = 0.0
        self._question: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Take what the server says now as the beginning."""
        if self._transport is not None:
            self._counters[EVICTED] = 0
            await self._count()

    def poll(self) -> None:
        """Ask in the background, if it is time for that. Call in the loop."""
        if self._transport is None or self._clock() < self._next_at:
            return
        if self._question is None or self._question.done():
            self._question = asyncio.create_task(self._count())

    async def close(self) -> None:
        """Give up the answer to a question that is open."""
        if self._question is not None:
            self._question.cancel()
            await asyncio.wait([self._question])

    async def _count(self) -> None:
        assert self._transport is not None
        self._next_at = self._clock() + PAUSE_SECONDS
        with suppress(OSError):  # a server that does not answer shows in the blocks' own errors
            evicted = await self._transport.evicted()
            if self._seen is not None:  # fewer than before: it has been started again
                self._counters[EVICTED] += evicted - self._seen if evicted >= self._seen else evicted
            self._seen = evicted
