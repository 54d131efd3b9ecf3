"""Between an engine's rows and the disk: every block passes through aligned memory of kvtier.

The engine may give its rows to other blocks, reset or unmap them while a disk is stuck. So no I/O touches them.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import compress, islice
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.aio.shielded_wait import shielded_wait
from kvtier.errors import ConfigError, IntegrityError
from kvtier.tier_api.checksum import CHECKSUM_BYTES, checksum
from kvtier.tier_api.contract import LoadStore, Opened, TierContext
from kvtier.types.arrays import IntArray
from kvtier.types.jobs import CANCELLED, JobResult, TransferJob
from kvtier.types.keys import FS, JobId, Medium


class EngineRows:
    """The engine's rows: a buffer of shape (chunks, bytes of a row). Touched row by row, and only by a `CopyPermit`.

    Raises ConfigError for a buffer of another form. After `release` nothing here refers to the buffer any more.
    """

    def __init__(self, view: memoryview) -> None:
        rows = np.asarray(view)
        if rows.ndim != 2 or not rows.flags.c_contiguous or not rows.flags.writeable or not rows.size:
            raise ConfigError(
                f"vLLM's CPU tier is a buffer of shape {rows.shape}; KVTierFs needs writable rows without gaps"
            )
        self.array: npt.NDArray[np.uint8] = rows.view(np.uint8)
        self.num_rows, self.row_bytes = (int(length) for length in self.array.shape)

    def release(self) -> None:
        """Drop the reference to the buffer. Every permit must be shut."""
        self.array = np.empty((0, self.row_bytes), dtype=np.uint8)


class CopyPermit:
    """Permission to copy from or to the engine's rows for one job. `with permit as granted:` surrounds each row's copy.

    Once `shut` has returned no row is touched.
    """

    __slots__ = ("_lock", "_open")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = True

    def __enter__(self) -> bool:
        self._lock.acquire()
        return self._open

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def shut(self) -> None:
        """From now on no row is touched; waits for the row that is being copied, if one is."""
        with self._lock:
            self._open = False


CopyPermits = dict[JobId, CopyPermit]
"""The permits of the jobs in flight. The engine's thread adds, shuts and removes them; copies look theirs up."""


class StagingRows:
    """`count` rows of `row_bytes` bytes in memory of kvtier, page-aligned, one after another. For the loop's thread.

    The row returned last is taken first: rows that are not needed stay unpopulated, the others stay in the CPU caches.
    """

    def __init__(self, count: int, row_bytes: int) -> None:
        memory = mmap.mmap(-1, count * row_bytes)
        memory.madvise(mmap.MADV_DONTDUMP)  # copies of rows have no place in a core dump
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.num_rows, self.row_bytes = count, row_bytes
        self.view: npt.NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8).reshape(count, row_bytes)
        self._checksums = [bytes(CHECKSUM_BYTES)] * count
        self._free = list(range(count))

    @contextmanager
    def taken(self, count: int) -> Iterator[list[int]]:
        """`count` rows for as long as I/O touches them. Raises IntegrityError if there are too few: jobs are started
        only when there is room."""
        start = len(self._free) - count
        if start < 0:
            raise IntegrityError(f"{count} staging rows were wanted, {len(self._free)} are free")
        rows = self._free[start:]
        del self._free[start:]
        try:
            yield rows
        finally:
            self._free += rows

    def checksum(self, row: int) -> bytes:
        """The checksum that travels with a row."""
        return self._checksums[row]

    def set_checksum(self, row: int, digest: bytes) -> None:
        self._checksums[row] = digest

    def stamp(self, worker: int, rows: IntArray, generations: IntArray) -> None:
        """No worker writes here."""

    def stamped(self, rows: IntArray, generations: IntArray) -> npt.NDArray[np.bool_]:
        """No worker writes here, so every row counts as stamped; its checksum is verified instead."""
        return np.ones(len(rows), dtype=np.bool_)

    def end_use(self, worker: int, rows: IntArray) -> None:
        """No worker uses these rows."""

    def uses_ended(self, worker: int, rows: IntArray) -> IntArray:
        """No worker uses these rows."""
        return np.zeros(len(rows), dtype=np.int64)


class StagedTier(LoadStore):
    """A backend behind staging rows: its jobs name rows of the engine, the backend sees those of its context only.

    A row is sealed where it is copied: its checksum is taken of the very bytes that go to the disk.
    """

    medium: ClassVar[Medium] = FS

    def __init__(self, backend: LoadStore, engine: EngineRows, threads: DaemonPool) -> None:
        self.options = backend.options
        self.backend = backend
        self.permits: CopyPermits = {}
        self.counters: object = getattr(backend, "counters", None)
        self._engine = engine
        self._threads = threads
        self._staging: StagingRows

    async def open(self, context: TierContext) -> Opened:
        """Open the backend; blocks pass through the rows of the context."""
        assert isinstance(context.rows, StagingRows)
        self._staging = context.rows
        return await self.backend.open(context)

    async def store(self, job: TransferJob) -> JobResult:
        """Copy the engine's rows, then store the copies. CANCELLED where the job was given up before they were made."""
        with self._staging.taken(job.num_blocks) as rows:
            if not await shielded_wait(self._threads.run(self._fill, self.permits[job.job_id], _chunks(job), rows)):
                return JobResult.uniform(job, CANCELLED)
            return await self.backend.store(_restaged(job, rows))

    async def load(self, job: TransferJob) -> JobResult:
        """Load into staging rows, then copy what was verified. CANCELLED where the job was given up before that."""
        with self._staging.taken(job.num_blocks) as rows:
            result = await self.backend.load(_restaged(job, rows))
            good = [outcome.ok for group in result.outcomes for outcome in group]
            permit = self.permits[job.job_id]
            if await shielded_wait(self._threads.run(self._empty, permit, _chunks(job), rows, good)):
                return result
            outcomes = tuple(tuple(CANCELLED if o.ok else o for o in group) for group in result.outcomes)
            return replace(result, outcomes=outcomes, bytes_moved=0)

    async def close(self) -> None:
        """Close the backend."""
        await self.backend.close()

    def _fill(self, permit: CopyPermit, chunks: Sequence[int], rows: Sequence[int]) -> bool:
        """Copy and seal; what a staging row has beyond the engine's is zero, never an earlier block's."""
        used = self._engine.row_bytes
        for chunk, row in zip(chunks, rows, strict=True):
            target = self._staging.view[row]
            with permit as granted:
                if not granted:
                    return False
                np.copyto(target[:used], self._engine.array[chunk])
            target[used:] = 0
            self._staging.set_checksum(row, checksum(target.data))
        return True

    def _empty(self, permit: CopyPermit, chunks: Sequence[int], rows: Sequence[int], good: Sequence[bool]) -> bool:
        used = self._engine.row_bytes
        for chunk, row in compress(zip(chunks, rows, strict=True), good):
            with permit as granted:
                if not granted:
                    return False
                np.copyto(self._engine.array[chunk], self._staging.view[row, :used])
        return True


def _chunks(job: TransferJob) -> list[int]:
    return [chunk for group in job.row_groups for chunk in group.rows]


def _restaged(job: TransferJob, rows: Sequence[int]) -> TransferJob:
    """The job with staging rows in place of the engine's."""
    left = iter(rows)
    groups = tuple(replace(group, rows=list(islice(left, len(group.keys)))) for group in job.row_groups)
    return replace(job, groups=groups)
