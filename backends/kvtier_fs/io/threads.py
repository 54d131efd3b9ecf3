"""The engine that works everywhere: preadv and pwritev on the root's own threads."""

from __future__ import annotations

import asyncio
import errno
import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import ClassVar

from kvtier_fs.io.contract import COMPLETIONS_PER_TURN, Completions, IOEngine, IOKind, IORequest
from kvtier_fs.io.turns import Turns
from kvtier_fs.threads import RootThreads


class ThreadsEngine(IOEngine):
    """Up to `width` requests at once, one on each thread; completions reach the loop in batches."""

    name: ClassVar[str] = "threads"

    def __init__(
        self, loop: asyncio.AbstractEventLoop, threads: RootThreads, width: int, turns: Turns | None = None
    ) -> None:
        self._loop = loop
        self._turns = turns or Turns()
        self._threads = threads
        self._width = width
        self._servers = 0
        self._queue: deque[IORequest] = deque()
        self._finished: deque[tuple[IORequest | None, int]] = deque()
        self._notified = False
        self._in_flight = 0
        self._completions = Completions(loop, self._turns, self._go_on_or_rest)
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        return self._in_flight + len(self._completions)

    def submit(self, requests: Sequence[IORequest]) -> None:
        if not requests:
            return
        self._in_flight += len(requests)
        self._idle.clear()
        self._queue.extend(requests)
        self._call_servers()

    def _call_servers(self) -> None:
        for _ in range(min(len(self._queue), self._width - self._servers)):
            self._servers += 1
            try:
                self._threads.submit(self._serve)
            except OSError as error:
                # Not one thread is to be had: the requests end, as they would if the kernel had no room for them.
                self._report(None, 0)
                while self._queue:
                    self._report(self._queue.popleft(), -(error.errno or errno.EAGAIN))
                return

    def _serve(self) -> None:
        """On a thread: take requests until there are none."""
        while True:
            try:
                request = self._queue.popleft()
            except IndexError:
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
        if not self._notified:
            self._notified = True
            try:
                self._loop.call_soon_threadsafe(self._hand_out)
            except RuntimeError:
                return  # the loop was closed under us; nobody is left to tell

    def _hand_out(self) -> None:
        self._notified = False
        ended: list[tuple[IORequest, int]] = []
        while self._finished and len(ended) < COMPLETIONS_PER_TURN:
            request, result = self._finished.popleft()
            if request is None:
                self._servers -= 1
            else:
                ended.append((request, result))
        if self._finished and not self._notified:
            self._notified = True
            self._loop.call_soon(self._hand_out)
        self._in_flight -= len(ended)
        self._call_servers()
        self._completions.tell(ended)

    def _go_on_or_rest(self) -> None:
        if self.after_turn is not None:
            self.after_turn()
        if not self.in_flight:
            self._idle.set()

    async def close(self, timeout_seconds: float) -> int:
        if self.in_flight:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout_seconds)
        if self.in_flight:
            return self.in_flight
        return 0
