"""The epoch of a tier's namespace on a shared root: the file that states it, and whether the disk has taken it."""

import asyncio
import errno
from functools import partial

from kvtier.tier.shared_epoch import Marker, SharedEpoch, fresh_epoch
from kvtier_fs.shared.folder import LockBusy
from kvtier_fs.shared.root import SharedRoot

_WAIT_SECONDS = 0.01


class FolderEpoch(SharedEpoch):
    """A namespace's epoch in this process. Its file states a number alone."""

    def __init__(self, root: SharedRoot, namespace: bytes) -> None:
        super().__init__(self._read_file, self._swap_file)
        self._root = root
        self._namespace = namespace

    async def begin(self, new_epoch: int) -> bool:
        """Begin as `SharedEpoch` does. A file that states none may have stated a reset: then the namespace begins a new
        line."""
        if await self._root.call(self._root.folder.has_lost_epoch, self._namespace):
            new_epoch = new_epoch or fresh_epoch()
        return await super().begin(new_epoch)

    async def on_disk(self, epoch: int, storing: bool) -> int | None:
        """The epoch that the root states now, None if nothing it states counts. Raises OSError.

        Before a store `epoch` is written again if it is not durable yet; None if that fails.
        """
        self.now = max(self.now, epoch)
        if storing and epoch > self.raised:
            try:
                await self.reset(epoch)
            except OSError:
                self._root.counters["reset.failed"] += 1
                return None
        stated = await self._root.call(self._root.folder.epoch, self._namespace)
        if stated is None or stated < self.raised:
            self.leave()
        return None if self.has_left else stated

    async def _read_file(self) -> Marker | None:
        return _marker(await self._root.call(self._root.folder.durable_epoch, self._namespace))

    async def _swap_file(self, held: Marker | None, marker: Marker) -> Marker | None:
        epochs = None if held is None else held.epoch, marker.epoch
        return _marker(await self._root.with_room(partial(self._swap_locked, *epochs)))

    async def _swap_locked(self, held: int | None, epoch: int) -> int | None:
        """Write the epoch once no other process holds the lock. Raises OSError, also after `lock_seconds`."""
        root, loop = self._root, asyncio.get_running_loop()
        deadline = loop.time() + root.hooks.lock_seconds
        while True:
            stated = await root.call(root.folder.swap_epoch, self._namespace, held, epoch, root.temporary())
            if not isinstance(stated, LockBusy):
                return stated
            if loop.time() >= deadline:
                raise OSError(errno.EBUSY, "another process holds the lock of the epochs; is it stopped or hung?")
            await asyncio.sleep(_WAIT_SECONDS)


def _marker(epoch: int | None) -> Marker | None:
    return None if epoch is None else Marker(b"", epoch)
