"""The engine for Linux with io_uring, on the library in the `liburing` package: one ring for each root.

Nothing here waits: an eventfd wakes the event loop when completions are there, and each turn of it submits some.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import os
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar

from kvtier.aio.eventfd import EventFD
from kvtier.aio.loop_budget import TimeBudget
from kvtier.aio.readable import wait_readable
from kvtier.errors import ResourceError
from kvtier_fs.io.contract import IOKind, IORequest, places_of
from kvtier_fs.io.loop_engine import Ended, LoopEngine

_SUBMIT_BYTES = 4 << 20
_PROBE_SECONDS = 1.0
_CHILD_SECONDS = 10.0
_RETRY_SECONDS = 0.001

_ENTRY = struct.Struct("=BBHiQQIIQ24x")
"""The kernel's `struct io_uring_sqe`: operation, two more, file, offset, address, length, one more, number."""
_COMPLETION = struct.Struct("=Qi4x")
"""The kernel's `struct io_uring_cqe`: number, result."""
_NOP, _READV, _WRITEV = 0, 1, 2
_NO_NUMBER = (1 << 64) - 1
"""The number of an entry that was made to do nothing."""
_POINTER, _INT, _UINT = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint
_CALLS: dict[str, tuple[Any, ...]] = {
    "queue_init": (_INT, _UINT, _POINTER, _UINT),
    "queue_exit": (None, _POINTER),
    "register_eventfd": (_INT, _POINTER, _INT),
    "register_iowq_max_workers": (_INT, _POINTER, _POINTER),
    "get_sqe": (_POINTER, _POINTER),
    "submit": (_INT, _POINTER),
    "cq_ready": (_UINT, _POINTER),
    "cq_advance": (None, _POINTER, _UINT),
}
"""The functions of liburing that are used: what each returns, then its arguments."""


class _RingMemory(ctypes.Structure):
    """`struct io_uring` of liburing's header, whose fields programs read: where entries and completions lie."""

    _fields_ = [
        *(("of_entries", _POINTER * 7), ("entries", _POINTER), ("of_entries_too", _POINTER * 3)),
        *(("entries_mask", _UINT), ("entries_count", _UINT), ("no_entries", _POINTER)),
        *(("of_completions", _POINTER * 6), ("completions", _POINTER), ("of_completions_too", _POINTER * 2)),
        *(("completions_mask", _UINT), ("completions_count", _UINT), ("no_completions", _POINTER)),
        ("of_ring", _POINTER * 100),  # more than there is: 3
    ]


def _library_path() -> str:
    """The path of the library in the package. Raises ResourceError without a package; imports nothing."""
    found = importlib.util.find_spec("liburing")
    if found is None or not found.submodule_search_locations:
        raise ResourceError("the liburing package is not installed")
    return os.path.join(found.submodule_search_locations[0], "liburing.so")


@cache
def _liburing() -> SimpleNamespace:
    """The C functions of liburing, which the package's library exports. Raises ResourceError if it does not.

    The package's own Python calls take an `Iovec`, which keeps its buffers for ever and about 190 bytes a request
    (2026.3.30: it has no traverse and no release). Like those, these hold the GIL: they are shorter than taking it.
    """
    try:
        library = ctypes.PyDLL(_library_path())
        calls = {name: getattr(library, f"io_uring_{name}") for name in _CALLS}
    except (OSError, AttributeError) as error:
        raise ResourceError(f"the liburing package has no C functions ({error})") from error
    for name, (result, *arguments) in _CALLS.items():
        calls[name].restype, calls[name].argtypes = result, arguments
    return SimpleNamespace(**calls)


class _Ring:
    """A ring that signals its completions through an eventfd. Entries and completions are in memory of the kernel."""

    def __init__(self, depth: int, event: EventFD) -> None:
        """Raises ResourceError, saying why, where the kernel or the package offers no ring."""
        self._calls = calls = _liburing()
        self._memory = memory = _RingMemory()
        self._at = at = ctypes.addressof(memory)
        if code := calls.queue_init(depth, at, 0):
            raise ResourceError(f"the kernel offers no io_uring ({os.strerror(-code)})")
        with ExitStack() as undo:
            undo.callback(self.close)
            if code := calls.register_eventfd(at, event.fd):
                raise ResourceError(f"io_uring refuses an eventfd ({os.strerror(-code)})")
            if not depth <= memory.entries_count == memory.entries_mask + 1 <= memory.completions_mask + 1:
                raise ResourceError("the liburing package lays its rings out in an unknown way")
            self._entries = _memory(memory.entries, memory.entries_count * _ENTRY.size)
            self._completions = _memory(memory.completions, memory.completions_count * _COMPLETION.size)
            self._next_completion = 0
            self._prepared = 0
            self._add_workers(depth)
            undo.pop_all()

    def _add_workers(self, count: int) -> None:
        """Allow `count` more kernel threads for requests that have to wait, beside those of this thread's other rings.

        All rings of a thread share these threads, a few at first: requests stuck on one disk would take all of them,
        and those for a healthy disk would wait for ever. Nothing happens where the kernel cannot do it (before 5.15).
        """
        limits = (_UINT * 2)(0, 0)  # zeros: only read what they are
        at = ctypes.addressof(limits)
        if not self._calls.register_iowq_max_workers(self._at, at):
            limits[0], limits[1] = limits[0] + count, 0
            self._calls.register_iowq_max_workers(self._at, at)

    def prepare(self, request: IORequest, number: int) -> bool:
        """Put a request into the ring. False if the ring is full. If it raises, the ring has nothing of the request.

        The kernel reads `request.places`, so the request must live until it ends.
        """
        places = request.places = request.places or places_of(request.buffers)
        address, words = places.buffer_info()
        operation = _READV if request.kind is IOKind.READ else _WRITEV
        entry = self._calls.get_sqe(self._at)
        if entry is None:
            return False
        self._prepared += 1
        entries, at = self._entries, entry - self._memory.entries
        try:
            _ENTRY.pack_into(entries, at, operation, 0, 0, request.fd, request.offset, address, words >> 1, 0, number)
        except BaseException:
            _ENTRY.pack_into(entries, at, _NOP, 0, 0, -1, 0, 0, 0, 0, _NO_NUMBER)
            raise
        return True

    def submit(self) -> bool:
        """Hand what was prepared to the kernel. False if it has not taken all: that is to be tried again later.

        It stops after a request that it cannot begin, and where it has no memory for one.
        """
        self._prepared -= max(0, self._calls.submit(self._at))
        return not self._prepared

    def ended(self, most: int) -> list[tuple[int, int]]:
        """Number and result of requests that ended, again and again until `advance` is called."""
        first, mask, completions = self._next_completion, self._memory.completions_mask, self._completions
        numbers = range(first, first + min(most, self._calls.cq_ready(self._at)))
        read, size = _COMPLETION.unpack_from, _COMPLETION.size
        return [read(completions, (number & mask) * size) for number in numbers]

    def advance(self, count: int) -> None:
        """Give the places of the first `count` completions back to the kernel."""
        self._next_completion += count
        self._calls.cq_advance(self._at, count)

    def close(self) -> None:
        """Unmap the ring's memory. Nothing else may be called afterwards."""
        calls = self._calls
        del self._calls
        calls.queue_exit(self._at)


def _memory(at: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(at)).cast("B")


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
            opened.callback((ring := _Ring(4, event)).close)
        except OSError as error:
            return f"there is no file to try io_uring out on ({error.strerror})"
        except ResourceError as error:
            return str(error)
        return _try_out(ring, event, fd)


def _try_out(ring: _Ring, event: EventFD, fd: int) -> str:
    written, read = memoryview(bytearray(b"kvtier" * 64)), memoryview(bytearray(384))
    for kind, buffer in ((IOKind.WRITE, written), (IOKind.READ, read)):
        request = IORequest(kind, fd, 0, [buffer], lambda request, result: None)
        if not ring.prepare(request, 1) or not ring.submit():
            return "io_uring takes no request"
        wait_readable(event.fd, _PROBE_SECONDS)
        event.clear()
        ended = ring.ended(1)
        ring.advance(len(ended))
        if ended != [(1, len(buffer))]:
            return "io_uring does not complete a request"
    return "" if read == written else "io_uring moves wrong bytes"


_TRIAL = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).io_uring_queue_init(1, ctypes.create_string_buffer(1024), 0)"
"""A program that makes a ring with the library it is given."""


@cache
def _unsafe_package() -> str:
    """Why using the package would kill this process; empty if it would not.

    The wheels of liburing 2026.3 contain AVX-512 instructions (`vmovups zmm`) without a check of the processor: on one
    without them the process dies by SIGILL. So there a child process tries first.
    """
    if _has_avx512():
        return ""
    try:
        tried = subprocess.run(
            [sys.executable or "python3", "-I", "-c", _TRIAL, _library_path()],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_CHILD_SECONDS,
            check=False,
        )
    except ResourceError as error:
        return str(error)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return f"the liburing package could not be tried in a process of its own ({type(error).__name__})"
    return "the liburing package does not run on this processor" if tried.returncode < 0 else ""


def _has_avx512() -> bool:
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            return any(line.startswith("flags") and " avx512f " in f"{line.rstrip()} " for line in file)
    except OSError:
        return False


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
        self._kernel: dict[int, IORequest] = {}
        self._next = 0
        self._kept = False
        self._unsubmitted = False
        self._pump_called = False

    def open(self) -> None:
        super().open()
        assert self._event is not None
        try:
            self._ring = _Ring(self.depth, self._event)
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
            self._loop.call_soon(self._on_pump_turn)

    def _on_pump_turn(self) -> None:
        self._check_process()
        self._pump_called = False
        try:
            self._pump()
        except Exception:
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
            if not ring.prepare(request, number):
                return
            self._next += 1
            self._kernel[number] = self._queue.popleft()
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
            seen = ring.ended(most)
            for number, result in seen:
                request = self._kernel.pop(number, None)
                if request is not None:
                    ended.append((request, result))
            ring.advance(len(seen))
            self._keep(bool(self._kernel))
        return ended

    def _take_queued(self) -> list[IORequest]:
        taken, self._queue = list(self._queue), deque()
        if self._ring is not None and self._kernel:
            self._ring.submit()  # what the ring was given already ends by itself
        return taken

    async def _release(self) -> None:
        if self._ring is not None:
            self._ring.close()
            self._ring = None
