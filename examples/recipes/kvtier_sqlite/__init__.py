"""A tier in a table of SQLite, which the processes of a host share; without room it keeps what it has."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Sequence
from functools import partial
from typing import ClassVar, Literal

from kvtier.errors import ConfigError
from kvtier.options import ByteSize, TierOptions
from kvtier.types.jobs import CORRUPT, MISSING, STORED, BlockOutcome, DropReason, dropped, failed
from kvtier_remote.backend import RemoteBackend
from kvtier_remote.client_threads import ClientThreads
from kvtier_remote.options import AbsolutePath, RemoteOptions
from kvtier_remote.transport import Marker, NameFormat, Transport, TransportInfo, Value, ValueRef, Verify

PAGE_BYTES = 4096
TABLES = """
CREATE TABLE IF NOT EXISTS blocks (name TEXT PRIMARY KEY, header BLOB, payload BLOB);
CREATE TABLE IF NOT EXISTS markers (name TEXT PRIMARY KEY, incarnation BLOB, epoch INTEGER);
"""
MAKE_MARKER = """
INSERT INTO markers VALUES (?, ?, ?)
ON CONFLICT DO UPDATE SET incarnation = excluded.incarnation, epoch = excluded.epoch WHERE markers.epoch >= 1 << 61
RETURNING incarnation
"""
SWAP_MARKER = """
UPDATE markers SET incarnation = ?, epoch = ? WHERE name = ? AND incarnation = ? AND epoch = ? RETURNING incarnation
"""
READ_MARKER = "SELECT incarnation, epoch FROM markers WHERE name = ? AND epoch < 1 << 61"


class SqliteOptions(RemoteOptions):
    """What the stack file may say of the tier, beside the options of every remote tier."""

    type: Literal["sqlite"] = "sqlite"
    path: AbsolutePath
    capacity: ByteSize


def outcome_of(error: sqlite3.Error) -> BlockOutcome:
    """What an error of the library means for a block."""
    if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
        return dropped(DropReason.DISK_FULL)
    return failed(errno.ETIMEDOUT if error.sqlite_errorcode == sqlite3.SQLITE_BUSY else errno.EIO)


class Connection:
    """A connection of one thread. What cannot lock the file within `request_timeout_seconds` fails."""

    silent = False  # a file needs no other connection

    def __init__(self, options: SqliteOptions) -> None:
        timeout = options.request_timeout_seconds
        try:
            self.db = sqlite3.connect(options.path, timeout=timeout, isolation_level=None, check_same_thread=False)
            self.db.execute("PRAGMA synchronous = OFF")  # a cache: what a power failure takes are misses
            self.db.execute(f"PRAGMA max_page_count = {max(16, options.capacity // PAGE_BYTES)}")
            self.db.executescript(TABLES)
        except sqlite3.Error as error:
            raise ConfigError(f"{options.path}: {error}", "path") from None

    def close(self) -> None:
        self.db.close()

    def put(self, values: Sequence[Value]) -> list[BlockOutcome]:
        return [self._put(value) for value in values]

    def _put(self, value: Value) -> BlockOutcome:
        row = value.place.name, value.header, value.payload
        try:
            self.db.execute("INSERT OR REPLACE INTO blocks VALUES (?, ?, ?)", row)
        except sqlite3.Error as error:
            return outcome_of(error)
        return STORED

    def get(self, values: Sequence[Value], verify: Verify) -> list[BlockOutcome]:
        return [self._get(position, value, verify) for position, value in enumerate(values)]

    def _get(self, position: int, value: Value, verify: Verify) -> BlockOutcome:
        try:
            rows = self.db.execute("SELECT header, payload FROM blocks WHERE name = ?", value.place[:1]).fetchall()
        except sqlite3.Error as error:
            return outcome_of(error)
        if not rows:
            return MISSING
        header, payload = rows[0]
        if (len(header), len(payload)) != value.place[1:]:
            return CORRUPT
        value.payload[:] = payload
        return verify(position, memoryview(header))

    def present(self, places: Sequence[ValueRef]) -> list[bool]:
        sizes = "SELECT name, length(header), length(payload) FROM blocks WHERE name = ?"
        return [self.execute(sizes, place[:1]) == [place] for place in places]

    def remove(self, places: Sequence[ValueRef]) -> None:
        for place in places:
            self.execute("DELETE FROM blocks WHERE name = ?", place[:1])

    def execute(self, statement: str, values: tuple) -> list:
        try:
            return self.db.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise OSError(outcome_of(error).errno or errno.ENOSPC, str(error)) from None


class SqliteTransport:
    """Two threads for blocks, and one for questions, so that these do not wait."""

    name_format: ClassVar[NameFormat] = NameFormat()
    batch_blocks: ClassVar[int] = 8
    batch_bytes: ClassVar[int] = 8 << 20
    concurrency: ClassVar[int] = 4
    hedges: ClassVar[bool] = False

    def __init__(self, options: SqliteOptions) -> None:
        self._options = options
        connect = partial(Connection, options)
        self._transfers = ClientThreads("sqlite", 2, connect, connect)
        self._questions = ClientThreads("sqlite-lookup", 1, connect, connect)

    async def open(self) -> TransportInfo:
        await self._questions.open()
        await self._transfers.open()
        return TransportInfo(self._options.capacity, ("once the file is full nothing more is stored",))

    async def close(self, timeout_seconds: float) -> int:
        return await self._transfers.close(timeout_seconds) + await self._questions.close(timeout_seconds)

    async def get(self, values: Sequence[Value], verify: Verify) -> list[BlockOutcome]:
        try:
            return await self._transfers.run(lambda connection: connection.get(values, verify))
        except OSError as error:  # closed meanwhile
            return [failed(error.errno or 0)] * len(values)

    async def put(self, values: Sequence[Value]) -> list[BlockOutcome]:
        try:
            return await self._transfers.run(lambda connection: connection.put(values))
        except OSError as error:
            return [failed(error.errno or 0)] * len(values)

    async def present(self, places: Sequence[ValueRef]) -> list[bool]:
        return await self._questions.run(lambda connection: connection.present(places))

    async def remove(self, places: Sequence[ValueRef]) -> None:
        await self._transfers.run(lambda connection: connection.remove(places))

    async def read_marker(self, name: str) -> Marker | None:
        found = await self._questions.run(lambda connection: connection.execute(READ_MARKER, (name,)))
        return Marker(*found[0]) if found else None

    async def swap_marker(self, name: str, held: Marker | None, marker: Marker) -> Marker | None:
        change = (MAKE_MARKER, (name, *marker)) if held is None else (SWAP_MARKER, (*marker, name, *held))
        changed = await self._questions.run(lambda connection: connection.execute(*change))
        return marker if changed else await self.read_marker(name)


class SqliteTier(RemoteBackend):
    """The tier: names, envelopes, verification, outcomes, epochs and deadlines are those of every remote tier."""

    Options: ClassVar[type[TierOptions]] = SqliteOptions
    options: SqliteOptions

    def _make_transport(self) -> Transport:
        return SqliteTransport(self.options)
