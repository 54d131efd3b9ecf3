"""The base of tests of a transport: the hooks a subclass supplies, and an open transport of it."""

from __future__ import annotations

import functools
import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

from kvtier.testing.trace import leaving_no_trace, run_in_loop
from kvtier.types.jobs import CORRUPT, LOADED, MISSING, STORED, BlockOutcome
from kvtier.types.keys import make_key
from kvtier_remote.names import BlockNames
from kvtier_remote.transport import Marker, Transport, Value, ValueRef

HEADER_BYTES = 192
GUARD_BYTES = 64
SENTINEL = 0x55
ANY_MARKER = Marker(bytes(8), 0)


class Client:
    """An open transport, and values whose bytes follow from their name, their length and a version."""

    def __init__(self, transport: Transport, namespace: str) -> None:
        self.transport = transport
        self.names = BlockNames(transport.name_format, "kit", hashlib.sha256(namespace.encode()).digest())

    def place(self, number: int, payload_bytes: int, header_bytes: int = HEADER_BYTES) -> ValueRef:
        """The place of a value."""
        return ValueRef(
            self.names.namer(ANY_MARKER)(make_key(number.to_bytes(8, "big"), 0)), header_bytes, payload_bytes
        )

    def value(self, place: ValueRef, version: int = 0) -> Value:
        """A value to write, in memory of its own."""
        header, payload = content(place, version)
        return Value(place, memoryview(bytearray(payload)), header)

    async def put(self, places: Sequence[ValueRef], version: int = 0) -> None:
        """Write values, as many in a call as it takes. Raises AssertionError unless all of them are stored."""
        for batch in self.batches(places):
            outcomes = await self.transport.put([self.value(place, version) for place in batch])
            assert outcomes == [STORED] * len(batch)

    async def read(self, places: Sequence[ValueRef], version: int = 0) -> list[BlockOutcome]:
        """Read values; LOADED are those that have the bytes of a version. As many in a call as it takes."""
        found = []
        for batch in self.batches(places):
            found += await self.get(batch, version)
        return found

    async def get(self, places: Sequence[ValueRef], version: int = 0) -> list[BlockOutcome]:
        """Read values in one call. Raises AssertionError for a byte outside their payloads, and unless each that has
        arrived was verified once."""
        rooms = [memoryview(bytearray([SENTINEL]) * (place.payload_bytes + 2 * GUARD_BYTES)) for place in places]
        payloads = [room[GUARD_BYTES:-GUARD_BYTES] for room in rooms]
        verified: list[int] = []

        def verify(position: int, header: memoryview) -> BlockOutcome:
            verified.append(position)
            expected = content(places[position], version)
            return LOADED if (bytes(header), bytes(payloads[position])) == expected else CORRUPT

        values = [Value(place, payload) for place, payload in zip(places, payloads, strict=True)]
        outcomes = await self.transport.get(values, verify)
        assert len(outcomes) == len(places)
        assert len(verified) == len(set(verified)), "a value was verified twice"
        loaded = {i for i, outcome in enumerate(outcomes) if outcome == LOADED}
        assert loaded <= set(verified), "a value counts as loaded that was not verified"
        assert not {i for i, outcome in enumerate(outcomes) if outcome == MISSING} & set(verified)
        for room in rooms:
            assert {*room[:GUARD_BYTES], *room[-GUARD_BYTES:]} == {SENTINEL}, "bytes beside a payload were written"
        return outcomes

    def batches(self, places: Sequence[ValueRef]) -> Iterable[list[ValueRef]]:
        """The values of each call."""
        batch: list[ValueRef] = []
        for place in places:
            size = sum(one.payload_bytes for one in batch) + place.payload_bytes
            if batch and (len(batch) == self.transport.batch_blocks or size > self.transport.batch_bytes):
                yield batch
                batch = []
            batch.append(place)
        if batch:
            yield batch


def content(place: ValueRef, version: int) -> tuple[bytes, bytes]:
    rng = random.Random(f"{place} {version}")
    return rng.randbytes(place.header_bytes), rng.randbytes(place.payload_bytes)


def questions(client: Client, places: Sequence[ValueRef]) -> list[Callable[[], Coroutine[Any, Any, object]]]:
    """The calls that raise OSError."""
    transport, marker = client.transport, client.names.marker
    return [
        lambda: transport.present(places),
        lambda: transport.remove(places),
        lambda: transport.read_marker(marker),
        lambda: transport.swap_marker(marker, None, ANY_MARKER),
    ]


P = ParamSpec("P")
Suite = TypeVar("Suite", bound="TransportBase")
CLOSE_SECONDS = 20.0


class TransportBase(ABC):
    """The hooks. `make` is required; the rest has defaults.

    Every test has a place of its own, and names that no other test has. There must be room for 64 MiB of values.
    """

    sizes: ClassVar[Sequence[int]] = (1, 64, 5000, 256 << 10, (1 << 20) + 512)
    """Payload bytes of values."""

    races_end_at_once: ClassVar[bool] = True
    """False if two clients that replace one marker at the same time may both get their own for an answer. One of them
    is there, and the next call of the other returns that."""

    call_seconds: ClassVar[float] = 60.0
    """A call ends within this time while the server is frozen."""

    _warm: ClassVar[bool] = False

    @abstractmethod
    def make(self, place: Path) -> Transport:
        """A new transport, not open. `place` is a path of this test alone; all transports for it use one server."""

    def make_unreachable(self, place: Path) -> Transport | None:
        """A transport to where no server is. None: there is no such case."""
        return None

    def make_hurried(self, place: Path) -> Transport:
        """A transport with short timeouts, for a server that is frozen."""
        return self.make(place)

    def frozen(self) -> AbstractContextManager[None] | None:
        """A context in which the server does not answer. None: it cannot be frozen."""
        return None

    def one_silent(self) -> AbstractContextManager[str] | None:
        """A context in which one of several servers does not answer, and what `server_of` calls it. None: there are
        not several, or none can be silenced."""
        return None

    def lose_markers(self, place: Path) -> bool:
        """Remove every marker from the server. Return True if that was done."""
        return False

    # -- for the tests ---------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Open and close a transport once for all tests of a class."""
        if not type(self)._warm:
            run_in_loop(self._life(Path("warm-up")))
            type(self)._warm = True

    async def _life(self, place: Path) -> None:
        async with self.client(place):
            pass

    @asynccontextmanager
    async def client(self, place: Path, transport: Transport | None = None) -> AsyncIterator[Client]:
        """A transport, open; closed at the end, with nothing stuck."""
        one = transport or self.make(place)
        try:
            await one.open()
            yield Client(one, str(place))
        finally:
            assert await one.close(CLOSE_SECONDS) == 0, "calls are stuck"

    def places(self, client: Client, per_size: int = 2) -> list[ValueRef]:
        """Places of every size."""
        numbers = count()
        return [client.place(next(numbers), size) for size in self.sizes for _ in range(per_size)]


def in_loop(test: Callable[Concatenate[Suite, P], Coroutine[Any, Any, None]]) -> Callable[Concatenate[Suite, P], None]:
    """An event loop for each test, which must leave no descriptor, thread or task; a library may keep what it has
    after the first transport of a class was open."""

    @functools.wraps(test)
    def run(suite: Suite, /, *args: P.args, **kwargs: P.kwargs) -> None:
        suite.warm_up()
        with leaving_no_trace():
            run_in_loop(test(suite, *args, **kwargs))

    return run
