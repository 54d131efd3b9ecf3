"""The engine for Linux with io_uring, on the `liburing` package: one ring for each root, watched by the event loop.

Submitting and waiting hold the GIL in that package, so nothing here waits: an eventfd tells the loop that completions
are there, and each turn of the loop submits some.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import os
import select
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar

from kvtier.errors import ResourceError, UsageError
from kvtier.eventfd import EventFD
from kvtier_fs.io.contract import (
    COMPLETIONS_PER_TURN,
    Completions,
    IOEngine,
    IOKind,
    IORequest,
)
from kvtier_fs.io.turns import Turns
from kvtier_fs.io.vectors import Vector
from kvtier_fs.syscalls import add_ring_workers

_SUBMIT_BYTES = 4 << 20
_PROBE_SECONDS = 1.0
_RETRY_SECONDS = 0.001


class _Ring:
    """A ring and the eventfd that announces its completions."""

    def __init__(self, api: Any, ring: Any, event: EventFD) -> None:
        self.api = api
        self.ring = ring
        self.event = event
        self.cqe = api.Cqe()
        self.vectors: list[Vector] = []

    @staticmethod
    def open(depth: int) -> _Ring:
        """Create a ring. Raises ResourceError, saying why, where the kernel or the package does not offer one."""
        try:
            api: Any = importlib.import_module("liburing")
        except (ImportError, OSError) as error:
            raise ResourceError(f"the liburing package does not import ({error})") from error
        ring = api.Ring()
        try:
            api.io_uring_queue_init(depth, ring)
        except OSError as error:
            raise ResourceError(f"the kernel offers no io_uring ({error.strerror})") from error
        try:
            event = EventFD()
        except OSError as error:
            api.io_uring_queue_exit(ring)
            raise ResourceError(f"the kernel offers no eventfd ({error.strerror})") from error
        opened = _Ring(api, ring, event)
        try:
            opened.vectors = [Vector(api.Iovec) for _ in range(depth)]
            add_ring_workers(ring.ring_fd, depth)
            api.io_uring_register_eventfd(ring, event.fd)
        except OSError as error:
            opened.close()
            raise ResourceError(f"io_uring refuses an eventfd ({error.strerror})") from error
        except ResourceError:
            opened.close()
            raise
        return opened

    def prepare(self, request: IORequest, number: int) -> Vector | None:
        """Put a request into the ring. Returns the vector to give back when it ends; None if the ring is full."""
        entry = self.api.io_uring_get_sqe(self.ring)
        if entry is None:
            return None
        vector = self.vectors.pop() if self.vectors else Vector(self.api.Iovec)
        vector.point(request.buffers, request.places)
        if request.kind is IOKind.READ:
            self.api.io_uring_prep_readv(entry, request.fd, vector.iovec, request.offset)
        else:
            self.api.io_uring_prep_writev(entry, request.fd, vector.iovec, request.offset)
        entry.user_data = number
        return vector

    def submit(self) -> bool:
        """Tell the kernel. False if it wants to be asked again later."""
        try:
            self.api.io_uring_submit(self.ring)
        except OSError:
            return False
        return True

    def ready(self) -> int:
        return int(self.api.io_uring_cq_ready(self.ring))

    def take(self) -> tuple[int, int]:
        """The next completion: its number and its result. Only when `ready` says there is one."""
        self.api.io_uring_peek_cqe(self.ring, self.cqe)
        entry = self.cqe[0]
        number = int(entry.user_data)
        try:
            result = int(entry.res)
        except OSError as error:
            result = -(error.errno or 1)
        self.api.io_uring_cq_advance(self.ring, 1)
        return number, result

    def close(self) -> None:
        self.api.io_uring_queue_exit(self.ring)
        self.event.close()


def probe_uring() -> str:
    """Try a ring out: create it, write and read a page through it. Returns why it does not work; empty if it does.

    Uses an anonymous file in memory, so a frozen disk cannot hold the probe up. Blocks for up to a second.
    """
    try:
        ring = _Ring.open(4)
    except ResourceError as error:
        return str(error)
    try:
        fd = os.memfd_create("kvtier-probe", os.MFD_CLOEXEC)
    except OSError as error:
        ring.close()
        return f"there is no file to try io_uring out on ({error.strerror})"
    try:
        written, read = memoryview(bytearray(b"kvtier" * 64)), memoryview(bytearray(384))
        for kind, buffer in ((IOKind.WRITE, written), (IOKind.READ, read)):
            kept = ring.prepare(IORequest(kind, fd, 0, [buffer], _ignore), 1)
            if kept is None or not ring.submit():
                return "io_uring takes no request"
            _wait_readable(ring.event.fd)
            ring.event.clear()
            if not ring.ready() or ring.take() != (1, len(buffer)):
                return "io_uring does not complete a request"
        return "" if read == written else "io_uring moves wrong bytes"
    finally:
        os.close(fd)
        ring.close()


def _wait_readable(fd: int) -> None:
    """Wait for an eventfd. Not with `select`, which knows no descriptors from 1024 on."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.poll(_PROBE_SECONDS * 1000)


def _ignore(request: IORequest, result: int) -> None:
    """The probe looks at the ring itself."""


class UringEngine(IOEngine):
    """Up to `depth` requests in the kernel at once.

    A ring is shared memory between the kernel and the process that made it: in a forked child every call raises
    UsageError. While requests are in the kernel the engine keeps itself and their buffers alive, even if everybody
    has forgotten it and its loop is gone: what the kernel yet writes, it writes into memory that is nobody else's.
    """

    name: ClassVar[str] = "io_uring"

    def __init__(self, loop: asyncio.AbstractEventLoop, depth: int, turns: Turns | None = None) -> None:
        self._loop = loop
        self._turns = turns or Turns()
        self._depth = depth
        self._ring: _Ring | None = None
        self._queue: deque[IORequest] = deque()
        self._completions = Completions(loop, self._turns, self._go_on_or_rest)
        self._kernel: dict[int, tuple[IORequest, Vector]] = {}
        self._next = 0
        self._pid = 0
        self._kept = False
        self._unsubmitted = False
        self._pump_called = False
        self._reap_called = False
        self._idle = asyncio.Event()
        self._idle.set()

    def open(self) -> None:
        """Create the ring and watch it. Raises ResourceError."""
        ring = _Ring.open(self._depth)
        try:
            self._loop.add_reader(ring.event.fd, self._on_event)
        except OSError as error:
            ring.close()
            raise ResourceError(f"the event loop cannot watch a ring ({error.strerror})") from error
        self._ring, self._pid = ring, os.getpid()

    def _check_process(self) -> None:
        if self._pid not in (0, os.getpid()):
            raise UsageError(
                f"the ring belongs to process {self._pid}, and this is process {os.getpid()}, forked from it: "
                f"open a tier of its own after the fork"
            )

    @property
    def in_flight(self) -> int:
        return len(self._queue) + len(self._kernel) + len(self._completions)

    def submit(self, requests: Sequence[IORequest]) -> None:
        self._check_process()
        self._queue.extend(requests)
        if self._queue:
            self._idle.clear()
            if not self._pump_called:
                self._pump()

    def _call_pump(self) -> None:
        if not self._pump_called:
            self._pump_called = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Hand queued requests to the kernel, for a while."""
        self._pump_called = False
        self._check_process()
        ring = self._ring
        if ring is None:
            return
        until = time.perf_counter() + self._turns.seconds
        while self._unsubmitted or (self._queue and len(self._kernel) < self._depth):
            self._fill(ring)
            self._keep(bool(self._kernel))
            self._unsubmitted = not ring.submit()
            if self._unsubmitted:
                self._loop.call_later(_RETRY_SECONDS, self._call_pump)
                return
            if time.perf_counter() >= until:
                if self._queue and len(self._kernel) < self._depth:
                    self._call_pump()
                return

    def _fill(self, ring: _Ring) -> None:
        batch_bytes = 0
        while self._queue and len(self._kernel) < self._depth and batch_bytes < _SUBMIT_BYTES:
            request = self._queue[0]
            kept = ring.prepare(request, self._next)
            if kept is None:
                return
            self._queue.popleft()
            self._kernel[self._next] = (request, kept)
            self._next += 1
            batch_bytes += request.length

    def _keep(self, needed: bool) -> None:
        """Hold on to this engine while the kernel has requests of it, whoever else does or does not."""
        if needed and not self._kept:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        elif self._kept and not needed:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(self))
        self._kept = needed

    def _on_event(self) -> None:
        self._check_process()
        if self._ring is not None:
            self._ring.event.clear()
            self._reap()

    def _call_reap(self) -> None:
        if not self._reap_called:
            self._reap_called = True
            self._loop.call_soon(self._later_reap)

    def _later_reap(self) -> None:
        self._reap_called = False
        self._reap()

    def _reap(self) -> None:
        self._check_process()
        ring = self._ring
        if ring is None:
            return
        ended: list[tuple[IORequest, int]] = []
        for _ in range(min(ring.ready(), COMPLETIONS_PER_TURN)):
            number, result = ring.take()
            request, vector = self._kernel.pop(number)
            ring.vectors.append(vector)
            ended.append((request, result))
        self._keep(bool(self._kernel))
        if ring.ready():
            self._call_reap()
        if self._queue and not self._pump_called:
            self._pump()  # first of all: the disk works while what came is looked at
        self._completions.tell(ended)

    def _go_on_or_rest(self) -> None:
        if self.after_turn is not None:
            self.after_turn()
        if self._queue and not self._pump_called:
            self._pump()
        elif not self.in_flight:
            self._idle.set()

    async def close(self, timeout_seconds: float) -> int:
        self._check_process()
        if self.in_flight:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout_seconds)
        if self.in_flight:
            return self.in_flight
        if self._ring is not None:
            self._loop.remove_reader(self._ring.event.fd)
            self._ring.close()
            self._ring = None
        return 0
