"""What an I/O engine is: requests go in, completions come out on the event loop, buffers stay whole in between."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import ClassVar

from kvtier_fs.io.turns import Turns

COMPLETIONS_PER_TURN = 64
"""Completions handed out in one turn of the event loop, at most."""

MAX_BUFFERS = 64
"""Buffers of one request, at most."""


class IOKind(Enum):
    READ = "read"
    WRITE = "write"


class IORequest:
    """One vectored read or write at an offset of an open file.

    `done(request, result)` is called once, on the event loop: bytes moved (0 at a file's end) or a negative errno.
    Until then the engine holds `buffers`, whatever becomes of those who wait for them. `places` says where they lie
    in memory, address and length in turn, for an engine that tells the kernel; empty where it has to find out.
    """

    __slots__ = ("buffers", "done", "fd", "kind", "length", "offset", "places")

    def __init__(
        self,
        kind: IOKind,
        fd: int,
        offset: int,
        buffers: list[memoryview],
        done: Callable[[IORequest, int], None],
        places: Sequence[int] = (),
    ) -> None:
        self.kind = kind
        self.fd = fd
        self.offset = offset
        self.buffers = buffers
        self.done = done
        self.length = sum(map(len, buffers))
        self.places = places


class Completions:
    """Requests that ended, told their results in their order, some in each turn of the loop.

    `after` is called in each turn in which some were told. What a receiver raises is the loop's to report; those
    behind it are told in the next turn all the same.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, turns: Turns, after: Callable[[], None]) -> None:
        self._loop = loop
        self._turns = turns
        self._after = after
        self._ended: deque[tuple[IORequest, int]] = deque()
        self._called = False
        self._left_at = 0.0

    def __len__(self) -> int:
        """How many have not been told."""
        return len(self._ended)

    def tell(self, ended: Iterable[tuple[IORequest, int]]) -> None:
        """Tell these, now unless others come before them."""
        self._ended.extend(ended)
        if not self._called:
            self._tell()

    def _tell_others(self) -> None:
        self._called = False
        self._turns.note(time.perf_counter() - self._left_at)
        self._tell()

    def _tell(self) -> None:
        until = time.perf_counter() + self._turns.seconds
        try:
            while self._ended:
                request, result = self._ended.popleft()
                request.done(request, result)
                if time.perf_counter() >= until:
                    break
        finally:
            if self._ended:
                self._called = True
                self._loop.call_soon(self._tell_others)
            try:
                self._after()
            finally:
                self._left_at = time.perf_counter()


class IOEngine(ABC):
    """Runs requests in the order they come, a bounded number at once; belongs to one event loop.

    A request that was submitted always ends, with bytes or an errno, and is never cancelled. An engine knows nothing
    of slots; it continues no short transfer and retries nothing.
    """

    name: ClassVar[str]

    after_turn: Callable[[], None] | None = None
    """Called, by engines that care to, when completions were told: more can be submitted in the same turn."""

    @abstractmethod
    def submit(self, requests: Sequence[IORequest]) -> None:
        """Queue requests. Loop thread only; never blocks and never calls `done` before it returns."""

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Requests that have not ended, queued ones included."""

    @abstractmethod
    async def close(self, timeout_seconds: float) -> int:
        """Wait for every request to end, then release everything.

        Returns how many have not ended at the deadline; then nothing is released that they still use. Idempotent.
        """
