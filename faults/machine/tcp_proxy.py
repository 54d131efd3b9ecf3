"""A TCP proxy between a client and a real server, with faults that can be changed while it runs.

It runs in a thread of its own, so its user may block. Unlike the faults of the kernel's own queues it needs no root.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self

from kvtier.aio.loop_thread import LoopThread

_READ_BYTES = 1 << 16
_QUEUED_CHUNKS = 64
_PIECES_A_SECOND = 50
"""With a rate, bytes go on in pieces of this many a second."""


@dataclass(frozen=True, slots=True)
class StreamFaults:
    """The faults of the bytes of one direction. The defaults change nothing.

    Bytes are counted from the moment the faults are set, over all connections, so that each of `stall_after`,
    `cut_after` and `flip_bit` concerns one connection, once. `stall_after`: the connection that carried this many bytes
    carries no more until the faults are changed, and then goes on. `cut_after`: it is reset. `flip_bit`: that bit,
    counted from the lowest of each byte, is inverted.
    """

    delay_seconds: float = 0.0
    delayed_share: float = 1.0
    """So many of the pieces that arrive together are delayed, 0 to 1; those behind a delayed one wait for it."""
    bytes_per_second: float = 0.0
    """Of all connections together; 0 for no limit."""
    stall_after: int | None = None
    cut_after: int | None = None
    flip_bit: int | None = None


UNCHANGED = StreamFaults()


@dataclass(frozen=True, slots=True)
class ProxyFaults:
    """The faults of a proxy. The defaults forward everything as it is.

    `refuse`: nothing listens at the address; connections there are go on. `half_open`: connections are accepted and
    nothing on any of them is ever answered, also when this is over, as if the server's machine had gone without a word
    and another one had taken its address. `answer`: new connections get these bytes for the first that they send, and
    then the end; those there are are reset.
    """

    to_server: StreamFaults = UNCHANGED
    to_client: StreamFaults = UNCHANGED
    refuse: bool = False
    half_open: bool = False
    answer: bytes = b""


HEALTHY = ProxyFaults()


class TcpProxy:
    """Forwards connections to a server: `with TcpProxy(("127.0.0.1", 6379)) as proxy` listens at `proxy.address`.

    `seed` decides which pieces are delayed. Methods may be called from any thread and return once what they do is in
    force. `happened` counts what was done, by name: `connection`, `delay`, `stall`, `cut`, `flip`, `half_open`,
    `answer`.
    """

    def __init__(self, server: tuple[str, int], seed: int = 0) -> None:
        self.server = server
        self.happened: Counter[str] = Counter()
        self._loop = LoopThread("kvtier-proxy", "proxy")
        self._faults = HEALTHY
        chance = random.Random(seed)
        self._to_server = _Direction(chance, self.happened)
        self._to_client = _Direction(chance, self.happened)
        self._tasks: set[asyncio.Task[None]] = set()
        self._place = socket.socket()
        self._listener: socket.socket | None = None
        self._serving: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Listen on a free port of 127.0.0.1. Raises OSError."""
        self._place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._place.bind(("127.0.0.1", 0))
        self._loop.open()
        self._loop.run(self._listen)

    def close(self) -> None:
        """Reset every connection and end. Idempotent."""
        if self._loop.alive:
            self._loop.run(self._end)
            self._loop.close()
        self._place.close()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._place.getsockname()[1])

    @property
    def address(self) -> str:
        """`host:port`."""
        return f"127.0.0.1:{self.port}"

    def set(self, faults: ProxyFaults) -> None:
        """From now on do this, also on connections there are. Bytes are counted from 0 again."""
        self._loop.run(lambda: self._set(faults))

    @contextmanager
    def during(self, faults: ProxyFaults) -> Iterator[None]:
        """Do this for a while, then forward everything as it is."""
        self.set(faults)
        try:
            yield
        finally:
            self.set(HEALTHY)

    def disconnect(self) -> None:
        """Reset the connections there are; new ones are accepted as before."""
        self._loop.run(self._disconnect)

    # -- in the loop of the proxy --------------------------------------------------------------------------------

    async def _listen(self) -> None:
        """On a socket of its own beside the one that keeps the port, so that connections can be refused in between."""
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.setblocking(False)
        self._listener.bind(("127.0.0.1", self.port))
        self._listener.listen()
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """All connections that wait."""
        with suppress(BlockingIOError):
            while self._listener is not None:
                client, _ = self._listener.accept()
                serving = asyncio.ensure_future(self._serve(client))
                self._serving.add(serving)
                serving.add_done_callback(self._serving.discard)

    def _refuse(self) -> None:
        if self._listener is not None:
            self._accept()
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    async def _set(self, faults: ProxyFaults) -> None:
        before, self._faults = self._faults, faults
        self._to_server.set(faults.to_server)
        self._to_client.set(faults.to_client)
        if faults.half_open > before.half_open or faults.answer != before.answer:
            await self._disconnect()
        if faults.refuse:
            self._refuse()
        elif self._listener is None:
            await self._listen()

    async def _disconnect(self) -> None:
        """End what connections do now; they are reset, or stay open in silence if that is the fault."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _end(self) -> None:
        self._refuse()
        self._faults = HEALTHY
        while self._serving:
            await self._disconnect()
            await asyncio.sleep(0)

    async def _serve(self, client: socket.socket) -> None:
        """Serves a connection: a task that `_disconnect` may cancel, and a second one for its silence after that."""
        self.happened["connection"] += 1
        reader, writer = await asyncio.open_connection(sock=client)
        was_cancelled = await self._as_task(self._behave(reader, writer))
        if was_cancelled and self._faults.half_open:
            await self._as_task(self._behave(reader, writer))
        _reset(writer)

    async def _as_task(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run it. Returns whether it was cancelled; a connection that fails has ended, and that is all."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        await asyncio.wait([task])
        self._tasks.discard(task)
        if task.cancelled():
            return True
        _ignore_lost_connections(task.exception())
        return False

    async def _behave(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._faults.half_open:
            self.happened["half_open"] += 1
            await _swallow(reader)
        elif self._faults.answer:
            if await reader.read(_READ_BYTES):
                self.happened["answer"] += 1
                writer.write(self._faults.answer)
                writer.write_eof()
                await _swallow(reader)
        else:
            await self._forward(reader, writer)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection(*self.server)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._to_server.forward(reader, to_server))
                both.create_task(self._to_client.forward(from_server, writer))
        finally:
            _reset(to_server)


class _Direction:
    """The bytes of all connections one way. `passed` of them have gone on since the faults were set."""

    def __init__(self, chance: random.Random, happened: Counter[str]) -> None:
        self._chance = chance
        self._happened = happened
        self._changed = asyncio.Event()
        self.set(UNCHANGED)

    def set(self, faults: StreamFaults) -> None:
        """Do this from now on; what is stalled goes on."""
        self._changed.set()
        self._changed = asyncio.Event()
        self._faults = faults
        self._passed = 0
        self._free_at = 0.0
        points = {"stall": faults.stall_after, "cut": faults.cut_after}
        self._points = {fault: point for fault, point in points.items() if point is not None}

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """All of one connection, up to its end, which is passed on. Raises OSError where the connection is lost."""
        chunks = asyncio.Queue[tuple[float, bytes]](_QUEUED_CHUNKS)
        async with asyncio.TaskGroup() as both:
            both.create_task(self._receive(reader, chunks))
            both.create_task(self._send(chunks, writer))

    async def _receive(self, reader: asyncio.StreamReader, chunks: asyncio.Queue[tuple[float, bytes]]) -> None:
        """With a delay, the next bytes arrive while the ones before wait: a long way, not a narrow one."""
        chunk = b"..."
        while chunk:
            chunk = await reader.read(_READ_BYTES)
            due = asyncio.get_running_loop().time()
            if chunk and self._faults.delay_seconds and self._chance.random() < self._faults.delayed_share:
                due += self._faults.delay_seconds
                self._happened["delay"] += 1
            await chunks.put((due, chunk))

    async def _send(self, chunks: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while (received := await chunks.get())[1]:
            due, chunk = received
            if (wait := due - loop.time()) > 0:
                await asyncio.sleep(wait)
            while chunk:
                piece, fault = self._next_piece(chunk)
                chunk = chunk[len(piece) :]
                await self._take_turn(len(piece))
                writer.write(piece)
                await writer.drain()
                if fault == "cut":
                    raise ConnectionResetError
                if fault == "stall":
                    await self._changed.wait()
        writer.write_eof()

    async def _take_turn(self, size: int) -> None:
        """Wait until the rate allows `size` bytes more."""
        if rate := self._faults.bytes_per_second:
            now = asyncio.get_running_loop().time()
            self._free_at = max(now, self._free_at) + size / rate
            await asyncio.sleep(self._free_at - now)

    def _next_piece(self, chunk: bytes) -> tuple[bytearray, str]:
        """The piece that goes on now, and the fault that comes after it, if any."""
        rate, bit = self._faults.bytes_per_second, self._faults.flip_bit
        end = self._passed + (min(len(chunk), max(1, int(rate / _PIECES_A_SECOND))) if rate else len(chunk))
        due = [(point, fault) for fault, point in self._points.items() if self._passed <= point <= end]
        end, fault = min(due, default=(end, ""))
        piece = bytearray(chunk[: end - self._passed])
        if bit is not None and self._passed <= bit // 8 < end:
            piece[bit // 8 - self._passed] ^= 1 << bit % 8
            self._happened["flip"] += 1
        if fault:
            del self._points[fault]
            self._happened[fault] += 1
        self._passed = end
        return piece, fault


async def _swallow(reader: asyncio.StreamReader) -> None:
    while await reader.read(_READ_BYTES):
        pass


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection without the usual farewell, if it has not ended before."""
    if not writer.is_closing():
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()


def _ignore_lost_connections(error: BaseException | None) -> None:
    try:
        if error is not None:
            raise error
    except* OSError:
        pass
