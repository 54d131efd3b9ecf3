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
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any, ClassVar

from kvtier.aio.eventfd import EventFD
from kvtier.aio.loop_budget import TimeBudget
from kvtier.errors import ResourceError, UsageError
from kvtier_fs.io.contract import IOKind, IORequest
from kvtier_fs.io.iovec import Vector
from kvtier_fs.io.loop_engine import Ended, LoopEngine
from kvtier_fs.io.syscalls import add_ring_workers

_SUBMIT_BYTES = 4 << 20
_PROBE_SECONDS = 1.0
_CHILD_SECONDS = 10.0
_RETRY_SECONDS = 0.001
_NOTHING = (1 << 64) - 1
"""The number of an entry that was made to do nothing."""


class _Ring:
    """A ring that signals its completions through an eventfd."""

    def __init__(self, api: Any, ring: Any) -> None:
        self.api = api
        self.ring = ring
        self.cqe = api.Cqe()
        self.vectors: list[Vector] = []

    @staticmethod
    def open(depth: int, event: EventFD) -> _Ring:
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
            opened = _Ring(api, ring)
            opened.vectors = [Vector(api.Iovec) for _ in range(depth)]
            add_ring_workers(ring.ring_fd, depth)
            api.io_uring_register_eventfd(ring, event.fd)
        except OSError as error:
            api.io_uring_queue_exit(ring)
            raise ResourceError(f"io_uring refuses an eventfd ({error.strerror})") from error
        except BaseException:
            api.io_uring_queue_exit(ring)
            raise
        return opened

    def vector(self, request: IORequest) -> Vector:
        """A vector that names a request's buffers, to give back when it has ended."""
        vector = self.vectors.pop() if self.vectors else Vector(self.api.Iovec)
        vector.point(request.buffers, request.places)
        return vector

    def prepare(self, request: IORequest, vector: Vector, number: int) -> bool:
        """Put a request into the ring. False if the ring is full. If it raises, the ring has nothing of the request."""
        entry = self.api.io_uring_get_sqe(self.ring)
        if entry is None:
            return False
        try:
            if request.kind is IOKind.READ:
                self.api.io_uring_prep_readv(entry, request.fd, vector.iovec, request.offset)
            else:
                self.api.io_uring_prep_writev(entry, request.fd, vector.iovec, request.offset)
            entry.user_data = number
        except BaseException:
            self.api.io_uring_prep_nop(entry)
            entry.user_data = _NOTHING
            raise
        return True

    def submit(self) -> bool:
        """Tell the kernel. False if it wants to be asked again later."""
        try:
            self.api.io_uring_submit(self.ring)
        except OSError:
            return False
        return True

    def ready(self) -> int:
        return int(self.api.io_uring_cq_ready(self.ring))

    def look(self) -> tuple[int, int]:
        """The next completion: its number and its result. Only when `ready` says there is one. Call `advance` then."""
        self.api.io_uring_peek_cqe(self.ring, self.cqe)
        entry = self.cqe[0]
        number = int(entry.user_data)
        try:
            result = int(entry.res)
        except OSError as error:
            result = -(error.errno or 1)
        return number, result

    def advance(self) -> None:
        """The completion that was looked at is done with."""
        self.api.io_uring_cq_advance(self.ring, 1)

    def close(self) -> None:
        self.api.io_uring_queue_exit(self.ring)


def probe_uring() -> str:
    """Try a ring out: create it, write and read a page through it. Returns why it does not work; empty if it does.

    Uses an anonymous file in memory, so a frozen disk cannot hold the probe up. Blocks for up to a second, and for up
    to `_CHILD_SECONDS` more the first time on a processor without AVX-512.
    """
    reason = _unsafe_package()
    if reason:
        return reason
    with ExitStack() as opened:
        try:
            opened.callback((event := EventFD()).close)
            opened.callback(os.close, fd := os.memfd_create("kvtier-probe", os.MFD_CLOEXEC))
            opened.callback((ring := _Ring.open(4, event)).close)
        except OSError as error:
            return f"there is no file to try io_uring out on ({error.strerror})"
        except ResourceError as error:
            return str(error)
        return _try_out(ring, event, fd)


def _try_out(ring: _Ring, event: EventFD, fd: int) -> str:
    written, read = memoryview(bytearray(b"kvtier" * 64)), memoryview(bytearray(384))
    for kind, buffer in ((IOKind.WRITE, written), (IOKind.READ, read)):
        request = IORequest(kind, fd, 0, [buffer], lambda request, result: None)
        kept = ring.vector(request)
        if not ring.prepare(request, kept, 1) or not ring.submit():
            return "io_uring takes no request"
        _wait_readable(event.fd)
        event.clear()
        if not ring.ready() or ring.look() != (1, len(buffer)):
            return "io_uring does not complete a request"
        ring.advance()
        ring.vectors.append(kept)
    return "" if read == written else "io_uring moves wrong bytes"


@cache
def _unsafe_package() -> str:
    """Why using the package would kill this process; empty if it would not.

    The wheels of liburing 2026.3 contain AVX-512 instructions (`vmovups zmm`) without a check of the processor: on one
    without them the process dies by SIGILL. So there a child process tries first.
    """
    if _has_avx512():
        return ""
    code = f"import sys; sys.path[:] = {sys.path!r}; import liburing as l; r = l.Ring(); l.io_uring_queue_init(1, r)"
    try:
        tried = subprocess.run(
            [sys.executable or "python3", "-I", "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_CHILD_SECONDS,
            check=False,
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return f"the liburing package could not be tried in a process of its own ({type(error).__name__})"
    return "the liburing package does not run on this processor" if tried.returncode < 0 else ""


def _has_avx512() -> bool:
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            return any(line.startswith("flags") and " avx512f " in f"{line.rstrip()} " for line in file)
    except OSError:
        return False


def _wait_readable(fd: int) -> None:
    """Wait for an eventfd. Not with `select`, which knows no descriptors from 1024 on."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.poll(_PROBE_SECONDS * 1000)


class UringEngine(LoopEngine):
    """Up to `depth` requests in the kernel at once.

    The kernel may still write into the buffers of requests that it has. So until these end, the engine keeps itself
    and the buffers alive, even without any other reference and after its loop is gone.
    """

    name: ClassVar[str] = "io_uring"

    def __init__(self, loop: asyncio.AbstractEventLoop, depth: int, budget: TimeBudget | None = None) -> None:
        super().__init__(loop, budget)
        self.depth = depth
        self._ring: _Ring | None = None
        self._queue: deque[IORequest] = deque()
        self._kernel: dict[int, tuple[IORequest, Vector]] = {}
        self._next = 0
        self._kept = False
        self._unsubmitted = False
        self._pump_called = False

    def open(self) -> None:
        super().open()
        assert self._event is not None
        try:
            self._ring = _Ring.open(self.depth, self._event)
        except BaseException:
            self._stop_listening()
            raise

    @property
    def in_flight(self) -> int:
        return len(self._queue) + len(self._kernel) + len(self._completions.ended)

    def _enqueue(self, requests: Sequence[IORequest]) -> None:
        self._queue.extend(requests)
        self._pump()

    def _call_pump(self) -> None:
        if not self._pump_called:
            self._pump_called = True
            self._loop.call_soon(self._called_pump)

    def _called_pump(self) -> None:
        self._pump_called = False
        try:
            self._pump()
        except UsageError:  # in a forked child
            raise
        except BaseException:
            self._fail()
            raise

    def _pump(self) -> None:
        """Hand queued requests to the kernel, for a while; later, if that was called for already."""
        self._check_process()
        ring = self._ring
        if ring is None or self._pump_called:
            return
        until = time.perf_counter() + self._budget.seconds
        while self._unsubmitted or (self._queue and len(self._kernel) < self.depth):
            self._fill(ring)
            self._keep(bool(self._kernel))
            self._unsubmitted = not ring.submit()
            if self._unsubmitted:
                self._loop.call_later(_RETRY_SECONDS, self._call_pump)
                return
            if time.perf_counter() >= until:
                if self._queue and len(self._kernel) < self.depth:
                    self._call_pump()
                return

    def _fill(self, ring: _Ring) -> None:
        batch_bytes = 0
        while self._queue and len(self._kernel) < self.depth and batch_bytes < _SUBMIT_BYTES:
            request, number = self._queue[0], self._next
            kept = ring.vector(request)
            self._kernel[number] = (request, kept)  # before the ring has it: the kernel may use its buffers then
            try:
                self._next += 1
                taken = ring.prepare(request, kept, number)
            except BaseException:
                del self._kernel[number]
                raise
            if not taken:
                del self._kernel[number]
                ring.vectors.append(kept)
                return
            self._queue.popleft()
            batch_bytes += request.length

    def _keep(self, needed: bool) -> None:
        """Keep a reference to this engine while the kernel has requests of it: there may be no other."""
        if needed and not self._kept:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        elif self._kept and not needed:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(self))
        self._kept = needed

    def _take(self, most: int) -> list[Ended]:
        ring, ended = self._ring, list[Ended]()
        if ring is not None:
            for _ in range(min(ring.ready(), most)):
                number, result = ring.look()
                held = self._kernel.pop(number, None)
                ring.advance()
                if held is not None:
                    ring.vectors.append(held[1])
                    ended.append((held[0], result))
            self._keep(bool(self._kernel))
        return ended

    def _forget_queued(self) -> None:
        self._queue.clear()
        if self._ring is not None and self._kernel:
            self._ring.submit()

    async def _release(self) -> None:
        if self._ring is not None:
            self._ring.close()
            self._ring = None
