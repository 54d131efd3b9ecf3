"""A Mooncake store as a transport: few processes with a client each, and memory that blocks pass through."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from kvtier.types.jobs import CORRUPT, STORED, BlockOutcome, failed
from kvtier_remote.client_threads import ClientThreads
from kvtier_remote.guard import guarded
from kvtier_remote.mooncake.client_process import MISSING_CODES, ClientProcess, errno_of, os_error, outcome_of
from kvtier_remote.mooncake.marker_object import MEMORY_BYTES, read_marker, swap_marker
from kvtier_remote.mooncake.master_http import MasterHTTP
from kvtier_remote.mooncake.options import BATCH_BLOCKS, CONNECTIONS, MooncakeOptions
from kvtier_remote.transport import MANIFEST_BYTES_MAX, Marker, NameFormat, TransportInfo, Value, ValueRef, Verify

UNKNOWN_BYTES = 1 << 62
_ALIGNMENT = 64
_NAMES_IN_A_QUESTION = 1024
EVICTS_NOTE = "the pool evicts what was not used for longest above its watermark"
SIZE_NOTE = f"the pool's size is not known here (admin: asks the master); {EVICTS_NOTE}"


@guarded
class MooncakeTransport:
    """No row is ever named to the library: blocks are copied to and from memory of the client's own, so that what it
    writes late is written there."""

    name_format: ClassVar[NameFormat] = NameFormat()
    batch_blocks: ClassVar[int] = BATCH_BLOCKS
    concurrency: ClassVar[int] = CONNECTIONS
    hedges: ClassVar[bool] = False

    def __init__(self, options: MooncakeOptions) -> None:
        self._options = options
        self.batch_bytes = options.batch_bytes
        self._staging_bytes = options.staging // CONNECTIONS
        self._transfers = self._lane("kvtier-mooncake", CONNECTIONS, self._staging_bytes)
        self._questions = self._lane("kvtier-mooncake-lookup", 1, max(MEMORY_BYTES, MANIFEST_BYTES_MAX))

    def _lane(self, name: str, size: int, memory_bytes: int) -> ClientThreads[ClientProcess]:
        def connect() -> ClientProcess:
            connection = ClientProcess(self._options, memory_bytes)
            try:
                connection.open()
            except BaseException:
                connection.close()
                raise
            return connection

        return ClientThreads(name, size, connect, connect)

    async def open(self) -> TransportInfo:
        """Start the processes and connect. Raises ConfigError with the key of the option that is wrong."""
        await self._questions.open()
        await self._transfers.open()
        facts = await self._questions.run(lambda _: pool_facts(self._options))
        return replace(facts, look_up_before_store=True)

    async def close(self, timeout_seconds: float) -> int:
        """End the processes after their requests. Returns how many threads are stuck; none is longer than a request."""
        lanes = self._transfers, self._questions
        return sum(await asyncio.gather(*(lane.close(timeout_seconds) for lane in lanes)))

    async def present(self, places: Sequence[ValueRef]) -> Sequence[bool | None]:
        """True for each value that has a complete replica of the right length, as the master knows it."""
        return await self._questions.run(lambda connection: _present(connection, places))

    async def get(self, values: Sequence[Value], verify: Verify) -> list[BlockOutcome]:
        """Read values through the client's memory."""
        return await self._move(values, lambda connection: self._get(connection, values, verify))

    async def put(self, values: Sequence[Value]) -> list[BlockOutcome]:
        """Write values through the client's memory."""
        return await self._move(values, lambda connection: self._put(connection, values))

    async def _move(
        self, values: Sequence[Value], call: Callable[[ClientProcess], list[BlockOutcome]]
    ) -> list[BlockOutcome]:
        try:
            return await self._transfers.run(call)
        except OSError as error:
            return [failed(error.errno or errno.EIO)] * len(values)

    async def remove(self, places: Sequence[ValueRef]) -> None:
        """Remove values, also those that are being read."""
        names = [place.name for place in places]
        codes = await self._questions.run(lambda connection: connection.ask("remove", names))
        for code in codes:
            if code < 0 and code not in MISSING_CODES:
                raise os_error(code)

    async def read_marker(self, name: str) -> Marker | None:
        """The marker as its claims leave it."""
        return await self._questions.run(lambda connection: read_marker(connection, name))

    async def swap_marker(self, name: str, held: Marker | None, marker: Marker) -> Marker | None:
        """By claims; see `kvtier_remote.mooncake.marker_object`."""
        return await self._questions.run(lambda connection: swap_marker(connection, name, held, marker))

    async def describe(self, name: str, text: str) -> None:
        """Keep it once, never to be evicted."""
        await self._questions.run(lambda connection: _describe(connection, name, text.encode()))

    def _put(self, connection: ClientProcess, values: Sequence[Value]) -> list[BlockOutcome]:
        offsets, sizes = self._stage(values)
        for value, offset in zip(values, offsets, strict=True):
            at = offset + len(value.header)
            connection.memory[offset:at] = np.frombuffer(value.header, np.uint8)
            connection.memory[at : at + len(value.payload)] = np.frombuffer(value.payload, np.uint8)
        codes = connection.ask("put", [value.place.name for value in values], offsets, sizes)
        return [STORED if code == 0 else outcome_of(code) for code in codes]

    def _get(self, connection: ClientProcess, values: Sequence[Value], verify: Verify) -> list[BlockOutcome]:
        offsets, sizes = self._stage(values)
        codes = connection.ask("get", [value.place.name for value in values], offsets, sizes)
        outcomes = []
        for i, (value, offset, size, code) in enumerate(zip(values, offsets, sizes, codes, strict=True)):
            if code != size:
                outcomes.append(outcome_of(code) if code < 0 else CORRUPT)
                continue
            at = offset + value.place.header_bytes
            np.frombuffer(value.payload, np.uint8)[:] = connection.memory[at : offset + size]
            outcomes.append(verify(i, connection.memory[offset:at].data))
        return outcomes

    def _stage(self, values: Sequence[Value]) -> tuple[list[int], list[int]]:
        """The places of values in a client's memory, and their lengths. Raises OSError for those that have no room."""
        sizes = [value.place.header_bytes + value.place.payload_bytes for value in values]
        offsets, end = [], 0
        for size in sizes:
            offsets.append(end)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        if end > self._staging_bytes:
            raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
        return offsets, sizes


def pool_facts(options: MooncakeOptions) -> TransportInfo:
    """The size of the pool, if the master's HTTP port tells it. Blocking."""
    if options.admin is None:
        return TransportInfo(UNKNOWN_BYTES, (SIZE_NOTE,))
    try:
        return TransportInfo(MasterHTTP(options.admin, options.request_timeout_seconds).pool_bytes(), (EVICTS_NOTE,))
    except OSError as error:
        return TransportInfo(UNKNOWN_BYTES, (f"{SIZE_NOTE}; {options.admin}: {error.strerror or 'does not answer'}",))


def _describe(connection: ClientProcess, name: str, text: bytes) -> None:
    if len(text) > MANIFEST_BYTES_MAX:
        raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
    if connection.ask("present", [name])[0] >= 0:
        return
    connection.memory[: len(text)] = np.frombuffer(text, np.uint8)
    (code,) = connection.ask("create", [name], [0], [len(text)])
    if code < 0 and errno_of(code) != errno.EBUSY:  # another process keeps it at this moment
        raise os_error(code)


def _present(connection: ClientProcess, places: Sequence[ValueRef]) -> list[bool]:
    found = []
    for start in range(0, len(places), _NAMES_IN_A_QUESTION):
        some = places[start : start + _NAMES_IN_A_QUESTION]
        for place, code in zip(some, connection.ask("present", [place.name for place in some]), strict=True):
            if code < 0 and code not in MISSING_CODES:
                raise os_error(code)
            found.append(code == place.header_bytes + place.payload_bytes)
    return found
