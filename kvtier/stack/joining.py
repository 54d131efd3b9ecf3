"""Lower tiers that are opened after the stack, because what completes their namespace takes longer than its start."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvtier.aio.shielded_wait import wait_done
from kvtier.control.jobs import Arrival, JoiningTiers
from kvtier.control.tiers.lower_tier import TierSpec, lower_tiers
from kvtier.errors import KVTierError, ResourceError
from kvtier.policy import RequestModels
from kvtier.tier.contract import LoadStore, Resettable, StatesEpoch
from kvtier.tier.shared_epoch import fresh_epoch, line_of
from kvtier.types.namespace import Namespace

logger = logging.getLogger(__name__)
_ATTEMPTS = 10


def choose_epoch(stated: Sequence[int], on_disks: int) -> int:
    """The epoch that a stack goes on with, where shared tiers state these and its own disks were in that one.

    An opening raises no store within a line: others may count up to that number.
    """
    highest = max(stated)
    raises_in_line = any(one < highest and line_of(one) == line_of(highest) for one in stated)
    return fresh_epoch(max(highest, on_disks)) if on_disks > highest or raises_in_line else highest


def reset_tiers(tiers: Sequence[LoadStore], epoch: int) -> asyncio.Future[None]:
    """Reset tiers durably. Raises what the first of them raises. Call in the loop.

    Each begins before any task that is made after this call: no tier answers a later lookup by its epoch of before. A
    reset that one of them did not take has failed. Then those that others use share nothing any more: a process with
    the weights of before may be started in the epoch that they state.
    """
    resets = asyncio.gather(*(tier.reset(epoch) for tier in tiers if isinstance(tier, Resettable)))
    return asyncio.ensure_future(_all_or_leave(resets, tiers))


async def _all_or_leave(resets: Awaitable[object], tiers: Sequence[LoadStore]) -> None:
    try:
        await resets
    except BaseException:
        for tier in tiers:
            if isinstance(tier, StatesEpoch):
                tier.leave_epoch()
        raise


@dataclass(frozen=True, slots=True, eq=False)
class LowerTiers:
    """The lower tiers of a stack, and how one of them is opened in a namespace. `on_open` is called once all are."""

    tiers: Sequence[LoadStore]
    open_one: Callable[[LoadStore, Namespace, int | None], Awaitable[TierSpec]]
    on_open: Callable[[], Awaitable[None]] | None = None

    @property
    def names(self) -> str:
        """For a log."""
        return ", ".join(tier.options.label for tier in self.tiers)

    async def open(self, namespace: Namespace) -> Sequence[TierSpec]:
        """Open those first that other processes use too, each group in order, and go on with one epoch.

        Stores that others use too state it. Where they differ the highest counts, of those that stated one before.
        Where none did, they begin a new line of numbers, because a reset that was stated there may have been missed.
        So they do if a disk is ahead of them: they may have come back from an earlier state, and would count up to
        that number once more.
        """
        shared = [tier for tier in self.tiers if isinstance(tier, StatesEpoch)]
        found: dict[LoadStore, TierSpec] = {}
        epoch = fresh_epoch()
        for tier in shared:  # empty ones state one number then, also where hosts open at once
            found[tier] = await self.open_one(tier, namespace, epoch)
            epoch = found[tier].opened.epoch or epoch
        stated = [spec.opened for spec in found.values()]
        known = [opened.epoch for opened in stated if not opened.is_new_epoch] or [opened.epoch for opened in stated]
        new_epoch = max(known, default=None)
        for lower in self.tiers:
            if lower not in found:
                found[lower] = await self.open_one(lower, namespace, new_epoch)
        specs: Sequence[TierSpec] = [found[tier] for tier in self.tiers]
        highest = max((spec.opened.epoch for tier, spec in found.items() if tier not in shared), default=0)
        specs = await self._state_one(specs, highest if new_epoch is None else choose_epoch(known, highest))
        if self.on_open is not None:
            await self.on_open()
        return specs

    async def _state_one(self, specs: Sequence[TierSpec], epoch: int) -> Sequence[TierSpec]:
        """Make the shared tiers state an epoch, or the one that another process made them state meanwhile. Then the
        others take it. Raises ResourceError."""
        shared = [tier for tier in self.tiers if isinstance(tier, StatesEpoch)]
        pairs = list(zip(self.tiers, specs, strict=True))
        on_disks = max((spec.opened.epoch for tier, spec in pairs if tier not in shared), default=0)
        stated = [spec.opened.epoch for tier, spec in pairs if tier in shared]
        for _ in range(_ATTEMPTS):
            if len(shared) > 1 or stated != [epoch] * len(shared):  # of several, one may have been moved meanwhile
                stated = [await tier.state_epoch(epoch) for tier in shared]
            if stated == [epoch] * len(shared):
                break
            epoch = choose_epoch(stated, on_disks)
        else:
            raise ResourceError("other processes change the epoch of the namespace all the time; try again")
        agreed = [
            replace(spec, opened=replace(spec.opened, epoch=epoch)) if tier in shared else spec for tier, spec in pairs
        ]
        await self.raise_epoch(agreed, epoch)
        return agreed

    async def raise_epoch(self, specs: Sequence[TierSpec], epoch: int) -> None:
        """Make the tiers that were opened in an earlier epoch reset to this one, durably. Those that are down are not
        open."""
        pairs = zip(self.tiers, specs, strict=True)
        behind = [tier for tier, spec in pairs if spec.opened.epoch < epoch and not spec.held_back]
        await reset_tiers(behind, epoch)


class Joining:
    """Opens the lower tiers once the namespace is known, then hands them to the control plane. Lives in the loop.

    Whatever fails is one line in the log, and the tiers are held back for the life of the stack. They are handed over
    in an epoch that counts every reset of the session: before its blocks become reachable each tier is reset to it,
    durably. A reset that comes after that hands them over again, unless the control plane has taken them.

    `opening` ends when they were handed over, or with the `fault` for which they are held back.
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
        self._specs: Sequence[TierSpec] = ()
        self._resets = 0
        self._handing_over = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._tasks: list[asyncio.Task[None]] = []
        self.fault: Exception | None = None
        self.opening = self._begin(self._join(namespace))

    async def _join(self, namespace: asyncio.Future[Namespace]) -> None:
        try:
            self._specs = await self._lowers.open(await namespace)
            await self._hand_over()
        except Exception as error:
            self.fault = error
            expected = isinstance(error, (OSError, KVTierError))
            names = self._lowers.names
            logger.error("tiers %s do not open, and are held back: %s", names, error, exc_info=not expected)  # noqa: TRY400

    async def _hand_over(self) -> None:
        async with self._handing_over:
            resets = self._resets
            epoch = max((spec.opened.epoch for spec in self._specs), default=0) + resets
            await self._lowers.raise_epoch(self._specs, epoch)
            lowers = await asyncio.to_thread(lower_tiers, self._specs, self._num_rows, epoch, self._models)
            self._deliver([JoiningTiers(lowers, epoch, resets)])

    def reset(self, resets: int) -> asyncio.Future[None]:
        """The stack was reset that often, while the tiers were held back. Done when open tiers were reset and handed
        over once more, which goes on when it is cancelled.

        Others are reset when they are opened: until then it is not known whose blocks they hold.
        """
        self._resets = resets
        if not self._specs:
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
        """Open no tier any more, and hand none over."""
        for task in self._tasks:
            task.cancel()

    async def end(self, timeout_seconds: float) -> asyncio.CancelledError | None:
        """Stop, and wait until that has an end, at most for that long. Goes on when cancelled, and returns that."""
        self.stop()
        return await wait_done(asyncio.ensure_future(asyncio.wait(self._tasks)), timeout_seconds)
