"""Full transfers: a request counts once its last byte moved. Short ones are continued, interrupted ones repeated."""

import asyncio
import errno
from collections import Counter
from collections.abc import Callable, Sequence

from kvtier_fs.io.contract import IOEngine, IOKind, IORequest

REQUEST_BYTES = 1152 << 10
"""Bytes of one request, at most."""
_RETRIES = 8
_AGAIN = (-errno.EAGAIN, -errno.EINTR)

Place = tuple[int, int]
"""An open file and an offset in it."""


class FullTransferIO:
    """The I/O engine of one root, and the meaning of its results.

    `alignment`: what a short transfer must be a multiple of to go on, in bytes.
    """

    def __init__(self, engine: IOEngine, alignment: int, counters: Counter[str]) -> None:
        self.engine = engine
        self._alignment = alignment
        self._counters = counters

    def shortfall(self, request: IORequest, result: int) -> int | None:
        """The errno of a result: 0 if all of the request moved.

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
            self.engine.submit([request.rest(span(request.buffers, result, request.length), result)])
            return None
        return -result if result < 0 else errno.EIO

    def count_error(self, number: int) -> None:
        """Count an operation of the disk that failed for good."""
        self._counters[f"errno.{errno.errorcode.get(number, number)}"] += 1

    async def move(self, kind: IOKind, buffers: Sequence[memoryview], places: Sequence[Place]) -> list[int]:
        """Move each buffer from or to its place. Returns an errno for each, 0 when all of it moved."""
        return await self._move(kind, [(place, [buffer]) for place, buffer in zip(places, buffers, strict=True)])

    async def move_file(self, kind: IOKind, fd: int, buffers: Sequence[memoryview], alignment: int) -> int:
        """Move `buffers` from or to the beginning of a file. Returns an errno, counted, or 0 when every byte moved.

        Never to be cancelled: the engine uses the buffers until every request has ended.
        """
        parts = split(sum(map(len, buffers)), alignment)
        errors = await self._move(kind, [((fd, start), span(buffers, start, end)) for start, end in parts])
        number = next(filter(None, errors), 0)
        if number:
            self.count_error(number)
        return number

    async def _move(self, kind: IOKind, parts: Sequence[tuple[Place, list[memoryview]]]) -> list[int]:
        results = [0] * len(parts)
        left = len(parts)
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done_with(number: int) -> Callable[[IORequest, int], None]:
            def done(request: IORequest, result: int) -> None:
                nonlocal left
                error: int | None = errno.EIO
                try:
                    error = self.shortfall(request, result)
                finally:
                    if error is not None:
                        results[number] = error
                        left -= 1
                        if not left and not ended.done():
                            ended.set_result(None)

            return done

        requests = [IORequest(kind, *place, buffers, done_with(at)) for at, (place, buffers) in enumerate(parts)]
        if requests:
            self.engine.submit(requests)
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


def split(total: int, alignment: int) -> list[tuple[int, int]]:
    """Cut a transfer into pieces of nearly one size, aligned, of at most REQUEST_BYTES each."""
    pieces = -(-total // REQUEST_BYTES)
    size = min(-(-total // pieces // alignment) * alignment, REQUEST_BYTES)
    return [(start, min(start + size, total)) for start in range(0, total, size)]
