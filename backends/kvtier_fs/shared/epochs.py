"""The epoch of a tier's namespace on a shared root: which one counts, and whether the disk has taken it."""

import asyncio
import errno
from functools import partial

from kvtier.errors import RootError
from kvtier.tier.shared_epoch import SharedEpoch, fresh_epoch, is_usable, line_of
from kvtier_fs.shared.folder import LockBusy
from kvtier_fs.shared.root import SharedRoot

_WAIT_SECONDS = 0.01
_ATTEMPTS = 10


class Epoch(SharedEpoch):
    """One namespace's epoch in this process.

    No block is stored under an epoch that this process has not seen become durable: a number that a crash takes back
    would be given to the next reset, and what had been stored under it would count again.

    A reset counts from the number that this process has last seen, if it is there yet. Where others have counted
    further it stays: they mean weights that come later. Where it is lost, was set back or is of another line, it is not
    known whose weights it means. The reset moves the namespace on to a new line then, so that who opens later finds
    nothing from before; this process leaves.
    """

    def __init__(self, root: SharedRoot, namespace: bytes) -> None:
        super().__init__()
        self._root = root
        self._namespace = namespace
        self._held: int | None = None
        self._made = -1

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
        stated = await self._root.call(self._root.folder.epoch, self._namespace)
        if stated is None or stated < self._raised:
            self.leave()
        return None if self.has_left else stated

    async def _begin(self, new_epoch: int) -> int:
        if await self._root.call(self._root.folder.has_lost_epoch, self._namespace):
            new_epoch = new_epoch or fresh_epoch()
        self._made = new_epoch
        self._held = await self._swap(None, new_epoch)
        if self._held is None or not is_usable(self._held):
            self._held = await self._swap(self._held, new_epoch)
        return self._stated()

    def _is_new(self) -> bool:
        return self._held == self._made

    async def _state(self, epoch: int) -> int:
        self._held = await self._swap(self._held, epoch)
        return self._stated()

    def _stated(self) -> int:
        if self._held is None or not is_usable(self._held):
            raise RootError(self._root.path, "another process removes or damages the epoch of the namespace")
        return self._held

    async def _count(self, epoch: int) -> None:
        """One that fails is not repeated from the same number: what follows it may be for the same weights."""
        try:
            await self._count_on(epoch)
        except (OSError, RootError):
            self.leave()
            raise

    async def _count_on(self, epoch: int) -> None:
        for _ in range(_ATTEMPTS):
            held = await self._root.call(self._root.folder.epoch, self._namespace)
            if not self.has_left and held is not None and held >= epoch and line_of(held) == line_of(self._raised):
                await self._swap(held, held)
                return
            counted = not self.has_left and held == self._raised and line_of(epoch) == line_of(held)
            usable = [one for one in (held, self._raised) if one is not None and is_usable(one)]
            following = epoch if counted else fresh_epoch(max(usable, default=0))
            if await self._swap(held, following) == following:
                if not counted:
                    self.leave()
                return
        raise OSError(errno.EBUSY, "other processes write the epoch")

    async def _swap(self, held: int | None, epoch: int) -> int | None:
        """Durably."""
        return await self._root.with_room(partial(self._swap_locked, held, epoch))

    async def _swap_locked(self, held: int | None, epoch: int) -> int | None:
        """Write the epoch once no other process holds the lock. Raises RootError after `lock_seconds`, OSError."""
        root, loop = self._root, asyncio.get_running_loop()
        deadline = loop.time() + root.hooks.lock_seconds
        while True:
            stated = await root.call(root.folder.swap_epoch, self._namespace, held, epoch, root.temporary())
            if not isinstance(stated, LockBusy):
                return stated
            if loop.time() >= deadline:
                raise RootError(root.path, "another process holds the lock of the epochs; is it stopped or hung?")
            await asyncio.sleep(_WAIT_SECONDS)
