"""The epoch of a namespace in a tier that processes share: what holds here at once, and what others see.

Resets count one by one, and never into another line of numbers. An opening that must move a store on takes the first
number of a line of `LINE_LENGTH`, chosen at random above `OPENINGS_FROM`. So two processes that come to one number have
counted there from a common one, and mean the same weights.
"""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod

from kvtier.errors import KVTierError

EPOCH_CEILING = 1 << 61
"""No store states an epoch from here on: what does is no epoch."""
OPENINGS_FROM = 1 << 40
"""Resets count below; openings choose from here on."""
LINE_LENGTH = 1 << 16
_LINE_BITS = 26
_ROOM_TO_COUNT = 1 << 44
"""An opening goes on with no epoch that is nearer to the ceiling: then no reset of a session comes to it."""


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


class SharedEpoch(ABC):
    """A namespace's epoch in this process.

    `now` is the epoch of the last reset in this process; it holds at once, in memory. What others see is raised by one
    call at a time. A process that `has_left` finds and stores nothing that others do, until it is started again.
    """

    def __init__(self) -> None:
        self.now = 0
        self.has_left = False
        self._raised = -1
        """What others were last seen to see; -1 before the beginning."""
        self._raising = asyncio.Lock()

    async def begin(self, new_epoch: int) -> bool:
        """Begin with what the store states, or have one that states nothing usable state `new_epoch`.

        True if it states that now because of this call. Raises OSError, KVTierError.
        """
        self.now = self._raised = await self._begin(new_epoch)
        return self._is_new()

    async def state(self, epoch: int) -> int:
        """Before the first job: have the store state the epoch of the stack's other tiers, unless it states another one
        than at the beginning. Returns what it states, which holds here. Raises OSError, KVTierError."""
        async with self._raising:
            self.now = self._raised = await self._state(epoch)
        return self.now

    async def reset(self, epoch: int) -> None:
        """Raise it for all processes before this returns. Raises KVTierError if that failed; `now` holds."""
        self.now = max(self.now, epoch)
        try:
            await self._raise(epoch)
        except OSError as error:
            raise self._failure(error) from error

    def leave(self) -> None:
        """Share nothing with other processes any more. What this one resets to later moves them on all the same."""
        self.has_left = True

    async def _raise(self, epoch: int) -> None:
        if epoch <= self._raised:
            return
        async with self._raising:
            if epoch > self._raised:
                await self._count(epoch)
                self._raised = epoch

    @abstractmethod
    async def _begin(self, new_epoch: int) -> int:
        """See `begin`. Returns what the store states."""

    @abstractmethod
    def _is_new(self) -> bool:
        """True if `_begin` made what the store states."""

    @abstractmethod
    async def _state(self, epoch: int) -> int:
        """See `state`."""

    @abstractmethod
    async def _count(self, epoch: int) -> None:
        """A reset to this epoch, for others to see. Raises OSError, KVTierError."""

    @abstractmethod
    def _failure(self, error: OSError) -> KVTierError:
        """The exception of a reset that the store did not take."""
