"""The epoch of a tier's namespace on a shared root: which one counts, and whether the disk has taken it."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

from kvtier.errors import RootError
from kvtier_fs.files import opening
from kvtier_fs.files.root import SharedRoot


class Epoch:
    """One namespace's epoch as this process knows it.

    `now` is what the process was told last; it holds at once, in memory. No block is stored under an epoch that this
    process has not seen become durable: a number that a crash takes back would be given to the next reset, and what
    had been stored under it would count again.
    """

    def __init__(self, root: SharedRoot, namespace: bytes, counters: Counter[str]) -> None:
        self._root = root
        self._namespace = namespace
        self._counters = counters
        self._durable = -1
        self._raising = asyncio.Lock()
        self.now = 0

    async def begin(self) -> int:
        """The epoch that the root states, made durable. Raises RootError, OSError."""
        change = partial(self._root.folder.begin_epoch, self._namespace)
        self.now = self._durable = await opening.change_epoch(self._root, change)
        return self.now

    async def reset(self, epoch: int) -> None:
        """Raise it for everybody, durably before this returns. Raises RootError if that failed; `now` holds anyway."""
        self.now = max(self.now, epoch)
        try:
            await self._raise(epoch)
        except OSError as error:
            raise RootError(self._root.path, f"the epoch cannot be written ({error.strerror})") from error

    async def on_disk(self, epoch: int, storing: bool) -> int | None:
        """What the root states now, None if nothing it states counts. Raises OSError.

        Before a store the disk gets another chance to take `epoch`, if it has not yet; None if it still does not.
        """
        self.now = max(self.now, epoch)
        if storing and epoch > self._durable:
            try:
                await self._raise(epoch)
            except (OSError, RootError):
                self._counters["reset.failed"] += 1
                return None
        return await self._root.call(self._root.folder.epoch, self._namespace)

    async def _raise(self, epoch: int) -> None:
        async with self._raising:
            if epoch > self._durable:
                change = partial(self._root.folder.raise_epoch, self._namespace, epoch)
                self._durable = await opening.change_epoch(self._root, change)
