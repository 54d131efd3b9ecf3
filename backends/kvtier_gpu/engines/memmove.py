"""Copies in host memory, on a few threads of its own.

A compiled loop over the extents of a share does it in one call, where kvtier was installed with it. Else one memmove
for each extent is the fastest, but hands the GIL back and asks for it again each time. Next to a thread that is busy in
Python each request waits a whole switch interval (5 ms), which makes small extents a thousand times slower. So while
calls are seen to wait, and for extents that are too small to be worth a call, pieces are moved in batches: one numpy
gather and one numpy scatter over thousands of equal pieces, each one GIL-free call. Long extents always go by memmove:
one call is worth its wait there.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from kvtier.errors import UsageError
from kvtier.jobs import IntArray
from kvtier_gpu.engines.contract import CopyEngine, Direction, Done
from kvtier_gpu.engines.scattered import CopyScattered
from kvtier_gpu.plan import Batch, CopyPlan, Extents, Span, batches, cut, extents
from kvtier_gpu.surfaces import Surface

CALL_BYTES = 48 << 10
"""Extents from here on are worth a call each while nobody else wants the GIL."""
MEMMOVE_BYTES = 512 << 10
"""Extents from here on go by memmove in any case: slower pieces would cost more than the hand-over of the GIL."""
WAIT_SECONDS = 1e-3
WAITS = 3
"""So many calls of one share that took WAIT_SECONDS longer than copying can take: somebody keeps the GIL. Fewer may be
the scheduler's doing."""
AVOID_SECONDS = 0.25
"""How long calls are then avoided before they are tried again."""
SLOWEST_BYTES_PER_SECOND = 256 << 20
PIECE_BYTES = 8 << 10
BATCH_BYTES = 4 << 20
MIN_PIECES = 512
"""numpy keeps the GIL while it indexes 500 elements or fewer; more pieces than that and the loop runs meanwhile."""
SHARE_BYTES_MIN = 256 << 10
SHARE_BYTES_MAX = 8 << 20

Bytes = npt.NDArray[np.uint8]


def _window(low: int, end: int) -> Bytes:
    """The memory from address `low` to `end` as bytes. Only addresses a plan computed are ever touched."""
    return np.frombuffer(memoryview((ctypes.c_uint8 * (end - low)).from_address(low)), dtype=np.uint8)


def _pieces(memory: Bytes, length: int) -> npt.NDArray[np.void]:
    """Every run of `length` bytes of a buffer, indexed by where it begins."""
    return np.ndarray((memory.size - length + 1,), np.dtype((np.void, length)), buffer=memory, strides=(1,))


def _sides(found: Extents, region: Bytes, direction: Direction) -> tuple[IntArray, IntArray]:
    """The addresses (to, from) of extents."""
    rows = found.region + region.ctypes.data
    return (rows, found.gpu) if direction is Direction.TO_ROWS else (found.gpu, rows)


class _Ticket:
    """Counts a job's shares down and reports once, with the first error."""

    def __init__(self, shares: int, done: Done) -> None:
        self._left = shares
        self._done = done
        self._error: Exception | None = None
        self._lock = threading.Lock()

    def end(self, error: Exception | None) -> None:
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            last = self._left == 0
        if last:
            self._done(self._error)


class MemmoveEngine(CopyEngine):
    """Copies between KV tensors in host memory and the region, on `threads` daemon threads.

    `compiled` is `scattered.load()` or None, for Python's own means.
    """

    def __init__(
        self,
        region: Bytes,
        surfaces: Sequence[Surface],
        threads: int,
        clock: Callable[[], float] = time.perf_counter,
        compiled: CopyScattered | None = None,
    ) -> None:
        self._clock = clock
        self._compiled = compiled
        self._avoid_until = 0.0
        self._surfaces = tuple(surfaces)  # keeps the tensors alive
        self._low = min(surface.address for surface in surfaces)
        self._tensors = _window(self._low, max(surface.end for surface in surfaces))
        self._region: Bytes | None = region
        self._threads = [
            threading.Thread(target=self._serve, name=f"kvtier-copy-{index}", daemon=True) for index in range(threads)
        ]
        self._queue: SimpleQueue[tuple[tuple[Span, ...], Direction, _Ticket] | None] = SimpleQueue()
        self._pid = 0

    def start(self) -> tuple[str, ...]:
        self._pid = os.getpid()
        for thread in self._threads:
            thread.start()
        return ()

    @property
    def mode(self) -> str:
        threads = f"cpu, {len(self._threads)} copy thread{'s' if len(self._threads) > 1 else ''}"
        return f"{threads}, compiled copies" if self._compiled else threads

    def submit(self, plan: CopyPlan, direction: Direction, done: Done) -> None:
        if os.getpid() != self._pid:
            raise UsageError("the GPU tier was opened by another process; open it after the fork")
        share_bytes = min(SHARE_BYTES_MAX, max(SHARE_BYTES_MIN, -(-plan.nbytes // len(self._threads))))
        shares = cut(plan, share_bytes)
        if not shares:
            done(None)
            return
        ticket = _Ticket(len(shares), done)
        for share in shares:
            self._queue.put((share, direction, ticket))

    def stop(self, timeout_seconds: float) -> bool:
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(timeout_seconds)
        ended = not any(thread.is_alive() for thread in self._threads)
        if ended:
            self._region = None
            self._surfaces = ()
        return ended

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            share, direction, ticket = work
            error: Exception | None = None
            try:
                self._copy(share, direction)
            except Exception as failure:  # the thread must live on, and the job must end with an outcome
                error = failure.with_traceback(None)
            ticket.end(error)
            del work, share, ticket, error

    def _copy(self, share: tuple[Span, ...], direction: Direction) -> None:
        region = self._region
        if region is None:
            raise UsageError("the copy engine is stopped")
        for span in share:
            found = extents(span)
            if self._compiled is not None:
                self._compiled(*_sides(found, region, direction), found.lengths)
                continue
            long = found.lengths >= MEMMOVE_BYTES
            self._call_each(found.select(long), region, direction, patient=True)
            found = found.select(~long)
            if self._clock() >= self._avoid_until:
                found = found.select(np.argsort(found.lengths < CALL_BYTES, kind="stable"))
                worth = int(np.count_nonzero(found.lengths >= CALL_BYTES))
                done = self._call_each(found.select(np.arange(worth)), region, direction, patient=False)
                found = found.select(np.arange(done, len(found.lengths)))
            for batch in batches(found, PIECE_BYTES, MIN_PIECES):
                self._gather(batch, region, direction)

    def _gather(self, batch: Batch, region: Bytes, direction: Direction) -> None:
        gpu, rows = _pieces(self._tensors, batch.length), _pieces(region, batch.length)
        step = max(MIN_PIECES, BATCH_BYTES // batch.length)
        for first in range(0, len(batch.gpu), step):
            at_gpu = batch.gpu[first : first + step] - self._low
            at_rows = batch.region[first : first + step]
            if direction is Direction.TO_ROWS:
                rows[at_rows] = gpu[at_gpu]
            else:
                gpu[at_gpu] = rows[at_rows]

    def _call_each(self, found: Extents, region: Bytes, direction: Direction, patient: bool) -> int:
        """Copy extents by a call each. Returns how many: all, or, unless patient, those before calls had to wait."""
        targets, sources = _sides(found, region, direction)
        calls = zip(targets.tolist(), sources.tolist(), found.lengths.tolist(), strict=True)
        waits, clock, memmove = 0, self._clock, ctypes.memmove
        before = clock()
        for number, (target, source, length) in enumerate(calls, start=1):
            memmove(target, source, length)
            after = clock()
            if after - before > WAIT_SECONDS + length / SLOWEST_BYTES_PER_SECOND:
                waits += 1
                if waits == WAITS and not patient:
                    self._avoid_until = after + AVOID_SECONDS
                    return number
            before = after
        return len(found.lengths)
