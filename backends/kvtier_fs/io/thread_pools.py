"""The threads of one root: few, bounded, daemonic, and of that root alone."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass

from kvtier.aio.daemon_pool import DaemonPool

_FILE_THREADS = _CHECK_THREADS = 2


@dataclass(frozen=True, slots=True)
class RootPools:
    """The threads of one root: for calls on files, for reading and writing blocks, for checking what was read.

    Each kind has its own, so that calls that a disk does not answer hold up none of the others.
    """

    files: DaemonPool
    io: DaemonPool
    checks: DaemonPool

    @staticmethod
    def of(path: str, io_threads: int) -> RootPools:
        """The threads of a root; none of them is started yet."""
        name = f"kvtier-fs-{os.path.basename(path)}"
        return RootPools(
            DaemonPool(f"{name}-files", _FILE_THREADS),
            DaemonPool(f"{name}-io", io_threads),
            DaemonPool(f"{name}-checks", _CHECK_THREADS),
        )

    async def begin(self) -> None:
        """Have a thread for calls on files and one for checks, so that it is known early if there is none to be had.

        Raises OSError. An engine that finds no thread later says so request by request.
        """
        for threads in (self.files, self.checks):
            await asyncio.wrap_future(threads.submit(_nothing))

    async def close(self, timeout_seconds: float) -> int:
        """Let all of them end. Returns how many are stuck at the deadline."""
        each = (self.io, self.checks, self.files)
        return sum(await asyncio.gather(*(threads.close(timeout_seconds) for threads in each)))


def _nothing() -> None:
    """What a thread does to be there."""
