"""Copies in host memory, on a few threads of its own.

A plan is split into parts for the threads. Where kvtier was installed with its compiled loop, one call copies all
extents of a part without the GIL. Without it pieces of equal length are moved in batches: one numpy gather and scatter
over thousands of pieces, each a single GIL-free call. Long extents go by a memmove each: such a call takes the GIL
again, which beside a thread that is busy in Python waits a switch interval (5 ms), and copying them takes longer.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from kvtier.errors import UsageError
from kvtier.types.arrays import IntArray
from kvtier_gpu.copy_plan import CopyPlan, GatherBatch, GroupPages, batches, extents, rows_of, split
from kvtier_gpu.engines.contract import Bytes, CopyEngine, CopyFailure, Direction, Done, join_failures, sides
from kvtier_gpu.kv_tensors import KVTensor

MEMMOVE_BYTES = 512 << 10
"""Extents from here on go by memmove: batches would cost more than waiting for the GIL."""
PIECE_BYTES = 8 << 10
BATCH_BYTES = 4 << 20
MIN_PIECES = 512
"""numpy keeps the GIL while it indexes 500 elements or fewer; more pieces than that and the loop runs meanwhile."""
PART_BYTES_MIN = 256 << 10
PART_BYTES_MAX = 8 << 20
OWN_BYTES_MAX = 256 << 10
"""Plans up to here are copied in the thread that asks for them: some 50 us at most, without the GIL. Two turns of
threads cost more, and beside a thread that is busy in Python each takes up to a switch interval."""


CopyScattered = Callable[[IntArray, IntArray, IntArray], None]
"""Copy `lengths[i]` bytes to address `to[i]` from address `from[i]`, all in one call without the GIL."""

LIBRARY = Path(__file__).with_name("native_copy.native.so")  # a name that no import machinery takes for a module


_int64 = partial(np.ascontiguousarray, dtype=np.int64)


@cache
def load_compiled() -> CopyScattered | None:
    """The compiled loop; None where there was no compiler when kvtier was installed."""
    try:
        function = ctypes.CDLL(str(LIBRARY)).kvtier_copy_scattered
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    function.restype = None

    def copy(to: IntArray, source: IntArray, lengths: IntArray) -> None:
        if not len(to) == len(source) == len(lengths):
            raise ValueError(f"{len(to)} targets, {len(source)} sources, {len(lengths)} lengths")
        to, source, lengths = map(_int64, (to, source, lengths))
        function(len(to), to.ctypes.data, source.ctypes.data, lengths.ctypes.data)

    return copy


def _copy_each(to: IntArray, source: IntArray, lengths: IntArray) -> None:
    """The same by a memmove for each."""
    for place in zip(to.tolist(), source.tolist(), lengths.tolist(), strict=True):
        ctypes.memmove(*place)


def _window(low: int, end: int) -> Bytes:
    """The memory from address `low` to `end` as bytes. Only addresses a plan computed are ever touched."""
    return np.frombuffer(memoryview((ctypes.c_uint8 * (end - low)).from_address(low)), dtype=np.uint8)


def _pieces(memory: Bytes, length: int) -> npt.NDArray[np.void]:
    """Every run of `length` bytes of a buffer, indexed by where it begins."""
    return np.ndarray((memory.size - length + 1,), np.dtype((np.void, length)), buffer=memory, strides=(1,))


_CopyPart = tuple[tuple[GroupPages, ...], Direction, int, Done]
"""A part of a plan on its way to a thread: pages, direction, distance from row to row."""
_Queue = SimpleQueue[_CopyPart | None]


class _Countdown:
    """Waits for the parts of a plan and completes it, with what failed."""

    def __init__(self, parts: int, done: Done) -> None:
        self._left = parts
        self._done = done
        self._failures: list[CopyFailure] = []
        self._lock = threading.Lock()

    def part_done(self, failure: CopyFailure | None) -> None:
        """Counts a part that has ended. From any thread."""
        with self._lock:
            self._failures += [] if failure is None else [failure]
            self._left -= 1
            last = not self._left
        if last:
            self._done(join_failures(self._failures))


class HostMemoryEngine(CopyEngine):
    """Copies between KV tensors in host memory and the region, on `threads` daemon threads.

    `compiled` is `load_compiled()`; None selects numpy and memmove. With `urgent_lane` urgent copies have a
    thread of their own.
    """

    def __init__(
        self,
        region: Bytes,
        tensors: Sequence[KVTensor],
        threads: int,
        compiled: CopyScattered | None = None,
        urgent_lane: bool = False,
    ) -> None:
        self._compiled = compiled
        self._kv_tensors = tuple(tensors)  # keeps the memory alive
        self._low = min(tensor.address for tensor in tensors)
        self._tensors = _window(self._low, max(tensor.end for tensor in tensors))
        self._region: Bytes | None = region
        self._queue: _Queue = SimpleQueue()
        self._urgent: _Queue | None = SimpleQueue() if urgent_lane else None
        lanes = [(f"kvtier-copy-{index}", self._queue) for index in range(threads)]
        if self._urgent is not None:
            lanes.append(("kvtier-copy-urgent", self._urgent))
        self._threads = [
            threading.Thread(target=self._serve, args=(queue,), name=name, daemon=True) for name, queue in lanes
        ]
        self._num_threads = threads
        self._pid = 0

    def start(self) -> tuple[str, ...]:
        self._pid = os.getpid()
        for thread in self._threads:
            thread.start()
        threads = f"cpu, {self._num_threads} copy thread{'s' if self._num_threads > 1 else ''}"
        self.mode = f"{threads}, compiled copies" if self._compiled else threads
        return ()

    def fence(self) -> None:
        """Nothing: what computes in host memory has written it before it asks for a copy."""

    def submit(self, plan: CopyPlan, direction: Direction, done: Done, urgent: bool = False) -> None:
        if os.getpid() != self._pid:
            raise UsageError("the GPU tier was opened by another process; open it after the fork")
        if self._compiled is not None and plan.nbytes <= OWN_BYTES_MAX:
            self._move(plan.groups, direction, plan.row_bytes, done)
            return
        queue = self._urgent if urgent and self._urgent is not None else self._queue
        part_bytes = min(PART_BYTES_MAX, max(PART_BYTES_MIN, -(-plan.nbytes // self._num_threads)))
        parts = split(plan, part_bytes)
        end = done if len(parts) < 2 else _Countdown(len(parts), done).part_done
        for part in parts:
            queue.put((part, direction, plan.row_bytes, end))
        if not parts:
            done(None)

    def stop(self, timeout_seconds: float) -> bool:
        for _ in range(self._num_threads):
            self._queue.put(None)
        if self._urgent is not None:
            self._urgent.put(None)
        for thread in filter(threading.Thread.is_alive, self._threads):  # those that could be started
            thread.join(timeout_seconds)
        ended = not any(thread.is_alive() for thread in self._threads)
        if ended:
            self._region = None
            self._kv_tensors = ()
        return ended

    def _serve(self, queue: _Queue) -> None:
        for part in iter(queue.get, None):
            self._move(*part)
            del part  # nothing is kept while the thread waits

    def _move(self, part: tuple[GroupPages, ...], direction: Direction, row_bytes: int, done: Done) -> None:
        """Copy a part, and report its end with an outcome."""
        failure = None
        try:
            self._copy(part, direction)
        except Exception as error:
            failure = CopyFailure(error.with_traceback(None), rows_of(part, row_bytes))
        done(failure)

    def _copy(self, part: tuple[GroupPages, ...], direction: Direction) -> None:
        region = self._region
        if region is None:
            raise UsageError("the copy engine is stopped")
        for pages in part:
            found = extents(pages)
            if self._compiled is not None:
                self._compiled(*sides(found, region, direction), found.lengths)
                continue
            long = found.lengths >= MEMMOVE_BYTES
            each = found.select(long)
            _copy_each(*sides(each, region, direction), each.lengths)
            for batch in batches(found.select(~long), PIECE_BYTES, MIN_PIECES):
                self._gather(batch, region, direction)

    def _gather(self, batch: GatherBatch, region: Bytes, direction: Direction) -> None:
        gpu, rows = _pieces(self._tensors, batch.length), _pieces(region, batch.length)
        step = max(MIN_PIECES, BATCH_BYTES // batch.length)
        for first in range(0, len(batch.gpu), step):
            at_gpu = batch.gpu[first : first + step] - self._low
            at_rows = batch.region[first : first + step]
            if direction is Direction.TO_ROWS:
                rows[at_rows] = gpu[at_gpu]
            else:
                gpu[at_gpu] = rows[at_rows]
