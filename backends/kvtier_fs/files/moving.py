"""One file's bytes through the I/O engine: cut into requests, continued where short, one errno for all of it."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import Sequence

from kvtier_fs.io.contract import IOEngine, IOKind, IORequest
from kvtier_fs.strict import span
from kvtier_fs.transfer import split

_RETRIES = 8
_AGAIN = (-errno.EAGAIN, -errno.EINTR)


class Mover:
    """Moves whole files between their descriptors and memory. `alignment`: what a short transfer must keep to go on."""

    def __init__(self, engine: IOEngine, header_bytes: int, alignment: int, counters: Counter[str]) -> None:
        self.engine = engine
        self._header_bytes = header_bytes
        self._alignment = alignment
        self._counters = counters

    async def move(self, kind: IOKind, fd: int, buffers: Sequence[memoryview]) -> int:
        """Move `buffers` from or to the beginning of a file. Returns an errno, 0 when every byte moved.

        Never to be cancelled: the engine uses the buffers until it has said what became of each request.
        """
        transfer = _Transfer(self)
        total = sum(map(len, buffers))
        requests = [
            IORequest(kind, fd, start, span(buffers, start, end), transfer.part_done)
            for start, end in split(total, self._header_bytes)
        ]
        transfer.left = len(requests)
        self.engine.submit(requests)
        number = await transfer.ended
        if number:
            self._counters[f"errno.{errno.errorcode.get(number, number)}"] += 1
        return number

    def rest(self, request: IORequest, moved: int) -> IORequest | None:
        """What is left to do after a request that ended short, None if it is not to go on."""
        if moved <= 0 or moved > request.length or moved % self._alignment:
            return None
        self._counters["io.short"] += 1
        buffers = span(request.buffers, moved, request.length)
        return IORequest(request.kind, request.fd, request.offset + moved, buffers, request.done)


class _Transfer:
    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.left = 0
        self._errno = 0
        self._retries = 0

    def part_done(self, request: IORequest, result: int) -> None:
        if result != request.length:
            following = self._following(request, result)
            if following is not None:
                self._mover.engine.submit([following])
                return
            self._errno = self._errno or (-result if result < 0 else errno.EIO)
        self.left -= 1
        if not self.left and not self.ended.done():
            self.ended.set_result(self._errno)

    def _following(self, request: IORequest, result: int) -> IORequest | None:
        if result in _AGAIN and self._retries < _RETRIES:
            self._retries += 1
            return request
        return self._mover.rest(request, result)
