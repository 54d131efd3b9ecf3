"""A simulated I/O engine: requests land in pieces, in any order and at any time, and lie as the weather has it."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import numpy as np

from kvtier.testing.world.disk import BLOCK_BYTES, SECTOR_BYTES, DiskFile, Landing, RootFolder
from kvtier.testing.world.system import System
from kvtier.testing.world.watch import Watch


class Request(Protocol):
    """What the fs backend hands to its engine."""

    fd: int
    offset: int
    length: int
    buffers: list[memoryview]
    kind: Any
    done: Callable[[Any, int], None]


class Fate(StrEnum):
    """What becomes of a request. LOST and MISPLACED ones say that all went well."""

    WHOLE = "whole"
    FAILED = "failed"
    SHORT = "short"
    LOST = "lost"
    MISPLACED = "misplaced"


_ERRORS = (errno.EIO, errno.EIO, errno.EAGAIN, errno.EINTR, errno.ENOMEM)


@dataclass(slots=True, eq=False)
class Part:
    """What a request moves of one block: bytes `start` to `end` of it, payload in `row` (-1: none).

    `headed`: it begins with a slot's header page, and does not merely go on with what came short. `foreign`: the header
    that was read was written for another place.
    """

    row: int
    start: int
    end: int
    headed: bool
    foreign: bool = False


@dataclass(slots=True, eq=False)
class Flight:
    """A request under way: where it really goes, how much of it, and which sectors have landed.

    `aim` is the file it was meant for; `parts` what it moves of each block.
    """

    request: Request
    reading: bool
    aim: DiskFile
    file: DiskFile
    offset: int
    length: int
    result: int
    fate: Fate
    parts: list[Part]
    landed: set[int] = field(default_factory=set)

    def meant(self, first: int) -> tuple[DiskFile, int] | None:
        """Where the bytes from `first` on were to be written, if that is not where they go."""
        return (self.aim, self.request.offset + first) if self.fate is Fate.MISPLACED else None

    def is_foreign(self, first: int) -> bool:
        """True if the header page at `first` was written for another place, and is not the very page that stands where
        the read was meant to go: a file that replaced another may hold the same block, and who reads cannot tell.
        """
        aim, sector = self.aim, (self.request.offset + first) // SECTOR_BYTES
        if aim.is_place(sector, self.file.meant_for((self.offset + first) // SECTOR_BYTES)):
            return False
        if self.fate is not Fate.MISPLACED or not aim.is_place(sector, aim.meant_for(sector)):
            return True
        return aim.page(self.request.offset + first) != self.file.page(self.offset + first)

    @property
    def sectors(self) -> range:
        """The pieces of the request, by number."""
        return range(-(-self.length // SECTOR_BYTES))


class Places:
    """Offsets that were written lately, by length: where a misdirected request may go."""

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

    def __init__(self, system: System, folder: RootFolder, places: Places, watch: Watch) -> None:
        self._system = system
        self._folder = folder
        self._places = places
        self._watch = watch
        self._flights: list[Flight] = []
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    def submit(self, requests: Sequence[Request]) -> None:
        system = self._system
        for request in requests:
            flight = self._depart(request)
            self._flights.append(flight)
            self._idle.clear()
            seconds = system.weather.request_seconds(system.dice)
            if system.dice.random() < 0.25:
                system.loop.outside(system.dice.random() * seconds, lambda flight=flight: self._land_some(flight))  # type: ignore[misc]
            system.loop.outside(seconds, lambda flight=flight: self._arrive(flight))  # type: ignore[misc]
            if not flight.reading:
                system.writing(seconds)

    def _depart(self, request: Request) -> Flight:
        file = self._system.file(request.fd)
        reading = request.kind.value == "read"
        fate = self._draw(reading)
        at, length = request.offset, request.length
        flight = Flight(request, reading, file, file, at, length, length, fate, self._parts(request))
        dice = self._system.dice
        if fate is Fate.FAILED:
            flight.result = -(dice.choice(_ERRORS) if reading or dice.random() < 0.7 else errno.ENOSPC)
        elif fate is Fate.SHORT:
            flight.length = flight.result = dice.randrange(0, request.length, SECTOR_BYTES)
        elif fate is Fate.MISPLACED:
            others = self._places.others(file, request.offset, request.length)
            if others:
                flight.file, flight.offset = dice.choice(others)
            else:
                flight.fate = Fate.WHOLE
        if reading:
            flight.length = max(0, min(flight.length, len(flight.file.data) - flight.offset))
            flight.result = min(flight.result, flight.length)
        elif flight.fate is Fate.WHOLE:
            self._places.note(file, request.offset, request.length)
        return flight

    def _draw(self, reading: bool) -> Fate:
        weather, die = self._system.weather, self._system.dice.random()
        misplaced, lost = (weather.misreads, 0.0) if reading else (weather.miswrites, weather.lost)
        chances = (weather.fails, weather.short, misplaced, lost)
        for fate, chance in zip((Fate.FAILED, Fate.SHORT, Fate.MISPLACED, Fate.LOST), chances, strict=True):
            if die < chance:
                return fate
            die -= chance
        return Fate.WHOLE

    def _parts(self, request: Request) -> list[Part]:
        """The blocks of a request: each is a header page and a payload in a row, or what is left of them."""
        parts: list[Part] = []
        start = at = 0
        headed = False
        for buffer in request.buffers:
            row = self._row(buffer)
            if row < 0:
                start, headed = at, len(buffer) == BLOCK_BYTES and len(request.buffers) > 1
            at += len(buffer)
            if row >= 0:
                parts.append(Part(row, start, at, headed))
                start, headed = at, False
        return parts

    def _row(self, buffer: memoryview) -> int:
        """The row a buffer lies in, -1 if in none."""
        return self._watch.row_at(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]) if len(buffer) else -1

    # -- landing -------------------------------------------------------------------------------------------------

    def _land_some(self, flight: Flight) -> None:
        """Part of the sectors land ahead of the rest."""
        dice = self._system.dice
        self._land(flight, [sector for sector in flight.sectors if dice.random() < 0.5])

    def _land(self, flight: Flight, sectors: Sequence[int]) -> None:
        if flight.fate is Fate.LOST:
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
                    self._watch.row_written(part.row, "a read of the disk")
        for start, end in _runs(fresh):
            first, last = start * SECTOR_BYTES, min(end * SECTOR_BYTES, flight.length)
            if flight.reading:
                at = flight.offset + first
                _scatter(flight.request.buffers, first, memoryview(flight.file.data)[at : at + last - first])
                for part in flight.parts:
                    if part.headed and first <= part.start < last:
                        part.foreign = flight.is_foreign(part.start)
            else:
                data = _gather(flight.request.buffers, first, last)
                flight.file.write(flight.offset + first, data, flight.meant(first))

    def _arrive(self, flight: Flight) -> None:
        """The request ends: all of it has landed now, but for what failed."""
        if flight.fate is Fate.FAILED:
            self._land_some(flight)
        else:
            self._land(flight, flight.sectors)
        if not flight.reading:
            self._system.on_change()
        self._system.loop.call_soon(self._tell, flight)

    def _tell(self, flight: Flight) -> None:
        request = flight.request
        self._flights.remove(flight)
        kind = "read" if flight.reading else "write"
        self._watch.record.covered[f"{kind}s {flight.fate}"] += 1
        self._watch.note(
            f"{self._folder.path} {kind} at {request.offset} of {request.length}, "
            f"rows {[part.row for part in flight.parts]}: {flight.fate} {flight.result}"
        )
        for part in flight.parts:
            if flight.result > part.start:
                moved = min(flight.result, part.end) - part.start
                self._watch.moved(flight.reading, part.row, moved, part.headed, part.foreign)
        request.done(request, flight.result)
        if not self._flights:
            self._idle.set()

    def orphans(self) -> list[Landing]:
        """What the process's writes have yet to land, as its memory is at its death, in pieces of random sectors."""
        landings = []
        for flight in self._flights:
            if flight.reading or flight.fate is Fate.LOST:
                continue
            self._crash_finds(flight)
            for start, end in _runs([sector for sector in flight.sectors if sector not in flight.landed]):
                first, last = start * SECTOR_BYTES, min(end * SECTOR_BYTES, flight.length)
                data = bytes(_gather(flight.request.buffers, first, last))
                cut = self._system.dice.randrange(0, len(data), SECTOR_BYTES)
                for piece_start, piece in ((0, data[:cut]), (cut, data[cut:])):
                    if piece:
                        at = first + piece_start
                        place = flight.offset + at
                        before = bytes(flight.file.data[place : place + len(piece)])
                        landings.append(Landing(flight.file, place, piece, flight.meant(at), before))
        return landings

    def land_before_power_fails(self) -> None:
        """At a power loss some sectors of writes in flight are on the disk."""
        for flight in self._flights:
            if not flight.reading:
                self._land_some(flight)
                self._crash_finds(flight)

    def _crash_finds(self, flight: Flight) -> None:
        """A write is under way, perhaps with some of its sectors on the disk and some not."""
        self._watch.record.covered["writes in flight at a crash"] += 1
        self._watch.record.covered["writes torn by a crash"] += 0 < len(flight.landed) < len(flight.sectors)

    async def close(self, timeout_seconds: float) -> int:
        """Wait for every request. Returns how many have not ended at the deadline."""
        try:
            if self._flights:
                await asyncio.wait_for(self._idle.wait(), timeout_seconds)
        except TimeoutError:
            return len(self._flights)
        return 0


def _runs(sectors: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as stretches (first, behind the last)."""
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
