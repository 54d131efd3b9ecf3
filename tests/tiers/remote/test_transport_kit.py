"""The conformance suite of transports finds what it is for: a sound one in memory passes, and each defect is red."""

from __future__ import annotations

import asyncio
import errno
import functools
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier.types.jobs import CORRUPT, MISSING, STORED, BlockOutcome, failed
from kvtier_remote.conformance import TransportTests
from kvtier_remote.transport import Marker, NameFormat, TransportInfo, Value, ValueRef, Verify

GONE = OSError(errno.ENOTCONN, "closed")


class Memory:
    """What a server would hold. `running` is cleared while it is frozen."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[bytes, bytes]] = {}
        self.markers: dict[str, Marker] = {}
        self.frozen = False
        self.silent = ""


class MemoryTransport:
    """A sound transport: everything happens at once, on the event loop."""

    name_format = NameFormat()
    batch_blocks = 4
    batch_bytes = 4 << 20
    concurrency = 3
    hedges = False

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.open_now = False

    async def open(self) -> TransportInfo:
        self.open_now = True
        return TransportInfo(1 << 30)

    async def close(self, timeout_seconds: float) -> int:
        self.open_now = False
        return 0

    async def _reach(self) -> None:
        await asyncio.sleep(0)
        if not self.open_now:
            raise GONE
        if self.memory.frozen:
            raise OSError(errno.ETIMEDOUT, "the server does not answer")

    async def present(self, places: Sequence[ValueRef]) -> list[bool]:
        await self._reach()
        return [self._held(place)[1] == place[1:] for place in places]

    def _held(self, place: ValueRef) -> tuple[tuple[bytes, bytes], tuple[int, int]]:
        header, payload = self.memory.values.get(place.name, (b"", b""))
        return (header, payload), (len(header), len(payload))

    async def get(self, values: Sequence[Value], verify: Verify) -> list[BlockOutcome]:
        try:
            await self._reach()
        except OSError as error:
            return [failed(error.errno)] * len(values)
        return [self._get(i, value, verify) for i, value in enumerate(values)]

    def _get(self, position: int, value: Value, verify: Verify) -> BlockOutcome:
        (header, payload), lengths = self._held(value.place)
        if not header:
            return MISSING
        if lengths != value.place[1:]:
            return CORRUPT
        value.payload[:] = payload
        return verify(position, memoryview(header))

    async def put(self, values: Sequence[Value]) -> list[BlockOutcome]:
        try:
            await self._reach()
        except OSError as error:
            return [failed(error.errno)] * len(values)
        for value in values:
            self._put(value)
        return [STORED] * len(values)

    def _put(self, value: Value) -> None:
        self.memory.values[value.place.name] = bytes(value.header), bytes(value.payload)

    async def remove(self, places: Sequence[ValueRef]) -> None:
        await self._reach()
        for place in places:
            self.memory.values.pop(place.name, None)

    async def read_marker(self, name: str) -> Marker | None:
        await self._reach()
        return self.memory.markers.get(name)

    async def swap_marker(self, name: str, held: Marker | None, marker: Marker) -> Marker | None:
        await self._reach()
        if self.memory.markers.get(name) == held:
            self.memory.markers[name] = marker
        return self.memory.markers.get(name)


class SpreadMemory(MemoryTransport):
    """Two servers, the second of which may be silent."""

    def server_of(self, place: ValueRef) -> str:
        return ("first", "second")[sum(place.name.encode()) % 2]

    def _silent(self, place: ValueRef) -> bool:
        return self.memory.silent == self.server_of(place)

    async def present(self, places):
        found = await super().present(places)
        answers = [None if self._silent(place) else there for place, there in zip(places, found, strict=True)]
        if all(there is None for there in answers):
            raise OSError(errno.ETIMEDOUT, "no server answers")
        return answers

    async def get(self, values, verify):
        if any(self._silent(value.place) for value in values):
            return [failed(errno.ETIMEDOUT)] * len(values)
        return await super().get(values, verify)

    async def put(self, values):
        if any(self._silent(value.place) for value in values):
            return [failed(errno.ETIMEDOUT)] * len(values)
        return await super().put(values)


class TestSound(TransportTests):
    """All of the suite over a sound transport."""

    kind = MemoryTransport

    @pytest.fixture(autouse=True)
    def _memory(self) -> None:
        self.memory = Memory()

    def make(self, place: Path) -> MemoryTransport:
        return self.kind(self.memory)

    @contextmanager
    def frozen(self):
        self.memory.frozen = True
        yield
        self.memory.frozen = False

    def lose_markers(self, place: Path) -> bool:
        self.memory.markers.clear()
        return True


class TestSoundOverTwoServers(TestSound):
    """All of the suite over a sound transport of two servers."""

    kind = SpreadMemory

    @contextmanager
    def one_silent(self):
        self.memory.silent = "second"
        yield self.memory.silent
        self.memory.silent = ""


class KeepsTheFirst(MemoryTransport):
    def _put(self, value):
        if value.place.name not in self.memory.values:
            super()._put(value)


class ReadsPayloadsLater(MemoryTransport):
    def _put(self, value):
        self.memory.values[value.place.name] = bytes(value.header), value.payload


class WritesLate(MemoryTransport):
    """As a client library does whose timeout ends the call and not the transfer."""

    async def get(self, values, verify):
        outcomes = await super().get(values, verify)
        again = functools.partial(self._get, 0, values[0], verify)
        asyncio.get_running_loop().call_soon(again)
        return outcomes


class WritesBeside(MemoryTransport):
    def _get(self, position, value, verify):
        whole = memoryview(value.payload.obj)
        whole[:1] = b"x"
        return super()._get(position, value, verify)


class BelievesLengths(MemoryTransport):
    def _get(self, position, value, verify):
        (header, payload), _ = self._held(value.place)
        if not header:
            return MISSING
        size = min(len(payload), len(value.payload))
        value.payload[:size] = payload[:size]
        return verify(position, memoryview(header))


class FindsByName(MemoryTransport):
    async def present(self, places):
        await self._reach()
        return [place.name in self.memory.values for place in places]


class VerifiesNothing(MemoryTransport):
    def _get(self, position, value, verify):
        outcome = super()._get(position, value, verify)
        return STORED if outcome == CORRUPT else outcome


class FailsTogether(MemoryTransport):
    async def get(self, values, verify):
        outcomes = await super().get(values, verify)
        return [MISSING] * len(values) if MISSING in outcomes else outcomes


class RemovesTooMuch(MemoryTransport):
    async def remove(self, places):
        await self._reach()
        self.memory.values.clear()


class SwallowsTimeouts(MemoryTransport):
    async def present(self, places):
        try:
            return await super().present(places)
        except OSError:
            return [False] * len(places)


class RaisesFromGet(MemoryTransport):
    async def get(self, values, verify):
        await self._reach()
        return await super().get(values, verify)


class SwapsWhatItDoesNotFind(MemoryTransport):
    async def swap_marker(self, name, held, marker):
        await self._reach()
        self.memory.markers[name] = marker
        return marker


class ReturnsWhatItWasGiven(MemoryTransport):
    async def swap_marker(self, name, held, marker):
        await super().swap_marker(name, held, marker)
        return marker


class RacesForMarkers(MemoryTransport):
    """Reads, then writes, and others have their turn between the two."""

    async def swap_marker(self, name, held, marker):
        await self._reach()
        there = self.memory.markers.get(name)
        await self._reach()
        if there == held:
            self.memory.markers[name] = there = marker
        return there


class HangsWhenFrozen(MemoryTransport):
    async def get(self, values, verify):
        if self.memory.frozen:
            await asyncio.get_running_loop().create_future()
        return await super().get(values, verify)


class UsesTheDefaultExecutor(MemoryTransport):
    async def open(self):
        await asyncio.get_running_loop().run_in_executor(None, int)
        return await super().open()


class LeavesATask(MemoryTransport):
    async def open(self):
        self.task = asyncio.create_task(asyncio.sleep(3600))
        return await super().open()


class AnswersForAllOrNone(SpreadMemory):
    async def present(self, places):
        answers = await super().present(places)
        return [None] * len(places) if None in answers else answers


class GuessesForTheSilent(SpreadMemory):
    async def present(self, places):
        return [True if there is None else there for there in await super().present(places)]


class FailsForAll(SpreadMemory):
    async def get(self, values, verify):
        if self.memory.silent:
            return [failed(errno.ETIMEDOUT)] * len(values)
        return await super().get(values, verify)


LENGTHS, MEMORY = "a_value_of_another_length", "memory_is_left_alone"
SILENT = "a_server_that_does_not_answer"
DEFECTS: dict[type[MemoryTransport], str] = {
    KeepsTheFirst: "a_value_is_written_over",
    ReadsPayloadsLater: MEMORY,
    WritesLate: MEMORY,
    WritesBeside: "values_of_every_size",
    BelievesLengths: LENGTHS,
    FindsByName: LENGTHS,
    VerifiesNothing: "the_verdict_on_a_value",
    FailsTogether: "what_is_missing_is_missing_beside",
    RemovesTooMuch: "what_is_removed_is_gone",
    SwallowsTimeouts: "a_frozen_server_costs_time",
    RaisesFromGet: "calls_after_close",
    SwapsWhatItDoesNotFind: "a_marker_is_replaced_only_by_who_found_it",
    ReturnsWhatItWasGiven: "a_marker_is_replaced_only_by_who_found_it",
    RacesForMarkers: "clients_that_race_for_a_marker",
    HangsWhenFrozen: "a_frozen_server_costs_time",
    UsesTheDefaultExecutor: "an_open_transport_says",
    LeavesATask: "an_open_transport_says",
    AnswersForAllOrNone: SILENT,
    GuessesForTheSilent: SILENT,
    FailsForAll: SILENT,
}


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_defect_is_found(tmp_path: Path, defect: type[MemoryTransport]) -> None:
    class Suite(TestSoundOverTwoServers):
        kind = defect
        call_seconds = 1.0
        _warm = True

    (name,) = [name for name in dir(Suite) if name.startswith(f"test_{DEFECTS[defect]}")]
    suite = Suite()
    suite.memory = Memory()
    found: Callable[[Path], Any] = getattr(suite, name)
    with pytest.raises((AssertionError, OSError, TimeoutError, RuntimeError)):
        found(tmp_path)
