"""An I/O engine that does real I/O, one request at a time on the loop, and fails as it is told."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import ClassVar

from kvtier_fs.io.contract import IOEngine, IOKind, IORequest
from kvtier_fs.local.opening import Hooks

Fault = Callable[[IORequest], int | None]
"""What becomes of a request: None all of it, n >= 0 at most n bytes, n < 0 that errno and nothing moves."""


class FaultyEngine(IOEngine):
    """Runs each request when the loop comes around, unless held back; `seen` lists them all, `held` those waiting."""

    name: ClassVar[str] = "faulty"

    def __init__(self, fault: Fault | None = None) -> None:
        self.fault: Fault = fault or (lambda request: None)
        self.hold: Callable[[IORequest], bool] = lambda request: False
        self.held: list[IORequest] = []
        self.holding = asyncio.Event()
        self.seen: list[IORequest] = []
        self.running = 0

    def hooks(self) -> Hooks:
        """What a tier needs to run on this engine."""
        return Hooks(engine=lambda root: self)

    @property
    def in_flight(self) -> int:
        return self.running + len(self.held)

    def submit(self, requests: Sequence[IORequest]) -> None:
        for request in requests:
            self.seen.append(request)
            if self.hold(request):
                self.held.append(request)
                self.holding.set()
            else:
                self._start(request)

    def let_go(self) -> None:
        """Run what was held back, and hold nothing more."""
        self.hold = lambda request: False
        held, self.held = self.held, []
        for request in held:
            self._start(request)

    def _start(self, request: IORequest) -> None:
        self.running += 1
        asyncio.get_running_loop().call_soon(self._run, request)

    def _run(self, request: IORequest) -> None:
        self.running -= 1
        limit = self.fault(request)
        if limit is not None and limit < 0:
            request.done(request, limit)
            return
        buffers = request.buffers if limit is None else cut_short(request.buffers, limit)
        move = os.preadv if request.kind is IOKind.READ else os.pwritev
        request.done(request, move(request.fd, buffers, request.offset) if buffers else 0)

    async def close(self, timeout_seconds: float) -> int:
        return self.in_flight


def cut_short(buffers: Sequence[memoryview], limit: int) -> list[memoryview]:
    """The first `limit` bytes of buffers laid one after another."""
    parts = []
    for buffer in buffers:
        if limit > 0:
            parts.append(buffer[:limit])
        limit -= len(buffer)
    return parts
