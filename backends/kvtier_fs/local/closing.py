"""Letting a root go: its I/O first, then its session, its files and its threads, in as many calls as that takes."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

from kvtier.aio.each_step import take_in_turn
from kvtier.types.jobs import DropReason, dropped
from kvtier_fs.local.root import Root
from kvtier_fs.local.root_queue import RootQueue

_log = logging.getLogger("kvtier.fs")
_LOOK_SECONDS = 0.05
_PATIENCE_SECONDS = 60.0


class RootCloser:
    """The end of one root. `queue` moves its blocks; None if no session began.

    It runs in a task of its own, however long the disk takes, and releases the lock last. Waiting for it is optional.
    """

    def __init__(self, root: Root, queue: RootQueue | None, counters: Counter[str]) -> None:
        self._root = root
        self._queue = queue
        self._counters = counters
        self._ending: asyncio.Task[None] | None = None
        steps = [self._end_jobs, self._end_engine, self._end_session, self._leave, self._end_threads]
        self._steps: list[Callable[[], Awaitable[None]]] = [*steps]

    async def within(self, timeout_seconds: float) -> int:
        """Wait for the end until a deadline. Returns how many requests, or other calls of the disk, are stuck then.

        Jobs whose I/O is stuck are reported late. What that I/O uses is kept, above all the lock.
        """
        if self._ending is None or (self._ending.done() and self._ending.exception() is not None):
            self._ending = asyncio.create_task(self._end(), name=f"close {self._root.path}")
        await asyncio.wait([self._ending], timeout=timeout_seconds)
        if self._ending.done():
            self._ending.result()
            return 0
        _log.warning("%s: I/O is stuck; the folder stays locked until it ends", self._root.path)
        if self._queue is not None:
            self._queue.give_up()
        return max(1, self._root.requests_in_flight)

    async def _end(self) -> None:
        """Let go of everything, in order. Cut short by the end of the loop it leaves what may be in use as it is."""
        await take_in_turn(self._steps)

    async def _end_jobs(self) -> None:
        if self._queue is not None:
            self._queue.withdraw(dropped(DropReason.CLOSING))
            await self._queue.idle()
        await self._root.formats_ended()

    async def _end_engine(self) -> None:
        while await self._root.stop_engine(_PATIENCE_SECONDS):  # noqa: ASYNC110 - it has waited; some return at once
            await asyncio.sleep(_LOOK_SECONDS)

    async def _leave(self) -> None:
        with suppress(OSError):  # not one thread was to be had, so nothing was opened either
            await self._root.call(self._root.folder.leave)

    async def _end_threads(self) -> None:
        while await self._pools_stuck():  # noqa: ASYNC110 - it has waited; there is no memory perhaps
            await asyncio.sleep(_LOOK_SECONDS)

    async def _pools_stuck(self) -> bool:
        """Let the threads end. True if some have not yet, or there was no memory to tell them."""
        try:
            return bool(await self._root.pools.close(_PATIENCE_SECONDS))
        except MemoryError:
            return True

    async def _end_session(self) -> None:
        """Write the snapshot, then say that the session ended in order: it counts only if this does.

        Whatever fails costs the next open a scan, and nothing else. So does a queue that has failed: its map of the
        slots may be wrong.
        """
        root, queue = self._root, self._queue
        if queue is None:
            return
        if queue.failed:
            self._counters["close.unclean"] += 1
            return
        try:
            try:
                await root.write_snapshot(queue.side.layout.snapshot_bytes)
            except OSError as error:
                _log.info("%s: no snapshot (%s)", root.path, error)
                self._counters["close.no_snapshot"] += 1
            await root.write_superblock(replace(root.superblock, clean=True))
        except Exception as error:  # whatever it is: the folder must be left, or it stays locked
            _log.info("%s: not closed in order (%s)", root.path, error)
            self._counters["close.unclean"] += 1
