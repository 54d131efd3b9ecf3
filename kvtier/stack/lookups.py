"""Lookups in shared tiers, bounded in number and in time because a tier may never answer, and who waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvtier.control.jobs import Arrival, PresenceAnswers, PresenceQuery
from kvtier.stack.dispatcher import presence_in
from kvtier.tier.contract import LoadStore, LookupResult
from kvtier.types.keys import OffloadKey

LOOKUPS_MAX = 256
"""Lookups in flight in shared tiers; further keys are misses."""
LOOKUP_SECONDS_MAX = 30.0
"""A shared tier that has not answered by then is not waited for any more."""


class Lookups:
    """Lookups in flight, as `tasks` of one event loop."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[None]] = set()

    def begin(self, tier: LoadStore, query: PresenceQuery, deliver: Callable[[Sequence[Arrival]], None]) -> None:
        """Ask a tier and deliver what it answers; RETRY for each key if it has not answered in `LOOKUP_SECONDS_MAX`.

        Call in the loop. Where it fails, or too many are in flight, the deadline of the keys makes them misses.
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
    try:
        async with asyncio.timeout(LOOKUP_SECONDS_MAX):
            answers = await presence_in(tier, query.keys)
    except TimeoutError:  # so that a tier that does not answer is not asked for a while
        answers = [LookupResult.RETRY] * len(query.keys)
    if answers is not None:  # else the deadline of the keys makes them misses
        deliver([PresenceAnswers(query, answers)])


class AnswerWaits:
    """Calls that wait until a shared tier has answered for one of their keys."""

    def __init__(self) -> None:
        self._keys: dict[asyncio.Future[None], frozenset[OffloadKey]] = {}

    def wake(self, answered: Sequence[OffloadKey] | None) -> None:
        """Have those go on that wait for one of these keys; all of them if None."""
        for future, keys in self._keys.items():
            if not future.done() and (answered is None or not keys.isdisjoint(answered)):
                future.set_result(None)

    async def wait(self, keys: frozenset[OffloadKey], deadline: float) -> None:
        """Wait for an answer for one of these keys, at most until the deadline, by the loop's time."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._keys[future] = keys
        try:
            async with asyncio.timeout_at(deadline):
                await future
        except TimeoutError:
            return
        finally:
            del self._keys[future]
