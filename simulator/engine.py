"""A simulated I/O engine: requests land in pieces, in any order and at any time, with the faults of the profile."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import numpy as np

from simulator.disk import BLOCK_BYTES, SECTOR_BYTES, DiskFile, OrphanedWrite, SimulatedRoot
from simulator.oracle import Oracle
from simulator.syscalls import SimulatedSystem


class EngineRequest(Protocol):
    """What the fs backend hands to its engine."""

    fd: int
    offset: int
    length: int
    buffers: list[memoryview]
    kind: Any
    done: Callable[[Any, int], None]


class RequestFault(StrEnum):
    """The fault drawn for a request; WHOLE is none. LOST and MISPLACED requests report success."""

    WHOLE = "whole"
    FAILED = "failed"
    SHORT = "short"
    LOST = "lost"
    MISPLACED = "misplaced"


_ERRORS = (errno.EIO, errno.EIO, errno.EAGAIN, errno.EINTR, errno.ENOMEM)


@dataclass(slots=True, eq=False)
class RequestExtent:
    """What a request moves of one block: bytes `start` to `end` of it, payload in `row` (-1: none).

    `has_header`: it begins with a slot's header page, and is not the rest of a short request. `foreign`: the header
    that was read was written for another place.
    """

    row: int
    start: int
    end: int
    has_header: bool
    foreign: bool = False


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """A request in flight: where its bytes really go, how many of them, and which sectors have landed.

    `aim` is the file it was meant for; `parts` what it moves of each block.
    """

    request: EngineRequest
    reading: bool
    aim: DiskFile
    file: DiskFile
    offset: int
    length: int
    result: int
    fault: RequestFault
    parts: list[RequestExtent]
    landed: set[int] = field(default_factory=set)

    def meant(self, first: int) -> tuple[DiskFile, int] | None:
        """Where the bytes from `first` on were to be written, if that is not where they go."""
        return (self.aim, self.request.offset + first) if self.fault is RequestFault.MISPLACED else None

    def is_foreign(self, first: int) -> bool:
        """True if the header page at `first` was written for another place, and is not the very page that stands where
        the read was meant to go: a file that replaced another may hold the same block, and a reader sees no difference.
        """
        aim, sector = self.aim, (self.request.offset + first) // SECTOR_BYTES
        if aim.is_place(sector, self.file.meant_for((self.offset + first) // SECTOR_BYTES)):
            return False
        if self.fault is not RequestFault.MISPLACED or not aim.is_place(sector, aim.meant_for(sector)):
            return True
        return aim.page(self.request.offset + first) != self.file.page(self.offset + first)

    @property
    def sectors(self) -> range:
        """The pieces of the request, by number."""
        return range(-(-self.length // SECTOR_BYTES))


class KnownOffsets:
    """Offsets of earlier writes, by length: where a misplaced request may go."""

    def __init__(self) -> None:
        self._known: dict[int, list[tuple[DiskFile, int]]] = {}

    def note(self, file: DiskFile, offset: int, length: int) -> None:
        known = self._known.setdefault(length, [])
        if not any(place[0] is file and place[1] == offset for place in known):
            known.append((file, offset))

    def others(self, file: DiskFile, offset: int, length: int) -> list[tuple[DiskFile, int]]:
        return [place for place in self._known.get(length, ()) if place[0] is not file or place[1] != offset]


class SimulatedEngine:
    """Keeps the contract of the backend's `IOEngine` over a simulated disk. Buffers are used when bytes land.

    A request that is misplaced reads or writes the right bytes of a wrong place of the same length.
    """

    name = "simulated"
    depth = 32

    def __init__(self, system: SimulatedSystem, folder: SimulatedRoot, places: KnownOffsets, oracle: Oracle) -> None:
        self._system = system
        self._folder = folder
        self._places = places
        self._oracle = oracle
        self._flights: list[InFlightRequest] = []
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        system = self._system
        for request in requests:
            flight = self._start(request)
            self._flights.append(flight)
            self._idle.clear()
            seconds = system.fault_profile.request_seconds(system.rng)
            if system.rng.random() < 0.25:
                system.loop.outside(system.rng.random() * seconds, lambda flight=flight: self._land_some(flight))  # type: ignore[misc]
            system.loop.outside(seconds, lambda flight=flight: self._finish(flight))  # type: ignore[misc]
            if not flight.reading:
                system.writing(seconds)

    def _start(self, request: EngineRequest) -> InFlightRequest:
        file = self._system.file(request.fd)
        reading = request.kind.value == "read"
        fault = self._draw(reading)
        at, length = request.offset, request.length
        flight = InFlightRequest(request, reading, file, file, at, length, length, fault, self._parts(request))
        rng = self._system.rng
        if fault is RequestFault.FAILED:
            flight.result = -(rng.choice(_ERRORS) if reading or rng.random() < 0.7 else errno.ENOSPC)
        elif fault is RequestFault.SHORT:
            flight.length = flight.result = rng.randrange(0, request.length, SECTOR_BYTES)
        elif fault is RequestFault.MISPLACED:
            others = self._places.others(file, request.offset, request.length)
            if others:
                flight.file, flight.offset = rng.choice(others)
            else:
                flight.fault = RequestFault.WHOLE
        if reading:
            flight.length = max(0, min(flight.length, len(flight.file.data) - flight.offset))
            flight.result = min(flight.result, flight.length)
        elif flight.fault is RequestFault.WHOLE:
            self._places.note(file, request.offset, request.length)
        return flight

    def _draw(self, reading: bool) -> RequestFault:
        fault_profile, drawn = self._system.fault_profile, self._system.rng.random()
        misplaced, lost = (fault_profile.misreads, 0.0) if reading else (fault_profile.miswrites, fault_profile.lost)
        chances = (fault_profile.fails, fault_profile.short, misplaced, lost)
        for fault, chance in zip(
            (RequestFault.FAILED, RequestFault.SHORT, RequestFault.MISPLACED, RequestFault.LOST), chances, strict=True
        ):
            if drawn < chance:
                return fault
            drawn -= chance
        return RequestFault.WHOLE

    def _parts(self, request: EngineRequest) -> list[RequestExtent]:
        """The blocks of a request: each is a header page and a payload in a row, or what is left of them."""
        parts: list[RequestExtent] = []
        start = at = 0
        has_header = False
        for buffer in request.buffers:
            row = self._row(buffer)
            if row < 0:
                start, has_header = at, len(buffer) == BLOCK_BYTES and len(request.buffers) > 1
            at += len(buffer)
            if row >= 0:
                parts.append(RequestExtent(row, start, at, has_header))
                start, has_header = at, False
        return parts

    def _row(self, buffer: memoryview) -> int:
        """The row a buffer lies in, -1 if in none."""
        return (
            self._oracle.row_at(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]) if len(buffer) else -1
        )

    # -- landing -------------------------------------------------------------------------------------------------

    def _land_some(self, flight: InFlightRequest) -> None:
        """RequestExtent of the sectors land ahead of the rest."""
        rng = self._system.rng
        self._land(flight, [sector for sector in flight.sectors if rng.random() < 0.5])

    def _land(self, flight: InFlightRequest, sectors: Sequence[int]) -> None:
        if flight.fault is RequestFault.LOST:
            return
        fresh = [sector for sector in sectors if sector not in flight.landed] if flight.landed else sectors
        if not fresh:
            return
        flight.landed.update(fresh)
        if flight.reading:
            for part in flight.parts:
                if any(
                    part.start < (sector + 1) * SECTOR_BYTES and sector * SECTOR_BYTES < part.end for sector in fresh
                ):
                    self._oracle.row_written(part.row, "a read of the disk")
        for start, end in _runs(fresh):
            first, last = start * SECTOR_BYTES, min(end * SECTOR_BYTES, flight.length)
            if flight.reading:
                at = flight.offset + first
                _scatter(flight.request.buffers, first, memoryview(flight.file.data)[at : at + last - first])
                for part in flight.parts:
                    if part.has_header and first <= part.start < last:
                        part.foreign = flight.is_foreign(part.start)
            else:
                data = _gather(flight.request.buffers, first, last)
                flight.file.write(flight.offset + first, data, flight.meant(first))

    def _finish(self, flight: InFlightRequest) -> None:
        """The request ends: all of it has landed now, except what failed."""
        if flight.fault is RequestFault.FAILED:
            self._land_some(flight)
        else:
            self._land(flight, flight.sectors)
        if not flight.reading:
            self._system.on_change()
        self._system.loop.call_soon(self._report, flight)

    def _report(self, flight: InFlightRequest) -> None:
        request = flight.request
        self._flights.remove(flight)
        kind = "read" if flight.reading else "write"
        self._oracle.record.covered[f"{kind}s {flight.fault}"] += 1
        self._oracle.note(
            f"{self._folder.path} {kind} at {request.offset} of {request.length}, "
            f"rows {[part.row for part in flight.parts]}: {flight.fault} {flight.result}"
        )
        for part in flight.parts:
            if flight.result > part.start:
                moved = min(flight.result, part.end) - part.start
                self._oracle.moved(flight.reading, part.row, moved, part.has_header, part.foreign)
        request.done(request, flight.result)
        if not self._flights:
            self._idle.set()

    def orphans(self) -> list[OrphanedWrite]:
        """The writes of a dead process that have not landed, with its memory as it was, in pieces of random sectors."""
        landings = []
        for flight in self._flights:
            if flight.reading or flight.fault is RequestFault.LOST:
                continue
            self._count_torn_write(flight)
            for start, end in _runs([sector for sector in flight.sectors if sector not in flight.landed]):
                first, last = start * SECTOR_BYTES, min(end * SECTOR_BYTES, flight.length)
                data = bytes(_gather(flight.request.buffers, first, last))
                split = self._system.rng.randrange(0, len(data), SECTOR_BYTES)
                for piece_start, piece in ((0, data[:split]), (split, data[split:])):
                    if piece:
                        at = first + piece_start
                        place = flight.offset + at
                        before = bytes(flight.file.data[place : place + len(piece)])
                        landings.append(OrphanedWrite(flight.file, place, piece, flight.meant(at), before))
        return landings

    def land_before_power_fails(self) -> None:
        """At a power loss some sectors of writes in flight are on the disk."""
        for flight in self._flights:
            if not flight.reading:
                self._land_some(flight)
                self._count_torn_write(flight)

    def _count_torn_write(self, flight: InFlightRequest) -> None:
        """Count a write that is in flight at a crash, and whether only some of its sectors are on the disk."""
        self._oracle.record.covered["writes in flight at a crash"] += 1
        self._oracle.record.covered["writes torn by a crash"] += 0 < len(flight.landed) < len(flight.sectors)

    async def close(self, timeout_seconds: float) -> int:
        """Wait for every request. Returns how many have not ended at the deadline."""
        try:
            if self._flights:
                await asyncio.wait_for(self._idle.wait(), timeout_seconds)
        except TimeoutError:
            return len(self._flights)
        return 0


def _runs(sectors: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as ranges (first, one past the last)."""
    if sectors and sectors[-1] - sectors[0] == len(sectors) - 1:
        return [(sectors[0], sectors[-1] + 1)]
    runs: list[tuple[int, int]] = []
    for sector in sectors:
        if runs and runs[-1][1] == sector:
            runs[-1] = (runs[-1][0], sector + 1)
        else:
            runs.append((sector, sector + 1))
    return runs


def _scatter(buffers: Sequence[memoryview], first: int, data: memoryview) -> None:
    """Copy bytes to a position of buffers laid one after another."""
    done = 0
    for buffer in buffers:
        at = first + done
        if 0 <= at < len(buffer) and done < len(data):
            count = min(len(buffer) - at, len(data) - done)
            buffer[at : at + count] = data[done : done + count]
            done += count
        first -= len(buffer)


def _gather(buffers: Sequence[memoryview], first: int, last: int) -> bytes:
    """Bytes of buffers laid one after another."""
    parts = []
    for buffer in buffers:
        parts.append(buffer[max(first, 0) : max(last, 0)])
        first -= len(buffer)
        last -= len(buffer)
    return b"".join(parts)
