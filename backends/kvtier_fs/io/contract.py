"""What an I/O engine is: requests go in, completions come out on the event loop, buffers stay whole in between."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import ClassVar

COMPLETIONS_PER_TURN = 64
"""Completions handed out in one turn of the event loop, at most."""

MAX_BUFFERS = 64
"""Buffers of one request, at most."""

SUBMIT_SECONDS_PER_TURN = 0.001
"""Time spent submitting in one turn of the event loop, about."""


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


def hand_out(loop: asyncio.AbstractEventLoop, ended: deque[tuple[IORequest, int]], then: Callable[[], None]) -> None:
    """Tell each request its result, and at last call `then`.

    What a receiver raises is the loop's to report; those behind it are told in the next turn all the same.
    """
    try:
        while ended:
            request, result = ended.popleft()
            request.done(request, result)
    finally:
        if ended:
            loop.call_soon(hand_out, loop, ended, then)
        else:
            then()


class IOEngine(ABC):
    """Runs requests in the order they come, a bounded number at once; belongs to one event loop.

    A request that was submitted always ends, with bytes or an errno, and is never cancelled. An engine knows nothing
    of slots; it continues no short transfer and retries nothing.
    """

    name: ClassVar[str]

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
