"""Bounds of what servers say, how to turn each of them off, and what is broken then.

Each switch belongs to the test build alone. What a bound keeps is asked of the same code with and without it.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import obstore
import pytest
from support_lies import INFO_LIES, object_without_end
from support_lying_http import BUCKET, KEYS, Asked, lying_s3, raw_server, reply
from support_lying_valkey import for_ever, lying_valkey
from support_valkey import valkey_server

from kvtier.errors import KVTierError
from kvtier_remote import answers, bounded_http, guard
from kvtier_remote.client_threads import ClientThreads
from kvtier_remote.mooncake import marker_object
from kvtier_remote.objects import library as objects_library
from kvtier_remote.objects.library import store_of
from kvtier_remote.objects.transport import ObjectTransport
from kvtier_remote.transport import Marker, Value, ValueRef
from kvtier_remote.valkey import cluster_nodes, server_facts, transport
from kvtier_remote.valkey.cluster_nodes import SLOTS, ClusterNodes
from kvtier_remote.valkey.transport import ValkeyTransport

_WAIT_SECONDS = 1.0
_TOO_LONG_SECONDS = 2 * _WAIT_SECONDS


# ---- numbers, lists, strings


def without_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number, list or string will do."""
    for module in (answers, cluster_nodes, guard, server_facts, transport):
        for name in ("number", "items_of", "bytes_of"):
            monkeypatch.setattr(module, name, lambda answer, *bounds: answer, raising=False)


def more_slots_than_a_cluster_has() -> bool:
    """A table grows as a server says."""
    nodes = ClusterNodes()
    with suppress(OSError):
        nodes.learn([[0, 4 * SLOTS, [b"host", 6379, b"node"]]])
    return len(nodes._of_slot) > SLOTS


def without_typed_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is raised where an answer is taken apart is raised where the tier is opened."""
    for module in (guard, server_facts):
        monkeypatch.setattr(module, "reading_answers", nullcontext)
    monkeypatch.setattr(server_facts, "digits", int)


def untyped_error() -> bool:
    """An opening raises what no caller expects."""
    with valkey_server() as server, lying_valkey(server.process.port, INFO_LIES["no number of bytes"]) as liar:
        one = ValkeyTransport(server.options(servers=[liar.address]))
        try:
            asyncio.run(_opened(one))
        except KVTierError:
            return False
        except ValueError:
            return True
    return False


async def _opened(one: ValkeyTransport) -> None:
    try:
        await one.open()
    finally:
        await one.close(5.0)


# ---- time


def without_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait has its time, and all of them together have none."""
    monkeypatch.setattr(answers.Deadline, "check", lambda self: None)
    monkeypatch.setattr(answers.Deadline, "left_seconds", property(lambda self: _WAIT_SECONDS / 2))


def request_beyond_its_time() -> bool:
    """A server that sends a byte now and then keeps a request alive."""

    def trickled() -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"
        end = time.monotonic() + _TOO_LONG_SECONDS
        while time.monotonic() < end:
            time.sleep(_WAIT_SECONDS / 10)
            yield b"x"

    begun = time.monotonic()
    with raw_server(trickled) as address, suppress(OSError):
        bounded_http.get(f"http://{address}/", _WAIT_SECONDS / 2, 1 << 20, ssl.create_default_context())
    return time.monotonic() - begun > _WAIT_SECONDS


class _Circle:
    """A client of a pool in which the claims of a marker lead in a circle, for two seconds."""

    patience_seconds = _WAIT_SECONDS / 2

    def __init__(self) -> None:
        import numpy as np

        self.memory = np.zeros(marker_object.MEMORY_BYTES, np.uint8)
        self._end = time.monotonic() + _TOO_LONG_SECONDS
        self._asked = 0

    def ask(self, call: str, names: list[str], offsets: object = (), sizes: object = ()) -> list[int]:
        if time.monotonic() > self._end:
            return [-704]
        self._asked += 1
        state = marker_object.State(Marker(b"\x01" * 8, 1), f"{self._asked:016x}")
        self.memory[: marker_object.SIZE] = bytearray(state.encoded())
        return [marker_object.SIZE]


def claims_beyond_their_time() -> bool:
    """Claims of a marker lead on for as long as the pool likes."""
    one: Any = _Circle()
    begun = time.monotonic()
    with suppress(OSError):
        marker_object.read_marker(one, "marker")
    return time.monotonic() - begun > _WAIT_SECONDS


# ---- bodies and connections


def without_end_of_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body is read to its end, however long it is."""

    async def read(self: ObjectTransport, name: str, size: int) -> memoryview | None:
        answer = await obstore.get_async(self._store, name, options={"range": (0, size + 1)})
        body = b"".join([bytes(some) async for some in answer.stream()])
        return memoryview(body) if len(body) == size else None

    monkeypatch.setattr(ObjectTransport, "_read", read)


def body_read_beyond_its_size() -> bool:
    """Far more of a value is read than it has."""
    sent = 0

    def counted(asked: Asked) -> Iterator[bytes]:
        nonlocal sent
        for piece in object_without_end(asked):
            yield piece
            sent += len(piece)

    with lying_s3() as service, pytest.MonkeyPatch.context() as environment:
        for name, value in KEYS.items():
            environment.setenv(name, value)
        options = service.options(request_timeout_seconds=_TOO_LONG_SECONDS)
        service.lie = lambda asked: counted(asked) if asked.method == "GET" else None
        asyncio.run(_got(ObjectTransport(options, lambda: store_of(options))))
    return sent > 64 << 20


async def _got(one: ObjectTransport) -> None:
    one._store = one._connect()
    place = ValueRef("kvtier/b/x", 192, 5000)
    await one.get([Value(place, memoryview(bytearray(5000)))], lambda position, header: pytest.fail("it is no value"))
    await one.close(5.0)


def without_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection whose request was not answered is kept."""

    def give_back(self: ClientThreads[Any], number: int, client: Any) -> None:
        with self._lock:
            self._idle.append((number, client))

    monkeypatch.setattr(ClientThreads, "_give_back", give_back)


def value_kept_after_its_request() -> bool:
    """What a server sends after a request was given up is read, and kept."""
    sent = 0

    def counted() -> Iterator[bytes]:
        nonlocal sent
        for piece in for_ever(b"*1\r\n$4000000000\r\n", bytes(1 << 10)):
            time.sleep(0.01)
            yield piece
            sent += len(piece)

    with valkey_server() as server, lying_valkey(server.process.port, lambda words: None) as liar:
        one = ValkeyTransport(server.options(servers=[liar.address], connections=1, request_timeout_seconds=1.0))
        liar.lie = lambda words: counted() if words[0].upper() == b"MGET" and b"probe" not in words[1] else None

        async def life() -> bool:
            await one.open()
            await one.get(
                [Value(ValueRef("kvtier:b:x", 192, 5000), memoryview(bytearray(5000)))], lambda at, header: None
            )  # type: ignore[arg-type, return-value]
            await asyncio.sleep(_WAIT_SECONDS)
            before = sent
            await asyncio.sleep(_WAIT_SECONDS)
            await one.close(5.0)
            return sent > before

        return asyncio.run(life())


# ---- redirects


def without_own_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests go to whatever host a service names."""
    monkeypatch.setattr(objects_library, "getproxies_environment", lambda: {"none": "wanted"})


def request_to_another_host() -> bool:
    """A service has a tier ask another one."""
    with lying_s3(host="127.0.0.2") as other, lying_s3() as service, _key_files() as credentials:
        service.lie = lambda asked: reply(b"", "302 Found", Location=f"{other.endpoint}/{BUCKET}/{asked.name}")
        options = service.options(credentials=credentials)
        with suppress(OSError, obstore.exceptions.BaseError):
            obstore.get(store_of(options), "kvtier/b/x")
        return bool(other.asked)


@contextmanager
def _key_files() -> Iterator[dict[str, str]]:
    with TemporaryDirectory() as folder:
        files = {name: Path(folder, name) for name in ("access_key_file", "secret_key_file")}
        for path in files.values():
            path.write_text("key")
            os.chmod(path, 0o600)
        yield {name: str(path) for name, path in files.items()}


SWITCHES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], bool]]] = {
    "kinds of answers": (without_kinds, more_slots_than_a_cluster_has),
    "typed errors": (without_typed_errors, untyped_error),
    "one deadline": (without_deadline, request_beyond_its_time),
    "one deadline of claims": (without_deadline, claims_beyond_their_time),
    "ends of bodies": (without_end_of_bodies, body_read_beyond_its_size),
    "closing what is not answered": (without_closing, value_kept_after_its_request),
    "own hosts": (without_own_hosts, request_to_another_host),
}
"""Name of a bound: how to turn it off, and whether what it keeps is broken."""
