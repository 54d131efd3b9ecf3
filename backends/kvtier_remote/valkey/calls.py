"""The blocking calls of a client, by one thread: what they ask the server, and what its answers mean for values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple, TypeVar

from kvtier.types.jobs import CORRUPT, MISSING, STORED, BlockOutcome
from kvtier_remote.answers import Deadline, bad_answer, items_of, number
from kvtier_remote.transport import Value, ValueRef, Verify
from kvtier_remote.valkey.glide import Glide, batch_of, library, os_error, outcome_of

SPLIT_BYTES = 256 << 10
"""Payloads from this size on are kept under two names. A header in front of a power of two would cost a quarter more of
the server's memory, which is allocated in classes of sizes, and a copy of the payload on both ways."""
FRONT_BYTES = 1024
"""Bytes of a split payload that are kept with the header, so that the rest and what the server puts in front of it fit
into a power of two; the rest goes straight between the row and the library."""
_NAMES_IN_A_QUESTION = 1024
_OK = (b"OK", "OK")
_TOO_LONG = "exceeds buffer capacity"
OTHER_TYPE = "WRONGTYPE"
T = TypeVar("T")


class Part(NamedTuple):
    """The content under one name, and its length: the header and the front of a payload, or the rest of a payload."""

    name: str
    size: int


def parts_of(place: ValueRef) -> tuple[Part, ...]:
    """The names of a value and the lengths under them. Both of a split value hash to one slot of a cluster."""
    name, header_bytes, payload_bytes = place
    if payload_bytes < SPLIT_BYTES:
        return (Part(name, header_bytes + payload_bytes),)
    front = header_bytes + FRONT_BYTES
    return Part(f"{{{name}}}h", front), Part(f"{{{name}}}b", payload_bytes - FRONT_BYTES)


def sizes_of(parts: Sequence[Part]) -> list[int]:
    return [part.size for part in parts]


class Connection:
    """A client of one thread, and the memory that the fronts of values arrive in."""

    def __init__(self, client: Glide) -> None:
        self.client = client
        self.silent = False
        """True if its last request was not answered."""
        self._fronts = memoryview(bytearray(0))

    def ask(self, request: Callable[[Glide], T]) -> T:
        """The result of a request of the client. Raises GlideError."""
        self.silent = False
        try:
            return request(self.client)
        except library().TimeoutError:
            self.silent = True
            raise

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


def asked(connection: Connection, request: Callable[[Glide], T]) -> T:
    """The result of a request; errors of the library become OSErrors."""
    try:
        return connection.ask(request)
    except library().GlideError as error:
        raise os_error(error) from None


def lengths_of(connection: Connection, names: Sequence[str], seconds: float = math.inf) -> list[int]:
    """The length under each name, 0 if there is no value. Raises OSError, also for what takes longer."""
    deadline = Deadline(seconds)
    found, rest = list[int](), iter(names)
    while some := list(islice(rest, _NAMES_IN_A_QUESTION)):
        deadline.check()
        batch = batch_of(connection.client)
        for name in some:
            batch.strlen(name)
        answers = asked(connection, lambda client, batch=batch: client.exec(batch, raise_on_error=False))  # type: ignore[misc]
        found += map(_length, items_of(answers, len(some), len(some)))
    return found


def _length(answer: object) -> int:
    if not isinstance(answer, Exception):
        return number(answer)
    if OTHER_TYPE in str(answer).upper():
        return 0
    raise os_error(answer)


def put(connection: Connection, values: Sequence[Value], expire: int | None) -> list[BlockOutcome]:
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
        answers = connection.ask(lambda client: client.exec(batch, raise_on_error=False))
    except glide.GlideError as error:
        return [outcome_of(error)] * len(values)
    rest = iter(items_of(answers, sum(counts), sum(counts)))
    return [_stored(list(islice(rest, count))) for count in counts]


def _stored(answers: Sequence[object]) -> BlockOutcome:
    refused = [answer for answer in answers if answer not in _OK]
    if not refused:
        return STORED
    return outcome_of(refused[0] if isinstance(refused[0], Exception) else bad_answer())


def get(connection: Connection, values: Sequence[Value], verify: Verify) -> list[BlockOutcome]:
    """The outcomes of the values. A value that is too long makes the library refuse all of a call, so that the lengths
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
    names = [part.name for some in parts for part in some]
    lengths = iter(lengths_of(connection, names))
    fitting = [i for i, some in enumerate(parts) if list(islice(lengths, len(some))) == sizes_of(some)]
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
    answers = connection.ask(lambda client: client.mget(names, buffers=buffers)) if names else ()
    read = iter(items_of(answers, len(names), len(names)))
    outcomes = []
    for i, (value, some, front) in enumerate(zip(values, parts, fronts, strict=True)):
        lengths = list(islice(read, len(some)))
        if None in lengths:
            outcomes.append(MISSING)
        elif [int(length) for length in lengths] != sizes_of(some):
            outcomes.append(CORRUPT)
        else:
            header = value.place.header_bytes
            value.payload[: len(front) - header] = front[header:]
            outcomes.append(verify(i, front[:header]))
    return outcomes
