"""The names of a Valkey or Redis server for the tools: all primaries of a cluster, in bounded memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from kvtier.errors import RootError
from kvtier.tier.block_envelope import KEY_AT
from kvtier.tier.inspection import StoreAbout
from kvtier_remote.answers import bytes_of, items_of, number, reading_answers
from kvtier_remote.inspect import Listed, ServerInspector, about_server, shown_name, stated_header_bytes, stated_time
from kvtier_remote.names import BlockName, StoreNames
from kvtier_remote.transport import Marker
from kvtier_remote.valkey.calls import OTHER_TYPE
from kvtier_remote.valkey.glide import Glide, batch_of, connect, library, os_error
from kvtier_remote.valkey.options import ValkeyOptions
from kvtier_remote.valkey.transport import ValkeyTransport, marker_of

_NAMES_AT_ONCE = 1000
"""Names that the server looks at for one answer."""
_READ_BYTES = 8 << 20
"""Bytes of values in memory at once, unless one value has more."""
_NAME_BYTES_MAX = 1 << 16
_SPLIT = re.compile(r"\{(.*)\}([hb])", re.DOTALL)

T = TypeVar("T")


class _Found(NamedTuple):
    """A name as the server listed it: the block it is of, the names of that block's parts, and which part it is."""

    name: BlockName | None
    shown: str
    parts: tuple[bytes | str, ...]
    first: bool


class ValkeyListing:
    """A connection for the tools. What is read counts as no use for the server's eviction, where it knows CLIENT
    NO-TOUCH."""

    def __init__(self, options: ValkeyOptions) -> None:
        """Connect. Raises ConfigError with the option to correct."""
        self._address = f"valkey://{','.join(options.servers)}/{options.prefix}"
        self.names = StoreNames(ValkeyTransport.name_format, options.prefix)
        self._client: Glide | None = connect(options)
        glide = library()
        self._cluster = isinstance(self._client, glide.GlideClusterClient)
        route = {"route": glide.AllPrimaries()} if self._cluster else {}
        with suppress(glide.GlideError):  # a server without it counts what is read as used
            self._client.custom_command(["CLIENT", "NO-TOUCH", "ON"], **route)

    @property
    def about(self) -> StoreAbout:
        """The servers, and how many primaries they are."""
        answer = self._ask(lambda client: client.info([library().InfoSection.SERVER]))
        nodes = len(answer) if isinstance(answer, dict) else 1
        return about_server(self._address, "valkey", nodes, "servers" if nodes > 1 else "server")

    def close(self) -> None:
        """Disconnect. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _ask(self, request: Callable[[Glide], T]) -> T:
        try:
            with reading_answers():
                return request(self._client)
        except (OSError, library().GlideError) as error:
            raise RootError(self._address, f"the server does not answer ({os_error(error).strerror})") from None

    # -- names ---------------------------------------------------------------------------------------------------

    def _scan(self, pattern: str) -> Iterator[list[bytes]]:
        """All names that match, some at a time; of a cluster those of each primary."""
        cursor, ended = (library().ClusterScanCursor(), False) if self._cluster else (b"0", False)
        while not ended:
            cursor, found = self._ask(
                lambda client, at=cursor: _page(client.scan(at, match=pattern, count=_NAMES_AT_ONCE))  # type: ignore[misc]
            )
            ended = cursor.is_finished() if self._cluster else cursor == b"0"
            yield found

    def pages(self) -> Iterator[Sequence[Listed]]:
        """Every value below the prefix, those of which only a part is there included."""
        for names in self._scan(f"*{self.names.blocks}*"):
            found = [one for name in names if (one := self._parse_name(name)) is not None]
            blocks = [one for one in found if one.name is not None]
            listed = [Listed(None, one.shown) for one in found if one.name is None]
            yield listed + list(self._measure(blocks))

    def _parse_name(self, raw: bytes) -> _Found | None:
        """The kind of a listed name; None if it is of another prefix that ends like ours."""
        text = raw.decode("ascii", "replace")
        split = _SPLIT.fullmatch(text)
        whole = split[1] if split else text
        if not whole.startswith(self.names.blocks):
            return None
        name = self.names.block(whole)
        if name is None or split is None:
            return _Found(name, shown_name(text), (raw,), True)
        return _Found(name, whole, (f"{{{whole}}}h", f"{{{whole}}}b"), split[2] == "h")

    def _measure(self, found: Sequence[_Found]) -> Iterator[Listed]:
        """Lengths, memory and headers, in one call. A value of two parts is listed once, at its first part. What is no
        string is no block, whatever its name."""
        if not found:
            return
        batch = batch_of(self._client)
        for one in found:
            for part in one.parts:
                batch.strlen(part)
                batch.custom_command(["MEMORY", "USAGE", part])
            batch.getrange(one.parts[0], 0, KEY_AT - 1)
        count = sum(2 * len(one.parts) + 1 for one in found)
        answers = iter(self._ask(lambda client: _strings(client.exec(batch, raise_on_error=False), count)))
        for one in found:
            lengths, memory = zip(*(list(islice(answers, 2)) for _ in one.parts), strict=True)
            front = next(answers)
            if not isinstance(front, bytes) or not all(isinstance(each, int) for each in (*lengths, *memory)):
                yield Listed(None, one.shown)
                continue
            there = [bool(length) for length in lengths]
            if there[0] if one.first else not there[0] and any(there):
                yield _make_listed(one, sum(lengths), sum(memory), memoryview(front), all(there))

    # -- markers and manifests -----------------------------------------------------------------------------------

    def starting(self, prefix: str) -> Iterator[Sequence[str]]:
        """All names that begin so."""
        for names in self._scan(f"{prefix}*"):
            yield [name.decode("ascii", "replace") for name in names]

    def marker(self, namespace: bytes) -> Marker | None:
        """The marker of one namespace as it is now."""
        held = self._string(self.names.marker(namespace))
        return None if held is None else marker_of(held)

    def leases(self) -> Set[tuple[bytes, Marker]]:
        """The leases that have not expired on the server."""
        each = (self.names.parse_lease(name) for names in self.starting(self.names.leases) for name in names)
        return {leased for leased in each if leased is not None}

    def manifest(self, name: str) -> bytes:
        """The manifest of this name; empty if there is none."""
        return self._string(name) or b""

    def _string(self, name: str) -> bytes | None:
        held: Sequence[bytes | None] = self._ask(lambda client: items_of(client.mget([name]), 1, 1))
        return held[0]

    # -- values --------------------------------------------------------------------------------------------------

    def read(self, values: Sequence[Listed]) -> Iterator[memoryview | None]:
        """Each value, its parts joined."""
        some: list[Listed] = []
        for one in values:
            if some and sum(each.stored_bytes for each in some) + one.stored_bytes > _READ_BYTES:
                yield from self._read(some)
                some = []
            some.append(one)
        yield from self._read(some)

    def _read(self, values: Sequence[Listed]) -> Iterator[memoryview | None]:
        names = [part for one in values for part in one.parts]
        read = iter(self._ask(lambda client: items_of(client.mget(names), len(names), len(names))) if names else ())
        for one in values:
            parts = list(islice(read, len(one.parts)))
            yield None if None in parts else memoryview(b"".join(parts))

    def remove(self, names: Sequence[bytes | str]) -> None:
        """Unlink these names."""
        self._ask(lambda client: client.unlink(list(names)))


def _page(answer: Sequence[Any]) -> tuple[Any, list[bytes]]:
    """The cursor and the names of an answer to SCAN, each once. Raises OSError."""
    cursor, found = answer
    return cursor, [bytes_of(name, _NAME_BYTES_MAX) for name in dict.fromkeys(found)]


def _strings(answers: object, count: int) -> list[Any]:
    """The answers about that many strings; None for what is none. Raises OSError."""
    return [_of_string(answer) for answer in items_of(answers, count, count)]


def _of_string(answer: object) -> object:
    if isinstance(answer, Exception):
        if OTHER_TYPE in str(answer).upper():
            return None
        raise os_error(answer)
    return bytes_of(answer, KEY_AT) if isinstance(answer, bytes) else 0 if answer is None else number(answer)


def _make_listed(one: _Found, length: int, memory: int, front: memoryview, whole: bool) -> Listed:
    payload_bytes = length - stated_header_bytes(front)
    return Listed(one.name, one.shown, one.parts, whole, payload_bytes, memory, stated_time(front))


INSPECTOR = ServerInspector(("valkey",), lambda place: {"type": "valkey", "servers": place.split(",")}, ValkeyListing)
