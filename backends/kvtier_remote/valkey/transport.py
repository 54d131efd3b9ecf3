"""A Valkey or Redis server as a transport: few threads with a client each, many values in a call."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Sequence
from itertools import islice
from typing import ClassVar, NamedTuple, TypeVar

from kvtier.types.jobs import CORRUPT, MISSING, STORED, BlockOutcome
from kvtier_remote.lane import Lane
from kvtier_remote.transport import Facts, Marker, Place, Spelling, Value, Verify
from kvtier_remote.valkey.glide import Glide, batch_of, connected, connected_again, library, os_error, outcome_of
from kvtier_remote.valkey.options import ValkeyOptions
from kvtier_remote.valkey.server_facts import by_node, read_facts

SPLIT_BYTES = 256 << 10
"""Payloads from this size on are kept under two names. A header in front of a power of two would cost a quarter more of
the server's memory, which is allocated in classes of sizes, and a copy of the payload on both ways."""
FRONT_BYTES = 4096
"""So much of a split payload is kept with the header; the rest goes straight between the row and the library."""
_NAMES_IN_A_QUESTION = 1024
_UNANSWERED = 2
_TOO_LONG = "exceeds buffer capacity"
_RAISE = """
local incarnation, epoch = string.match(redis.call('GET', KEYS[1]) or '', '^(' .. string.rep('%x', 16) .. ') (%d+)$')
if not incarnation then incarnation, epoch = ARGV[1], '-1' end
if incarnation == ARGV[1] and tonumber(ARGV[2]) > tonumber(epoch) then
  epoch = ARGV[2]
  redis.call('SET', KEYS[1], incarnation .. ' ' .. epoch)
end
return incarnation .. ' ' .. epoch
"""
_MARKER = re.compile(rb"([0-9A-Fa-f]{16}) ([0-9]{1,19})")
T = TypeVar("T")


class Part(NamedTuple):
    """What is kept under one name, and its length: the header and the front of a payload, or the rest of a payload."""

    name: str
    size: int


def parts_of(place: Place) -> tuple[Part, ...]:
    """The names of a value and the lengths under them. Both of a split value hash to one slot of a cluster."""
    name, header_bytes, payload_bytes = place
    if payload_bytes < SPLIT_BYTES:
        return (Part(name, header_bytes + payload_bytes),)
    front = header_bytes + FRONT_BYTES
    return Part(f"{{{name}}}h", front), Part(f"{{{name}}}b", payload_bytes - FRONT_BYTES)


def _sizes(parts: Sequence[Part]) -> list[int]:
    return [part.size for part in parts]


class Connection:
    """A client of one thread, and the memory that the fronts of values arrive in."""

    def __init__(self, client: Glide) -> None:
        self.client = client
        self._unanswered = 0
        self._fronts = memoryview(bytearray(0))

    def ask(self, request: Callable[[Glide], T]) -> T:
        """What a request of the client returns. Raises GlideError."""
        try:
            answer = request(self.client)
        except library().TimeoutError:
            self._unanswered += 1
            raise
        self._unanswered = 0
        return answer

    @property
    def silent(self) -> bool:
        """True if some requests in a row were not answered. The server may be slow, or have gone without a word; then
        the library would wait for the operating system, which gives a connection up after a quarter of an hour."""
        return self._unanswered >= _UNANSWERED

    def fronts(self, sizes: Sequence[int]) -> list[memoryview]:
        """Memory of these sizes; what an earlier call got is given out again."""
        if sum(sizes) > len(self._fronts):
            self._fronts = memoryview(bytearray(sum(sizes)))
        found, at = [], 0
        for size in sizes:
            found.append(self._fronts[at : at + size])
            at += size
        return found

    def close(self) -> None:
        """Disconnect."""
        self.client.close()


class ValkeyTransport:
    """Transfers and lookups have threads of their own, so that a question does not wait behind blocks."""

    spelling: ClassVar[Spelling] = Spelling()
    batch_blocks: ClassVar[int] = 64
    batch_bytes: ClassVar[int] = 3 << 20
    hedges: ClassVar[bool] = False

    def __init__(self, options: ValkeyOptions) -> None:
        self._options = options
        self.concurrency = 2 * options.connections
        self._transfers = Lane("kvtier-valkey", options.connections, self._connect, self._reconnect)
        self._questions = Lane("kvtier-valkey-lookup", 1, self._connect, self._reconnect)

    def _connect(self) -> Connection:
        return Connection(connected(self._options))

    def _reconnect(self) -> Connection:
        return Connection(connected_again(self._options))

    async def open(self) -> Facts:
        """Connect. Raises ConfigError with the key of the option that is wrong, or that the server's bounds need."""
        await self._questions.open()
        facts = await self._questions.run(lambda connection: read_facts(connection.client, self._options))
        await self._transfers.open()
        return facts

    async def close(self, timeout_seconds: float) -> int:
        """Disconnect after the requests in flight, each of which ends within its own time. Returns what is stuck."""
        return await self._transfers.close(timeout_seconds) + await self._questions.close(timeout_seconds)

    async def present(self, places: Sequence[Place]) -> list[bool]:
        """True for each value whose names are all there with the right lengths. Payloads are not read."""
        parts = [parts_of(place) for place in places]
        names = [part.name for some in parts for part in some]
        lengths = iter(await self._questions.run(lambda connection: _lengths(connection, names)))
        return [_sizes(some) == list(islice(lengths, len(some))) for some in parts]

    async def get(self, values: Sequence[Value], verify: Verify) -> list[BlockOutcome]:
        """Read values. Bodies of split ones arrive in their rows, everything else is copied there."""
        return await self._moved(values, lambda connection: _get(connection, values, verify))

    async def put(self, values: Sequence[Value]) -> list[BlockOutcome]:
        """Write values, each on its own: a full server refuses some and takes others."""
        expire = self._options.expire_seconds
        return await self._moved(values, lambda connection: _put(connection, values, expire))

    async def _moved(
        self, values: Sequence[Value], call: Callable[[Connection], list[BlockOutcome]]
    ) -> list[BlockOutcome]:
        try:
            return await self._transfers.run(call)
        except OSError as error:  # closed meanwhile
            return [outcome_of(error)] * len(values)

    async def remove(self, places: Sequence[Place]) -> None:
        """Unlink the names of values."""
        names = [part.name for place in places for part in parts_of(place)]
        await self._transfers.run(lambda connection: _asked(connection, lambda client: client.unlink(names)))

    async def describe(self, name: str, text: str) -> None:
        """Set it once. It never expires."""
        once = library().ConditionalChange.ONLY_IF_DOES_NOT_EXIST
        await self._questions.run(
            lambda connection: _asked(connection, lambda client: client.set(name, text, conditional_set=once))
        )

    async def evicted(self) -> int:
        """What the section `stats` of INFO says, of a cluster the sum over its primaries. A split value has two
        names."""
        section = [library().InfoSection.STATS]
        answer = await self._transfers.run(lambda connection: _asked(connection, lambda client: client.info(section)))
        return sum(int(fields.get("evicted_keys", "0")) for fields in by_node(answer))

    async def raise_marker(self, name: str, marker: Marker) -> Marker:
        """By a script, which the server runs as one step. The marker never expires."""
        words = ["EVAL", _RAISE, "1", name, marker.incarnation.hex(), str(marker.epoch)]
        held = await self._questions.run(
            lambda connection: _asked(connection, lambda client: client.custom_command(words))
        )
        found = marker_of(bytes(held))
        if found is None:
            raise OSError(errno.EBADMSG, os.strerror(errno.EBADMSG))
        return found


def marker_of(held: bytes) -> Marker | None:
    """The marker that a server holds under a marker's name; None if that is none."""
    match = _MARKER.fullmatch(held)
    return None if match is None else Marker(bytes.fromhex(match[1].decode("ascii")), int(match[2]))


def _asked(connection: Connection, request: Callable[[Glide], T]) -> T:
    """What a request returns; errors of the library become OSErrors."""
    try:
        return connection.ask(request)
    except library().GlideError as error:
        raise os_error(error) from None


def _lengths(connection: Connection, names: Sequence[str]) -> list[int]:
    """The length under each name, 0 if there is nothing. Raises OSError."""
    found, rest = list[int](), iter(names)
    while some := list(islice(rest, _NAMES_IN_A_QUESTION)):
        batch = batch_of(connection.client)
        for name in some:
            batch.strlen(name)
        found += _asked(connection, lambda client, batch=batch: client.exec(batch, raise_on_error=True))  # type: ignore[misc]
    return found


def _put(connection: Connection, values: Sequence[Value], expire: int | None) -> list[BlockOutcome]:
    glide = library()
    batch, counts = batch_of(connection.client), []
    expiry = None if expire is None else glide.ExpirySet(glide.ExpiryType.SEC, expire)
    for value in values:
        parts = parts_of(value.place)
        front = parts[0].size - value.place.header_bytes
        batch.set(parts[0].name, b"".join((value.header, value.payload[:front])), expiry=expiry)
        if len(parts) > 1:
            batch.set(parts[1].name, value.payload[front:], expiry=expiry)
        counts.append(len(parts))
    try:
        answers = iter(connection.ask(lambda client: client.exec(batch, raise_on_error=False)))
    except glide.GlideError as error:
        return [outcome_of(error)] * len(values)
    return [_stored(list(islice(answers, count))) for count in counts]


def _stored(answers: Sequence[object]) -> BlockOutcome:
    return next((outcome_of(answer) for answer in answers if isinstance(answer, Exception)), STORED)


def _get(connection: Connection, values: Sequence[Value], verify: Verify) -> list[BlockOutcome]:
    """One outcome for each value. A value that is too long makes the library refuse all of a call, so that the lengths
    are asked for then, and the values of the right length are read once more."""
    glide = library()
    try:
        return _read(connection, values, verify)
    except glide.GlideError as error:
        if _TOO_LONG not in str(error):
            return [outcome_of(error)] * len(values)
    try:
        return _read_fitting(connection, values, verify)
    except (glide.GlideError, OSError) as error:
        return [outcome_of(error)] * len(values)


def _read_fitting(connection: Connection, values: Sequence[Value], verify: Verify) -> list[BlockOutcome]:
    parts = [parts_of(value.place) for value in values]
    lengths = iter(_lengths(connection, [part.name for some in parts for part in some]))
    fitting = [i for i, some in enumerate(parts) if list(islice(lengths, len(some))) == _sizes(some)]
    read = _read(connection, [values[i] for i in fitting], lambda at, header: verify(fitting[at], header))
    found = dict(zip(fitting, read, strict=True))
    return [found.get(i, CORRUPT) for i in range(len(values))]


def _read(connection: Connection, values: Sequence[Value], verify: Verify) -> list[BlockOutcome]:
    parts = [parts_of(value.place) for value in values]
    fronts = connection.fronts([some[0].size for some in parts])
    buffers = []
    for value, some, front in zip(values, parts, fronts, strict=True):
        buffers += [front, value.payload[FRONT_BYTES:]] if len(some) > 1 else [front]
    names = [part.name for some in parts for part in some]
    read = iter(connection.ask(lambda client: client.mget(names, buffers=buffers)) if names else ())
    outcomes = []
    for i, (value, some, front) in enumerate(zip(values, parts, fronts, strict=True)):
        lengths = list(islice(read, len(some)))
        if None in lengths:
            outcomes.append(MISSING)
        elif [int(length) for length in lengths] != _sizes(some):
            outcomes.append(CORRUPT)
        else:
            header = value.place.header_bytes
            value.payload[: len(front) - header] = front[header:]
            outcomes.append(verify(i, front[:header]))
    return outcomes
