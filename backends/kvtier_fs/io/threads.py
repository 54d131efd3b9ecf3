"""The engine that works everywhere: preadv and pwritev on the root's own threads."""

import asyncio
import errno
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import ClassVar

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.aio.loop_budget import TimeBudget
from kvtier_fs.io.contract import IOKind, IORequest
from kvtier_fs.io.loop_engine import Ended, LoopEngine

_LINGER_SECONDS = 1.0
"""A thread without work waits so long for more: to give it another call costs more than a short request."""


class ThreadsEngine(LoopEngine):
    """Up to `depth` requests at once, one on each thread; completions reach the loop in batches."""

    name: ClassVar[str] = "threads"

    def __init__(
        self, loop: asyncio.AbstractEventLoop, threads: DaemonPool, depth: int, budget: TimeBudget | None = None
    ) -> None:
        super().__init__(loop, budget)
        self.depth = depth
        self._threads = threads
        self._servers = 0
        self._calls: set[Future[None]] = set()
        self._queue: SimpleQueue[IORequest | None] = SimpleQueue()
        self._finished: deque[tuple[IORequest | None, int]] = deque()
        self._signalled = False
        self._in_flight = 0

    @property
    def in_flight(self) -> int:
        return self._in_flight + len(self._completions.ended)

    def _enqueue(self, requests: Sequence[IORequest]) -> None:
        self._in_flight += len(requests)
        for request in requests:
            self._queue.put(request)
        self._pump()

    def _pump(self) -> None:
        """Have as many threads as there is work for."""
        while self._servers < self.depth and self._servers < self._in_flight:
            try:
                self._calls.add(call := self._threads.submit(self._serve))
            except OSError as error:
                # Not one thread is to be had: the requests end, as they would if the kernel had no room for them.
                while not self._queue.empty():
                    self._report(self._queue.get(), -(error.errno or errno.EAGAIN))
                return
            self._servers += 1
            call.add_done_callback(self._calls.discard)

    def _take_queued(self) -> list[IORequest]:
        taken: list[IORequest] = []
        with suppress(Empty):
            while request := self._queue.get_nowait():
                taken.append(request)
        self._in_flight -= len(taken)
        return taken

    def _serve(self) -> None:
        """On a thread: take requests until none has come for a while."""
        while True:
            try:
                request = self._queue.get(timeout=_LINGER_SECONDS)
            except Empty:
                break
            if request is None:
                break
            move = os.preadv if request.kind is IOKind.READ else os.pwritev
            try:
                result = move(request.fd, request.buffers, request.offset)
            except OSError as error:
                result = -(error.errno or errno.EIO)
            except Exception:
                result = -errno.EIO  # whatever it was: a request always ends
            self._report(request, result)
            del request
        self._report(None, 0)

    def _report(self, request: IORequest | None, result: int) -> None:
        self._finished.append((request, result))
        if not self._signalled and self._event is not None:
            self._signalled = True
            self._event.signal()

    def _take(self, most: int) -> list[Ended]:
        self._signalled = False  # before the first is taken: what comes from here on signals again
        ended: list[Ended] = []
        while self._finished and len(ended) < most:
            request, result = self._finished.popleft()
            if request is None:
                self._servers -= 1
            else:
                ended.append((request, result))
        self._in_flight -= len(ended)
        return ended

    async def _release(self) -> None:
        for _ in range(self._servers):
            self._queue.put(None)
        if self._calls:
            await asyncio.wait(map(asyncio.wrap_future, list(self._calls)))
