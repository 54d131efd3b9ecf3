"""An I/O engine that does real I/O with planned faults: for tests of the filesystem tiers, alone or in a stack."""

from __future__ import annotations

import asyncio
import errno as errors
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from kvtier.tier.contract import LoadStore
from kvtier_fs.io.contract import IOEngine, IOKind, IORequest
from kvtier_fs.io.full_transfer import span
from kvtier_fs.local.opening import Hooks
from kvtier_fs.local.tier import FSBackend
from kvtier_fs.options import FSOptions, SharedFSOptions
from kvtier_fs.shared.root import FilesHooks
from kvtier_fs.shared.tier import SharedFSBackend

SECTOR_BYTES = 512


class IOFaultKind(StrEnum):
    """The fault of a request. ERROR: ends with `errno`, nothing moves. SHORT: about half of it moves, whole sectors.

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
    """A fault, and the requests it can strike (None: reads and writes)."""

    kind: IOFaultKind
    direction: IOKind | None = None
    errno: int = errors.EIO

    def befalls(self, request: IORequest) -> bool:
        """True if it can happen to this request; reads are never lost, because no disk does that."""
        lost_read = self.kind is IOFaultKind.LOSE and request.kind is IOKind.READ
        return self.direction in (None, request.kind) and not lost_read


IOPlan = Callable[[int, IORequest], IOFault | None]
"""The fault of the request of this number, counted from 1 as submitted; None for no fault."""


def nth(number: int, fault: IOFault) -> IOPlan:
    """The fault strikes the N-th request, if it can, and no other."""
    return lambda count, request: fault if count == number and fault.befalls(request) else None


def seeded(seed: int, chances: Sequence[tuple[float, IOFault]]) -> IOPlan:
    """Each fault by its probability. The same seed and number of a request give the same fault."""

    def plan(count: int, request: IORequest) -> IOFault | None:
        rng = random.Random(f"{seed}/{count}")
        for chance, fault in chances:
            if fault.befalls(request) and rng.random() < chance:
                return fault
        return None

    return plan


class FaultyIO:
    """The faulty engines of one tier, all roots together: one plan, one count of requests.

    `tier` makes a tier of either type on it. `plan` may be changed at any time; `count` is the number of requests so
    far, `injected` counts faults by kind. `holding` is set while requests are held.
    """

    def __init__(self, plan: IOPlan | None = None) -> None:
        self.plan: IOPlan = plan or (lambda count, request: None)
        self.count = 0
        self.injected: Counter[str] = Counter()
        self.holding = asyncio.Event()
        self.engines: list[FaultyEngine] = []

    def tier(self, options: FSOptions | SharedFSOptions) -> LoadStore:
        """A tier on this I/O, of the type that its options are for; not opened yet."""
        if isinstance(options, SharedFSOptions):
            return SharedFSBackend(options, self.files())
        return FSBackend(options, self.slab())

    def slab(self) -> Hooks:
        """The hooks with which FSBackend runs on faulty engines."""
        return Hooks(engine=lambda root: self.engine())

    def files(self) -> FilesHooks:
        """The hooks with which SharedFSBackend runs on a faulty engine."""
        return FilesHooks(engine=self.engine)

    def engine(self) -> FaultyEngine:
        """A faulty engine; it does its I/O on the event loop, in order."""
        engine = FaultyEngine(self)
        self.engines.append(engine)
        return engine

    def next_fault(self, request: IORequest) -> IOFault | None:
        """Count a request and return its fault."""
        self.count += 1
        fault = self.plan(self.count, request)
        if fault is not None:
            self.injected[fault.kind] += 1
        return fault

    def release(self) -> None:
        """Submit every held request, without a fault."""
        self.holding.clear()
        for engine in self.engines:
            engine.release()


class FaultyEngine(IOEngine):
    """An engine of a FaultyIO. Its I/O blocks the event loop: for tests only."""

    name: ClassVar[str] = "faulty"

    def __init__(self, io: FaultyIO) -> None:
        self._io = io
        self._held: list[IORequest] = []
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def submit(self, requests: Sequence[IORequest]) -> None:
        """Queue requests, each with the fault the plan gives it."""
        loop = asyncio.get_running_loop()
        for request in requests:
            fault = self._io.next_fault(request)
            self._in_flight += 1
            self._idle.clear()
            if fault is not None and fault.kind is IOFaultKind.HOLD:
                self._held.append(request)
                self._io.holding.set()
            else:
                loop.call_soon(self._end, request, fault)

    def _end(self, request: IORequest, fault: IOFault | None) -> None:
        self._in_flight -= 1
        request.done(request, _result(request, fault))
        if self.after_turn is not None:
            self.after_turn()
        if not self._in_flight:
            self._idle.set()

    def release(self) -> None:
        """Submit the held requests, without a fault."""
        held, self._held = self._held, []
        for request in held:
            asyncio.get_running_loop().call_soon(self._end, request, None)

    async def close(self, timeout_seconds: float) -> int:
        """Wait for every request, held ones included. Returns how many have not ended at the deadline."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()
        if not self.in_flight:
            self.after_turn = None  # it refers to the rows, and a FaultyIO keeps its engines
        return self.in_flight


def _result(request: IORequest, fault: IOFault | None) -> int:
    """Do a request as its fault has it. Returns the bytes moved, or a negative errno."""
    offset, buffers = request.offset, request.buffers
    if fault is not None:
        if fault.kind is IOFaultKind.ERROR:
            return -fault.errno
        if fault.kind is IOFaultKind.LOSE:
            return request.length
        if fault.kind is IOFaultKind.SHORT:
            buffers = span(buffers, 0, request.length // 2 // SECTOR_BYTES * SECTOR_BYTES)
        else:
            offset += -request.length if offset >= request.length else request.length
    if not any(map(len, buffers)):
        return 0
    move = os.preadv if request.kind is IOKind.READ else os.pwritev
    try:
        return move(request.fd, buffers, offset)
    except OSError as error:
        return -(error.errno or errors.EIO)
