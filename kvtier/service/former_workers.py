"""Workers that may have a copy into or out of rows in flight, over the life of one stack process and the next.

A worker is gone when its process has exited, or when it has connected to the process of today and has no copy of before
left: it says so (`Ready`). Those of another PID namespace can only say so.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from kvtier.service.row_table import Worker


def worker_of(token: str, participant: int, pid: int) -> Worker:
    """A worker that has connected just now. `token` is its engine's."""
    digest = blake2b(f"{token}|{participant}".encode(), digest_size=8).digest()
    return Worker(int.from_bytes(digest) | 1, pid, started(pid))


def started(pid: int) -> int:
    """The time at which a process began, in clock ticks since the start of the host; 0 if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])


class FormerWorkers:
    """Workers of a process before, in the loop of this one. `on_gone` is called for each of them."""

    def __init__(self, workers: list[Worker], on_gone: Callable[[Worker], None]) -> None:
        self._on_gone = on_gone
        self._pidfds: dict[Worker, int] = {}
        self._loop = asyncio.get_running_loop()
        for worker in workers:
            self._watch(worker)

    def _watch(self, worker: Worker) -> None:
        pidfd = -1
        if worker.pid:
            with suppress(OSError):
                pidfd = os.pidfd_open(worker.pid)
            if started(worker.pid) != worker.started:  # read with the descriptor open: it is of this very process
                self._loop.call_soon(self.end, worker)
            elif pidfd >= 0:
                self._loop.add_reader(pidfd, self.end, worker)
        self._pidfds[worker] = pidfd

    def end(self, worker: Worker) -> None:
        """A worker has exited, or is ready. Others than those of before are ignored."""
        pidfd = self._pidfds.pop(worker, None)
        if pidfd is None:
            return
        self._close(pidfd)
        self._on_gone(worker)

    def _close(self, pidfd: int) -> None:
        if pidfd >= 0:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)

    def close(self) -> None:
        """Watch none any more."""
        while self._pidfds:
            self._close(self._pidfds.popitem()[1])
