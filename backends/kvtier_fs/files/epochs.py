"""The epoch of a tier's namespace on a shared root: which one counts, and whether the disk has taken it."""

import asyncio
from functools import partial

from kvtier.errors import RootError
from kvtier.tier_api.shared_epoch import SharedEpoch
from kvtier_fs.files.folder import Busy
from kvtier_fs.files.root import SharedRoot

_WAIT_SECONDS = 0.01


class Epoch(SharedEpoch):
    """One namespace's epoch in this process.

    No block is stored under an epoch that this process has not seen become durable: a number that a crash takes back
    would be given to the next reset, and what had been stored under it would count again.
    """

    def __init__(self, root: SharedRoot, namespace: bytes) -> None:
        super().__init__()
        self._root = root
        self._namespace = namespace

    def _failure(self, error: OSError) -> RootError:
        return RootError(self._root.path, f"the epoch cannot be written ({error.strerror})")

    async def on_disk(self, epoch: int, storing: bool) -> int | None:
        """What the root states now, None if nothing it states counts. Raises OSError.

        Before a store `epoch` is written again if it is not durable yet; None if that fails.
        """
        self.now = max(self.now, epoch)
        if storing and epoch > self._raised:
            try:
                await self._raise(epoch)
            except (OSError, RootError):
                self._root.counters["reset.failed"] += 1
                return None
        return await self._root.call(self._root.folder.epoch, self._namespace)

    async def _write(self, epoch: int) -> int:
        """Durably."""
        return await self._root.with_room(partial(self._write_locked, epoch))

    async def _write_locked(self, epoch: int) -> int:
        """Write the epoch once no other process holds the lock. Raises RootError after `lock_seconds`, OSError."""
        root, loop = self._root, asyncio.get_running_loop()
        deadline = loop.time() + root.hooks.lock_seconds
        while True:
            stored = await root.call(root.folder.raise_epoch, self._namespace, epoch, root.temporary())
            if not isinstance(stored, Busy):
                return stored
            if loop.time() >= deadline:
                raise RootError(root.path, "another process holds the lock of the epochs; is it stopped or hung?")
            await asyncio.sleep(_WAIT_SECONDS)
