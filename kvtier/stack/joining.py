"""Lower tiers that are opened after the stack, because what completes their namespace takes longer than its start."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.aio.shielded_wait import wait_done
from kvtier.control.deliveries import Arrival, JoiningTiers
from kvtier.control.policies import RequestModels
from kvtier.control.state import TierSetup, lower_tiers
from kvtier.errors import KVTierError
from kvtier.tier_api.contract import LoadStore, Resettable
from kvtier.types.namespace import Namespace

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class LowerTiers:
    """The lower tiers of a stack, and how one of them is opened in a namespace."""

    tiers: Sequence[LoadStore]
    open_one: Callable[[LoadStore, Namespace], Awaitable[TierSetup]]

    @property
    def names(self) -> str:
        """For a log."""
        return ", ".join(tier.options.label for tier in self.tiers)

    async def open(self, namespace: Namespace) -> Sequence[TierSetup]:
        """Open them in order, and go on with the highest epoch that one of them was opened with."""
        setups = [await self.open_one(tier, namespace) for tier in self.tiers]
        await self.raise_epoch(setups, max((setup.opened.epoch for setup in setups), default=0))
        return setups

    async def raise_epoch(self, setups: Sequence[TierSetup], epoch: int) -> None:
        """Make the tiers that were opened in an earlier epoch reset to this one, durably."""
        behind = [tier for tier, setup in zip(self.tiers, setups, strict=True) if setup.opened.epoch < epoch]
        await asyncio.gather(*(tier.reset(epoch) for tier in behind if isinstance(tier, Resettable)))


class Joining:
    """Opens the lower tiers once the namespace is known, then hands them to the control plane. Lives in the loop.

    Whatever fails is one line in the log, and the tiers are held back for the life of the stack. They are handed over
    in an epoch that counts every reset of the session: before its blocks become reachable each tier is reset to it,
    durably. A reset that comes after that hands them over again, unless the control plane has taken them.
    """

    def __init__(
        self,
        lowers: LowerTiers,
        namespace: asyncio.Future[Namespace],
        num_rows: int,
        models: RequestModels,
        deliver: Callable[[Sequence[Arrival]], None],
    ) -> None:
        self._lowers = lowers
        self._num_rows = num_rows
        self._models = models
        self._deliver = deliver
        self._setups: Sequence[TierSetup] = ()
        self._resets = 0
        self._handing_over = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._tasks: list[asyncio.Task[None]] = []
        self._begin(self._join(namespace))

    async def _join(self, namespace: asyncio.Future[Namespace]) -> None:
        try:
            self._setups = await self._lowers.open(await namespace)
            await self._hand_over()
        except Exception as error:
            expected = isinstance(error, (OSError, KVTierError))
            names = self._lowers.names
            logger.error("tiers %s are held back for good: %s", names, error, exc_info=not expected)  # noqa: TRY400

    async def _hand_over(self) -> None:
        async with self._handing_over:
            resets = self._resets
            epoch = max(setup.opened.epoch for setup in self._setups) + resets
            await self._lowers.raise_epoch(self._setups, epoch)
            lowers = await asyncio.to_thread(lower_tiers, self._setups, self._num_rows, epoch, self._models)
            self._deliver([JoiningTiers(lowers, epoch, resets)])

    def reset(self, resets: int) -> asyncio.Future[None]:
        """The stack was reset that often, while the tiers were held back. Done when open tiers were reset and handed
        over once more, which goes on when it is cancelled.

        Others are reset when they are opened: until then it is not known whose blocks they hold.
        """
        self._resets = resets
        if not self._setups:
            done = self._loop.create_future()
            done.set_result(None)
            return done
        return asyncio.shield(self._begin(self._hand_over()))

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work, name="kvtier join")
        self._tasks.append(task)
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # its caller may have gone
        return task

    def stop(self) -> None:
        """Open no tier any more, and hand none over. From any thread."""
        self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def end(self, timeout_seconds: float) -> asyncio.CancelledError | None:
        """Stop, and wait until that has an end, at most for that long. Goes on when cancelled, and returns that."""
        self._cancel()
        return await wait_done(asyncio.gather(*self._tasks, return_exceptions=True), timeout_seconds)
