"""The stack of a synchronous engine and its stack process for tests.

The stack process of a test is a thread: its socket, sessions and pool are the real ones, and its tiers are objects that
the test may hold, break and look at.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from faults.stepped import SteppedStack
from kvtier.aio.loop_thread import LoopThread
from kvtier.engines.process_stack import ProcessStack
from kvtier.service.channel import is_listening
from kvtier.service.server import StackServer
from kvtier.stack import CloseReport, StackParts, StackStats
from kvtier.tier.contract import LookupResult
from kvtier.types.keys import OffloadKey
from kvtier.types.namespace import Namespace

T = TypeVar("T")
SECONDS = 60.0
IDLE_SECONDS = 3600.0


class ServedHere:
    """A private stack process in a thread: `start` returns its socket; it ends with its last engine.

    `parts` makes the parts of its stack for a namespace.
    """

    def __init__(self, parts: Callable[[Namespace], StackParts], path: str) -> None:
        self.parts, self.path = parts, path
        self.server: StackServer | None = None
        self.thread = LoopThread("served-stack", "stack process")
        self._ended: Any = None

    def start(self) -> str:
        self.thread.open()
        self._ended = self.thread.start(self._serve)
        until = time.monotonic() + SECONDS
        while not is_listening(self.path):
            assert time.monotonic() < until
        return self.path

    async def _serve(self) -> None:
        async with StackServer(self.parts, self.path) as self.server:
            self.server.ends_with_engines = True
            await self.server.wait_idle(IDLE_SECONDS)
            assert self.server.withdraw_if_idle()

    @property
    def pool_opened(self) -> bool:
        """True once an engine has come."""
        return self.server is not None and self.server._pool is not None

    @property
    def is_idle(self) -> bool:
        """True once its engines have gone."""
        return self._ended.wait(0.0) or self.run(lambda: self.server is None or not self.server._has_connections)

    @property
    def pool(self) -> Any:
        assert self.server is not None
        return self.server.pool

    def run(self, call: Callable[..., T], *args: Any) -> T:
        """Call it in the loop."""

        async def called() -> T:
            return call(*args)

        return self.thread.run(called, SECONDS)

    def stats(self) -> StackStats:
        """The figures of the pool, from any thread."""
        return self.run(self.pool.stats)

    def stop(self) -> None:
        """Write back and close, as the process does some time after its last engine."""
        if self.server is not None and self.thread.alive and not self._ended.wait(0.0):
            self.thread.run(self.server.close, SECONDS)
        self.thread.close()


class ServedStack(ProcessStack):
    """A `ProcessStack` and its stack process, which is a thread."""

    def __init__(self, parts: StackParts) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvt")
        self.served = ServedHere(lambda namespace: parts, os.path.join(self._folder.name, "socket"))
        super().__init__(parts, self.served.start)

    def open(self) -> None:
        try:
            super().open()
        except BaseException:
            if self._client is None:
                self._stop()
            raise

    def close(self) -> CloseReport:
        try:
            return super().close()
        finally:
            if self._client is not None and self.served.thread.alive:
                self._stop()

    def _stop(self) -> None:
        self.served.stop()
        self._folder.cleanup()

    def check_integrity(self) -> None:
        super().check_integrity()
        if self.close_report is None and self._client is not None:
            self.served.run(self.served.pool.check_integrity)


Stepped = ServedStack | SteppedStack


def drain(stack: Stepped, seconds: float = 20.0) -> None:
    """Step until nothing is on its way to lower tiers."""
    until = time.monotonic() + seconds
    while stack.has_pending_work or not is_idle(stack):
        assert time.monotonic() < until
        stack.step()
        stack.wait(0.02)


def is_idle(stack: Stepped) -> bool:
    """True if tiers have nothing to do."""
    return not isinstance(stack, ServedStack) or stack.served.run(lambda: stack.served.pool.plane.idle)


def presence(stack: Stepped, names: Sequence[OffloadKey]) -> list[LookupResult]:
    """Step until a lookup knows all of these."""
    until = time.monotonic() + SECONDS
    while LookupResult.RETRY in (found := stack.lookup(names)):
        assert time.monotonic() < until
        stack.step()
        stack.wait(0.02)
    return found
