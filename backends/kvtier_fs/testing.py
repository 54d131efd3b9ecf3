"""An I/O engine that does real I/O and goes wrong as planned: for tests of the filesystem tier, alone or in a stack."""

from __future__ import annotations

import asyncio
import errno as errors
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from kvtier.loadstore import LoadStore
from kvtier_fs.backend import FSBackend
from kvtier_fs.files.backend import FilesBackend
from kvtier_fs.files.root import FilesSeams
from kvtier_fs.io.contract import IOEngine, IOKind, IORequest
from kvtier_fs.opening import Seams
from kvtier_fs.options import FSOptions

SECTOR_BYTES = 512


class IOFaultKind(StrEnum):
    """What becomes of a request. ERROR: ends with `errno`, nothing moves. SHORT: about half of it moves, whole sectors.

    HOLD: nothing happens before `release`. LOSE: a write says that it was done and never reaches the disk.
    MISDIRECT: it is done, at a place its own length before its own (behind it at a file's start).
    """

    ERROR = "error"
    SHORT = "short"
    HOLD = "hold"
    LOSE = "lose"
    MISDIRECT = "misdirect"


@dataclass(frozen=True, slots=True)
class IOFault:
    """One way for a request to go wrong, and which requests it can befall (None: reads and writes)."""

    kind: IOFaultKind
    direction: IOKind | None = None
    errno: int = errors.EIO

    def befalls(self, request: IORequest) -> bool:
        """True when it can happen to this request; reads are never lost, for no disk can do that."""
        lost_read = self.kind is IOFaultKind.LOSE and request.kind is IOKind.READ
        return self.direction in (None, request.kind) and not lost_read


IOPlan = Callable[[int, IORequest], IOFault | None]
"""What goes wrong with the request of this number, counted from 1 as submitted; None lets it go its way."""


def nth(number: int, fault: IOFault) -> IOPlan:
    """The fault befalls the N-th request, if it can, and no other."""
    return lambda count, request: fault if count == number and fault.befalls(request) else None


def seeded(seed: int, chances: Sequence[tuple[float, IOFault]]) -> IOPlan:
    """Each fault by its probability. The same seed and number of a request give the same fault."""

    def plan(count: int, request: IORequest) -> IOFault | None:
        dice = random.Random(f"{seed}/{count}")
        for chance, fault in chances:
            if fault.befalls(request) and dice.random() < chance:
                return fault
        return None

    return plan


class FaultyIO:
    """The faulty engines of one tier, all roots together: one plan, one count of requests.

    `tier` makes a tier of either layout on it. `plan` may be changed at any time; `count` is the number of requests so
    far, `injected` counts faults by kind. `holding` is set while requests are held.
    """

    def __init__(self, plan: IOPlan | None = None) -> None:
        self.plan: IOPlan = plan or (lambda count, request: None)
        self.count = 0
        self.injected: Counter[str] = Counter()
        self.holding = asyncio.Event()
        self.engines: list[FaultyEngine] = []

    def tier(self, options: FSOptions) -> LoadStore:
        """A tier on this I/O, of the layout that its options name; not opened yet."""
        if options.layout == "files":
            return FilesBackend(options, self.files())
        return FSBackend(options, self.slab())

    def slab(self) -> Seams:
        """What FSBackend needs to run a tier of layout `slab` on faulty engines."""
        return Seams(engine=lambda root: self.engine())

    def files(self) -> FilesSeams:
        """What FilesBackend needs to run a tier of layout `files` on a faulty engine."""
        return FilesSeams(engine=self.engine)

    def engine(self, inner: IOEngine | None = None) -> FaultyEngine:
        """A faulty engine around another one; without one it does its I/O on the event loop, in order."""
        engine = FaultyEngine(self, inner)
        self.engines.append(engine)
        return engine

    def next_fault(self, request: IORequest) -> IOFault | None:
        """Count a request and say what becomes of it."""
        self.count += 1
        fault = self.plan(self.count, request)
        if fault is not None:
            self.injected[fault.kind] += 1
        return fault

    def release(self) -> None:
        """Let every held request go on, unharmed."""
        self.holding.clear()
        for engine in self.engines:
            engine.release()


class FaultyEngine(IOEngine):
    """One engine of a FaultyIO. It blocks the event loop for real I/O if there is no inner engine: for tests only."""

    name: ClassVar[str] = "faulty"

    def __init__(self, io: FaultyIO, inner: IOEngine | None = None) -> None:
        self._io = io
        self._inner = inner
        self._held: list[IORequest] = []
        self._own = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        return self._own + len(self._held) + (self._inner.in_flight if self._inner else 0)

    def submit(self, requests: Sequence[IORequest]) -> None:
        """Queue requests, each with the fate the plan gives it."""
        for request in requests:
            fault = self._io.next_fault(request)
            if fault is None:
                self._move(request)
            elif fault.kind is IOFaultKind.HOLD:
                self._held.append(request)
                self._idle.clear()
                self._io.holding.set()
            else:
                self._spoil(request, fault)

    def _spoil(self, request: IORequest, fault: IOFault) -> None:
        if fault.kind is IOFaultKind.ERROR:
            self._end_soon(request, lambda: -fault.errno)
        elif fault.kind is IOFaultKind.LOSE:
            self._end_soon(request, lambda: request.length)
        elif fault.kind is IOFaultKind.SHORT:
            moved = request.length // 2 // SECTOR_BYTES * SECTOR_BYTES
            self._move_as(request, request.offset, _first_bytes(request.buffers, moved))
        else:
            before = request.offset - request.length
            self._move_as(request, before if before >= 0 else request.offset + request.length, request.buffers)

    def _move_as(self, request: IORequest, offset: int, buffers: list[memoryview]) -> None:
        """Move something else than was asked for and report it as the request's own result."""

        def done(_: IORequest, result: int) -> None:
            request.done(request, result)

        self._move(IORequest(request.kind, request.fd, offset, buffers, done))

    def _move(self, request: IORequest) -> None:
        if self._inner is not None:
            self._inner.submit([request])
        else:
            self._end_soon(request, lambda: _do(request))

    def _end_soon(self, request: IORequest, work: Callable[[], int]) -> None:
        self._own += 1
        self._idle.clear()
        asyncio.get_running_loop().call_soon(self._end, request, work)

    def _end(self, request: IORequest, work: Callable[[], int]) -> None:
        self._own -= 1
        request.done(request, work())
        if self.after_turn is not None:
            self.after_turn()
        if not self._own and not self._held:
            self._idle.set()

    def release(self) -> None:
        """Let held requests go on, unharmed."""
        held, self._held = self._held, []
        for request in held:
            self._move(request)
        if not self._own:
            self._idle.set()

    async def close(self, timeout_seconds: float) -> int:
        """Wait for every request, held ones included. Returns how many have not ended at the deadline."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_seconds)
        except TimeoutError:
            return self.in_flight
        return await self._inner.close(timeout_seconds) if self._inner else 0


def _do(request: IORequest) -> int:
    if not request.length:
        return 0
    move = os.preadv if request.kind is IOKind.READ else os.pwritev
    try:
        return move(request.fd, request.buffers, request.offset)
    except OSError as error:
        return -(error.errno or errors.EIO)


def _first_bytes(buffers: Sequence[memoryview], limit: int) -> list[memoryview]:
    """The first `limit` bytes of buffers laid one after another."""
    parts = []
    for buffer in buffers:
        if limit > 0:
            parts.append(buffer[:limit])
        limit -= len(buffer)
    return parts
