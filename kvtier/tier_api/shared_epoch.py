"""The epoch of a namespace in a tier that processes share: what holds here at once, and what others see."""

import asyncio
from abc import ABC, abstractmethod

from kvtier.errors import KVTierError


class SharedEpoch(ABC):
    """One namespace's epoch in this process.

    `now` is the epoch of the last reset in this process; it holds at once, in memory. What others see is raised by one
    call at a time.
    """

    def __init__(self) -> None:
        self.now = 0
        self._raised = -1
        """What others were last seen to see; -1 before the beginning."""
        self._raising = asyncio.Lock()

    async def begin(self) -> int:
        """The epoch that the store states; a namespace without one gets it. Raises OSError, KVTierError."""
        await self._raise(0)
        self.now = self._raised
        return self.now

    async def reset(self, epoch: int) -> None:
        """Raise it for all processes before this returns. Raises KVTierError if that failed; `now` holds."""
        self.now = max(self.now, epoch)
        try:
            await self._raise(epoch)
        except OSError as error:
            raise self._failure(error) from error

    async def _raise(self, epoch: int) -> None:
        if epoch <= self._raised:
            return
        async with self._raising:
            if epoch > self._raised:
                self._raised = await self._write(epoch)

    @abstractmethod
    async def _write(self, epoch: int) -> int:
        """Raise it in the store. Returns up to where it has been raised. Raises OSError, KVTierError."""

    @abstractmethod
    def _failure(self, error: OSError) -> KVTierError:
        """What a reset raises that the store did not take."""
