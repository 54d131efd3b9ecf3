"""Lookups in shared tiers: bounded in number and in time, because a tier may never answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvtier.control.plane.deliveries import Arrival, PresenceQuery
from kvtier.stack.assembly import look_up
from kvtier.tier.contract import LoadStore

logger = logging.getLogger(__name__)

LOOKUPS_MAX = 256
"""Lookups in flight in shared tiers; further keys are misses."""
LOOKUP_SECONDS_MAX = 30.0
"""A shared tier that has not answered by then is not waited for any more."""


class Lookups:
    """Those in flight, as `tasks` of one event loop. `errors` counts those that could not begin."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self.errors = 0

    def begin(self, tier: LoadStore, query: PresenceQuery, deliver: Callable[[Sequence[Arrival]], None]) -> None:
        """Ask a tier and deliver what it answers. Call in the loop.

        Where nothing answers, or too many are in flight, the deadline of the keys makes them misses.
        """
        if len(self.tasks) >= LOOKUPS_MAX:
            return
        work = _look_up(tier, query, deliver)
        try:
            task = asyncio.get_running_loop().create_task(work)
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        except Exception:
            work.close()
            self.errors += 1
            logger.exception("a lookup could not begin")

    def cancel(self) -> None:
        """Wait for none of them any more."""
        for task in list(self.tasks):
            task.cancel()


async def _look_up(tier: LoadStore, query: PresenceQuery, deliver: Callable[[Sequence[Arrival]], None]) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(LOOKUP_SECONDS_MAX):
            deliver(await look_up(tier, query))
