"""Strict I/O: a request counts once its last byte moved. Short transfers are continued, interrupted ones repeated."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import Callable, Sequence

from kvtier_fs.io.contract import IOEngine, IOKind, IORequest

_RETRIES = 8
_AGAIN = (-errno.EAGAIN, -errno.EINTR)

Place = tuple[int, int]
"""An open file and an offset in it."""


class StrictRequest(IORequest):
    """A request that may go on after its first result."""

    __slots__ = ("retries",)

    def __init__(
        self,
        kind: IOKind,
        fd: int,
        offset: int,
        buffers: list[memoryview],
        done: Callable[[IORequest, int], None],
        places: Sequence[int] = (),
    ) -> None:
        super().__init__(kind, fd, offset, buffers, done, places)
        self.retries = 0

    def after(self, moved: int) -> StrictRequest:
        """The request for what is left once `moved` bytes have moved."""
        return StrictRequest(self.kind, self.fd, self.offset + moved, self.left(moved), self.done)

    def left(self, moved: int) -> list[memoryview]:
        """The buffers' bytes from `moved` on."""
        return span(self.buffers, moved, self.length)


class StrictIO:
    """One root's I/O engine, and what to make of its results.

    `alignment`: what a short transfer must be a multiple of to go on, in bytes.
    """

    def __init__(self, engine: IOEngine, alignment: int, counters: Counter[str]) -> None:
        self.engine = engine
        self._alignment = alignment
        self._counters = counters

    def shortfall(self, request: StrictRequest, result: int) -> int | None:
        """What a result says of a request: 0 if all of it moved, an errno if it failed.

        None if it goes on: a short transfer that is aligned and progressed, or one that was merely interrupted, a few
        times. It was submitted again then, and `done` will be called once more.
        """
        if result == request.length:
            return 0
        if result in _AGAIN and request.retries < _RETRIES:
            request.retries += 1
            self.engine.submit([request])
            return None
        if 0 < result < request.length and not result % self._alignment:
            self._counters["io.short"] += 1
            self.engine.submit([request.after(result)])
            return None
        return -result if result < 0 else errno.EIO

    def count_error(self, number: int) -> None:
        """Count an operation of the disk that failed for good."""
        self._counters[f"errno.{errno.errorcode.get(number, number)}"] += 1

    async def move(self, kind: IOKind, buffers: Sequence[memoryview], places: Sequence[Place]) -> list[int]:
        """Move each buffer from or to its place. Returns an errno for each, 0 when all of it moved."""
        results = [0] * len(places)
        left = len(places)
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def begin(number: int) -> StrictRequest:
            def done(request: IORequest, result: int) -> None:
                nonlocal left
                assert isinstance(request, StrictRequest)
                error = self.shortfall(request, result)
                if error is None:
                    return
                results[number] = error
                left -= 1
                if not left and not ended.done():
                    ended.set_result(None)

            fd, offset = places[number]
            return StrictRequest(kind, fd, offset, [buffers[number]], done)

        if places:
            self.engine.submit([begin(number) for number in range(len(places))])
            await ended
        return results


def span(buffers: Sequence[memoryview], start: int, end: int) -> list[memoryview]:
    """Bytes `start` to `end` of buffers laid one after another."""
    parts = []
    for buffer in buffers:
        part = buffer[max(start, 0) : max(end, 0)]
        if len(part):
            parts.append(part)
        start -= len(buffer)
        end -= len(buffer)
    return parts
