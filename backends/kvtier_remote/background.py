"""Questions and notes of a tier beside its jobs: a lease of the marker, and how many names a server has evicted."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

from kvtier.tier.contract import Clock
from kvtier.tier.shared_epoch import SharedEpoch
from kvtier_remote.names import BlockNames
from kvtier_remote.transport import CountsEvictions, KeepsLeases, Transport

RENEWALS = 6
"""Renewals in the time that a lease lasts."""
TURNOVERS = 16
"""Renewals while as many bytes as the server holds are stored: a server that evicts by use keeps the marker then."""
PAUSE_SECONDS = 5.0
EVICTED = "server.evicted"


class LeaseKeeper:
    """`kvtier gc --old` spares what is stored under a leased marker: a process that is open finds it.

    Each renewal also uses the marker. The server evicts only while clients store, so it is renewed by what this tier
    stores as well as by time. A marker that is gone all the same is not written again: a reset may have passed it.
    A renewal that fails is counted in `lease.failed` and tried again with the next. A transport without leases has
    none.
    """

    def __init__(self, transport: Transport, epoch: SharedEpoch, names: BlockNames, counters: Counter[str]) -> None:
        self._transport = transport if isinstance(transport, KeepsLeases) else None
        self._epoch = epoch
        self._names = names
        self._counters = counters
        self._every_bytes = 0
        self._stored_bytes = 0
        self._due = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def begin(self, capacity_bytes: int) -> None:
        """Take the lease, and keep it from now on."""
        if self._transport is not None:
            self._every_bytes = max(1, capacity_bytes // TURNOVERS)
            await self._renew()
            self._task = asyncio.create_task(self._keep())

    def stored(self, payload_bytes: int) -> None:
        """Count stored bytes. Call in the loop."""
        self._stored_bytes += payload_bytes
        if self._stored_bytes >= self._every_bytes:
            self._stored_bytes = 0
            self._due.set()

    def marker_changed(self) -> None:
        """After a reset: lease the new one soon. Call in the loop."""
        self._due.set()

    async def close(self) -> None:
        """Renew it no more: it ends by itself."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _keep(self) -> None:
        assert self._transport is not None
        while True:
            self._due.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._transport.lease_seconds / RENEWALS):
                    await self._due.wait()
            await self._renew()

    async def _renew(self) -> None:
        assert self._transport is not None
        try:
            lease = self._names.lease(self._epoch.marker(self._epoch.now))
            await self._transport.keep_lease(self._names.marker, lease)
        except OSError:
            self._counters["lease.failed"] += 1


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
