"""The epoch of a namespace in a tier that processes share: what holds here at once, and what others see.

Resets count one by one, and never into another line of numbers. An opening that must move a store on takes the first
number of a line of `LINE_LENGTH`, chosen at random above `OPENINGS_FROM`. So two processes that come to one number have
counted there from a common one, and mean the same weights.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from kvtier.errors import KVTierError

EPOCH_CEILING = 1 << 61
"""No store states an epoch from here on: what does is no epoch."""
OPENINGS_FROM = 1 << 40
"""Resets count below; openings choose from here on."""
LINE_LENGTH = 1 << 16
LINEAGE_BYTES = 4
INCARNATION_BYTES = 8
_LINE_BITS = 26
_ROOM_TO_COUNT = 1 << 44
"""An opening goes on with no epoch that is nearer to the ceiling: then no reset of a session comes to it."""
_ATTEMPTS = 10


def is_usable(epoch: int) -> bool:
    """True if a session can begin with an epoch that a store states."""
    return 0 <= epoch < EPOCH_CEILING - _ROOM_TO_COUNT


def line_of(epoch: int) -> int:
    """The line that a number is counted in. All below `OPENINGS_FROM` are one."""
    return epoch // LINE_LENGTH if epoch >= OPENINGS_FROM else 0


def fresh_epoch(above: int = 0) -> int:
    """The beginning of a line above a usable number, which no count meets and no other opening is likely to choose."""
    lines = max(line_of(above), OPENINGS_FROM // LINE_LENGTH) + 1 + secrets.randbits(_LINE_BITS)
    return lines * LINE_LENGTH


class Marker(NamedTuple):
    """A namespace's epoch as a store states it.

    A marker that a server lost is made again with another `incarnation`, 8 random bytes. Names of blocks contain both,
    so nothing that was stored under the lost one is found. A folder states the number alone; its incarnation is empty.
    """

    incarnation: bytes
    epoch: int

    @property
    def lineage(self) -> bytes:
        """The part of the incarnation that resets leave as it is."""
        return self.incarnation[:LINEAGE_BYTES]


Read = Callable[[], Awaitable[Marker | None]]
"""Reads the marker; None: there is none, or what is there states none. Durable when it returns. Raises OSError."""
Swap = Callable[[Marker | None, Marker], Awaitable[Marker | None]]
"""Puts a marker in place of the one that is held; None: of nothing, or of what is no marker. Where another one is there
by now, nothing happens. Atomic among all processes. Returns what is there now, durably. Raises OSError."""


class SharedEpoch:
    """A namespace's marker in a store, and its epoch in this process.

    `now` is the epoch of the last reset in this process; it holds at once, in memory. What others see is raised by one
    call at a time. No block is stored under an epoch that the store has not taken: a number that is taken back would be
    given to the next reset, and what had been stored under it would count again. A process that `has_left` finds and
    stores nothing that others do, until it is started again.

    A reset counts from the marker that this process has last seen, if it is there yet. Where others have counted on
    from it, this one follows. Of any other marker, and of a lost one, it is not known whose weights it means. The reset
    moves the namespace on to a new line then, so that a process that opens later finds nothing from before; this
    process leaves.

    An incarnation is a lineage and a few random bytes. The first process that resets chooses these bytes again, so
    nothing under its new marker is older than its reset, whatever a server had forgotten or was made to state. Those
    that have counted as far from the same marker take its bytes over and share.
    """

    def __init__(self, read: Read, swap: Swap, incarnation_bytes: int = 0) -> None:
        self.now = 0
        self.has_left = False
        self.raised = -1
        """The epoch that the store was last seen to state; -1 before the beginning."""
        self._read = read
        self._swap = swap
        self._incarnation_bytes = incarnation_bytes
        self._incarnation = b""
        self._alone = secrets.token_bytes(incarnation_bytes)
        self._held: Marker | None = None
        self._raising = asyncio.Lock()

    def marker(self, epoch: int) -> Marker:
        """The marker that blocks of an epoch are stored under."""
        return Marker(self._alone if self.has_left else self._incarnation, epoch)

    # -- opening ---------------------------------------------------------------------------------------------------

    async def begin(self, new_epoch: int) -> bool:
        """Begin with what the store states, or have one that states nothing usable state `new_epoch`.

        True if it states that now because of this call. Raises OSError, KVTierError.
        """
        made = self._new_marker(new_epoch)
        await self._place(made)
        return self._held == made

    async def state(self, epoch: int) -> int:
        """Before the first job: have the store state the epoch of the stack's other tiers, unless it states another one
        than at the beginning. Returns what it states, which holds here. Raises OSError, KVTierError."""
        async with self._raising:
            as_before = self._held is not None and self._held.epoch == epoch
            if not (as_before and self._begin_with(await self._read())):
                await self._place(self._new_marker(epoch))
        return self.now

    def _new_marker(self, epoch: int) -> Marker:
        """A marker of a lineage of its own."""
        return Marker(secrets.token_bytes(self._incarnation_bytes), epoch)

    async def _place(self, made: Marker) -> None:
        """Put a marker in place of the one that was last seen there, and begin with what is there then."""
        for _ in range(_ATTEMPTS):
            if self._begin_with(await self._swap(self._held, made)):
                return
        raise OSError(errno.EBUSY, "the epoch of the namespace is lost or damaged all the time")

    def _begin_with(self, held: Marker | None) -> bool:
        """Begin with what the store states; False where no session can count on from that."""
        self._held = held
        if held is None or not is_usable(held.epoch):
            return False
        self._incarnation = held.incarnation
        self.now = self.raised = held.epoch
        return True

    # -- resets ----------------------------------------------------------------------------------------------------

    async def reset(self, epoch: int) -> None:
        """Raise it for all processes before this returns. Raises OSError, KVTierError if that failed; `now` holds."""
        self.now = max(self.now, epoch)
        if epoch <= self.raised:
            return
        async with self._raising:
            if epoch > self.raised:
                await self._count(epoch)
                self.raised = epoch

    def leave(self) -> None:
        """Share nothing with other processes any more. What this one resets to later moves them on all the same."""
        self.has_left = True

    async def _count(self, epoch: int) -> None:
        """Count a reset. One that failed is not repeated from the same marker: this process leaves instead."""
        try:
            await self._count_on(epoch)
        except (OSError, KVTierError):
            self.leave()
            raise

    async def _count_on(self, epoch: int) -> None:
        for _ in range(_ATTEMPTS):
            held = await self._read()
            if held is not None and self._is_next(held, epoch):
                self._incarnation = held.incarnation
                return
            following = self._following(held, epoch)
            if await self._swap(held, following) == following:
                self._incarnation = following.incarnation
                if following.epoch != epoch:
                    self.leave()
                return
        raise OSError(errno.EBUSY, "other processes write the epoch")

    def _is_next(self, held: Marker, epoch: int) -> bool:
        """True if another process counted to this marker, or past it, from the one that this process has.

        The same incarnation with a higher number is not: an earlier release raised it, perhaps when it opened.
        """
        own = self.marker(self.raised)
        if self.has_left or held.lineage != own.lineage:
            return False
        if not self._incarnation_bytes:
            return held.epoch >= epoch and line_of(held.epoch) == line_of(own.epoch)
        return held.epoch == epoch and held.incarnation != own.incarnation

    def _following(self, held: Marker | None, epoch: int) -> Marker:
        """The marker of a reset to this epoch, in place of the one that is there."""
        own, fresh_bytes = self.marker(self.raised), max(0, self._incarnation_bytes - LINEAGE_BYTES)
        if not self.has_left and held == own and line_of(epoch) == line_of(own.epoch) and epoch < EPOCH_CEILING:
            return Marker(own.lineage + secrets.token_bytes(fresh_bytes), epoch)
        numbers = [one for one in (epoch, held.epoch if held else 0) if is_usable(one)]
        return self._new_marker(fresh_epoch(max(numbers, default=0)))
