"""Letting a shared root go: its lease first, then its files and its threads, in as many calls as that takes."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvtier.aio.each_step import TRIES, take_in_turn
from kvtier_fs.shared.root import SharedRoot

_log = logging.getLogger("kvtier.fs")


class SharedRootCloser:
    """The end of one root. No block moves any more."""

    def __init__(self, root: SharedRoot) -> None:
        self._root = root
        self._steps: list[Callable[[], Awaitable[None]]] = [self._end_session, self._leave]
        self._tries = 0
        self._timeout_seconds = 0.0

    async def within(self, timeout_seconds: float) -> int:
        """Remove the lease, close everything, end the threads. Returns how many threads are stuck at the deadline.

        Then, and where it raises, another call goes on.
        """
        root, self._timeout_seconds = self._root, timeout_seconds
        try:
            async with asyncio.timeout(timeout_seconds):
                await take_in_turn(self._steps)
        except TimeoutError:
            return 1  # every thread is stuck in a file call
        stuck = await root.io_threads.close(timeout_seconds)
        return stuck + await root.files.close(timeout_seconds)

    async def _end_session(self) -> None:
        root = self._root
        self._tries += 1
        try:
            await root.clear(self._timeout_seconds / 2)
            await root.calls_ended()  # what they write is swept as soon as it has no lease
            if root.leased:
                await root.call(root.leases.remove, root.lease)
        except Exception as error:  # whatever it is: the folder must be left, or it stays open
            if self._tries < TRIES and not isinstance(error, OSError):
                raise  # such as MemoryError: it is taken again
            _log.info("%s: not closed in order (%s)", root.path, error)
            root.counters["close.unclean"] += 1

    async def _leave(self) -> None:
        await self._root.calls_ended()  # a folder must not be closed under a call that works in it
        await self._root.call(self._root.folder.leave)
