"""The contract of I/O engines: requests go in, completions come out on the event loop, buffers stay whole."""

from __future__ import annotations

import ctypes
import mmap
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from copy import copy
from enum import Enum
from typing import ClassVar

import numpy as np

MAX_BUFFERS = 64
"""Buffers of one request, at most."""


def places_of(buffers: Sequence[memoryview]) -> array[int]:
    """The addresses and lengths of writable buffers in turn: a `struct iovec` of the kernel for each."""
    words = array("Q")
    for buffer in buffers:
        words.extend((ctypes.addressof(ctypes.c_char.from_buffer(buffer)), buffer.nbytes))
    return words


class IOKind(Enum):
    READ = "read"
    WRITE = "write"


class IORequest:
    """A vectored read or write at an offset of an open file.

    `done(request, result)` is called once, on the event loop: bytes moved (0 at a file's end) or a negative errno.
    Until then the engine holds `buffers`, also when their job no longer waits. `places` are those of the buffers for an
    engine that passes them to the kernel (see `places_of`); None where it has to make them. `retries` counts how often
    an interrupted request was submitted again.
    """

    __slots__ = ("buffers", "done", "fd", "kind", "length", "offset", "places", "retries")

    def __init__(
        self,
        kind: IOKind,
        fd: int,
        offset: int,
        buffers: list[memoryview],
        done: Callable[[IORequest, int], None],
        places: array[int] | None = None,
    ) -> None:
        self.kind = kind
        self.fd = fd
        self.offset = offset
        self.buffers = buffers
        self.done = done
        self.length = sum(map(len, buffers))
        self.places = places
        self.retries = 0

    def rest(self, buffers: list[memoryview], moved: int) -> IORequest:
        """The request for the `buffers` that are left once `moved` bytes have moved."""
        rest = copy(self)
        rest.offset, rest.buffers, rest.length, rest.places = self.offset + moved, buffers, self.length - moved, None
        return rest


class IOEngine(ABC):
    """Runs requests in the order they come, a bounded number at once; belongs to one event loop.

    A request that was submitted always ends, with bytes or an errno, and is never cancelled. An engine knows nothing
    of slots; it continues no short transfer and retries nothing.
    """

    name: ClassVar[str]

    depth: int = 32
    """Requests that it runs at once."""

    after_turn: Callable[[], None] | None = None
    """Called by some engines after a turn's completions, so that more can be submitted in the same turn."""

    @abstractmethod
    def submit(self, requests: Sequence[IORequest]) -> None:
        """Queue requests. Loop thread only; never blocks and never calls `done` before it returns.

        If it raises, none of them was begun; OSError (EIO) after a failure.
        """

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Requests that have not ended, queued ones included."""

    @abstractmethod
    async def close(self, timeout_seconds: float) -> int:
        """Wait for every request to end, then release everything.

        Returns how many have not ended at the deadline; then nothing is released that they still use. Idempotent.
        """


class HeaderPages:
    """`count` pages of `page_bytes`, aligned to their size (a power of two); each has one holder at a time.

    `free` holds the numbers of the pages without a holder. There is nothing to close: the memory is unmapped when no
    view of a page is left, in an engine with I/O in flight included.
    """

    def __init__(self, count: int, page_bytes: int) -> None:
        view = memoryview(mmap.mmap(-1, (count + 1) * page_bytes))
        base = _address(view)
        start = -base % page_bytes
        places = range(start, start + count * page_bytes, page_bytes)
        self.pages = [view[at : at + page_bytes] for at in places]
        self.addresses = [base + at for at in places]
        self.free = list(range(count))

    def acquire(self) -> int:
        """The number of a free page; its bytes are whatever its last holder left. IndexError if there is none."""
        return self.free.pop()

    def release(self, number: int) -> None:
        """Give a page back, once no I/O uses it any more."""
        self.free.append(number)

    def acquire_all(self, count: int) -> list[int]:
        """The numbers of `count` free pages. IndexError if there are not so many."""
        if not 0 < count <= len(self.free):
            raise IndexError(f"{count} pages were asked for, {len(self.free)} are free")
        taken = self.free[-count:]
        del self.free[-count:]
        return taken


def _address(view: memoryview) -> int:
    """The address of a buffer."""
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
