"""A note on the server that a namespace's marker is in use, renewed while the tier is open."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

from kvtier_remote.epochs import Epochs
from kvtier_remote.names import BlockNames
from kvtier_remote.transport import KeepsLeases, Transport

RENEWALS = 6
"""Renewals in the time that a lease lasts."""
TURNOVERS = 64
"""Renewals while as many bytes as the server holds are stored: a server that evicts by use keeps the marker then."""


class LeaseKeeper:
    """`kvtier gc --old` spares what is stored under a leased marker: a process that is open finds it.

    Each renewal also uses the marker. The server evicts only while clients store, so it is renewed by what this tier
    stores as well as by time. A marker that is gone all the same is not written again: a reset may have passed it.
    A renewal that fails is counted in `lease.failed` and tried again with the next. A transport without leases has
    none.
    """

    def __init__(self, transport: Transport, epochs: Epochs, names: BlockNames, counters: Counter[str]) -> None:
        self._transport = transport if isinstance(transport, KeepsLeases) else None
        self._epochs = epochs
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
        """So many bytes were stored. Call in the loop."""
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
            lease = self._names.lease(self._epochs.marker(self._epochs.now))
            await self._transport.keep_lease(self._names.marker, lease)
        except OSError:
            self._counters["lease.failed"] += 1
