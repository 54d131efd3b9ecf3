"""An open transport in a test, and values whose bytes follow from their names."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

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
