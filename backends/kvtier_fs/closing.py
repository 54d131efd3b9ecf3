"""Letting a root go: its I/O first, then its session, its files and its threads, in as many calls as that takes."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import suppress
from dataclasses import replace

from kvtier.errors import RootError
from kvtier_fs.root import Root

_log = logging.getLogger("kvtier.fs")
_LOOK_SECONDS = 0.05
_PATIENCE_SECONDS = 60.0


class RootEnd:
    """The end of one root. `snapshot_bytes`: what its snapshot may take, None if no session began.

    It goes on by itself to its end, however long its disk takes, and lets go of the lock last. Nobody has to wait.
    """

    def __init__(self, root: Root, counters: Counter[str], snapshot_bytes: int | None) -> None:
        self._root = root
        self._counters = counters
        self._snapshot_bytes = snapshot_bytes
        self._ending: asyncio.Task[None] | None = None

    async def within(self, timeout_seconds: float) -> int:
        """Wait for the end until a deadline. Returns how many requests, or other calls of the disk, are stuck then.

        Jobs whose I/O is stuck are told that it is late; what it uses stays as it is, the lock above all.
        """
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(), name=f"close {self._root.path}")
        await asyncio.wait([self._ending], timeout=timeout_seconds)
        if self._ending.done():
            self._ending.result()
            return 0
        _log.warning("%s: I/O is stuck; the folder stays locked until it ends", self._root.path)
        return max(1, self._root.give_up())

    async def _end(self) -> None:
        """Let go of everything, in order. Cut short by the end of the loop it leaves what may be in use as it is."""
        root = self._root
        await root.drained()
        while await root.stop_engine(_PATIENCE_SECONDS):  # noqa: ASYNC110 - it has waited; engines may return at once
            await asyncio.sleep(_LOOK_SECONDS)
        if self._snapshot_bytes is not None:
            await self._end_session(self._snapshot_bytes)
        with suppress(OSError):  # not one thread was to be had, so nothing was opened either
            await root.call(root.folder.leave)
        while await root.crew.close(_PATIENCE_SECONDS):  # noqa: ASYNC110 - it has waited
            await asyncio.sleep(_LOOK_SECONDS)

    async def _end_session(self, snapshot_bytes: int) -> None:
        """Write the snapshot, then say that the session ended in order: it counts only if this does.

        Whatever fails costs the next open a scan, and nothing else.
        """
        root = self._root
        try:
            await root.write_snapshot(snapshot_bytes)
        except Exception as error:
            _log.info("%s: no snapshot (%s)", root.path, error)
            self._counters["close.no_snapshot"] += 1
        try:
            await root.write_superblock(replace(root.superblock, clean=True))
        except RootError:
            self._counters["close.unclean"] += 1
