"""Lookups in shared tiers: bounded in number and in time, because a tier may never answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvtier.control.jobs import Arrival, PresenceQuery
from kvtier.stack.assembly import look_up
from kvtier.tier.contract import LoadStore

LOOKUPS_MAX = 256
"""Lookups in flight in shared tiers; further keys are misses."""
LOOKUP_SECONDS_MAX = 30.0
"""A shared tier that has not answered by then is not waited for any more."""


class Lookups:
    """Lookups in flight, as `tasks` of one event loop."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[None]] = set()

    def begin(self, tier: LoadStore, query: PresenceQuery, deliver: Callable[[Sequence[Arrival]], None]) -> None:
        """Ask a tier and deliver what it answers. Call in the loop.

        Where nothing answers, or too many are in flight, the deadline of the keys makes them misses.
        """
        if len(self.tasks) >= LOOKUPS_MAX:
            return
        task = asyncio.get_running_loop().create_task(_look_up(tier, query, deliver))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def cancel(self) -> None:
        """Wait for none of them any more."""
        for task in list(self.tasks):
            task.cancel()


async def _look_up(tier: LoadStore, query: PresenceQuery, deliver: Callable[[Sequence[Arrival]], None]) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(LOOKUP_SECONDS_MAX):
            deliver(await look_up(tier, query))
