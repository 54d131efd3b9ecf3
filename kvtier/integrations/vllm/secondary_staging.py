"""Between vLLM's rows and the disk: every block passes through aligned memory of our own, so that no disk, however
stuck, ever touches memory that vLLM may give to another block, reset or unmap.
"""

from __future__ import annotations

import asyncio
import mmap
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvtier.checksum import CHECKSUM_BYTES, checksum
from kvtier.errors import ConfigError, IntegrityError
from kvtier.jobs import (
    CANCELLED,
    BlockOutcome,
    GPURuns,
    GroupTransfer,
    IntArray,
    JobResult,
    TransferJob,
    int_array,
)
from kvtier.keys import FS, JobId, Medium, OffloadKey
from kvtier.loadstore import LoadStore, LookupResult, Opened, TierContext
from kvtier.options import TierOptions
from kvtier.outlast import outlast


class PrimaryRows:
    """vLLM's rows: a buffer of shape (chunks, bytes of a row). Touched row by row, and only through a `Passage`.

    Raises ConfigError for a buffer of another form. After `release` nothing here refers to the buffer any more.
    """

    def __init__(self, view: memoryview) -> None:
        rows = np.asarray(view)
        if rows.ndim != 2 or not rows.flags.c_contiguous or not rows.flags.writeable or not rows.size:
            raise ConfigError(
                f"vLLM's CPU tier is a buffer of shape {rows.shape}; KVTierFs needs writable rows without gaps"
            )
        self._rows: npt.NDArray[np.uint8] | None = rows.view(np.uint8)
        self.num_rows, self.row_bytes = (int(length) for length in self._rows.shape)

    def copy_from(self, chunk: int, target: npt.NDArray[np.uint8]) -> None:
        """vLLM's row into `target`, which may be longer."""
        assert self._rows is not None
        np.copyto(target[: self.row_bytes], self._rows[chunk])

    def copy_to(self, chunk: int, source: npt.NDArray[np.uint8]) -> None:
        """`source` into vLLM's row."""
        assert self._rows is not None
        np.copyto(self._rows[chunk], source[: self.row_bytes])

    def release(self) -> None:
        """Let go of the buffer. Every passage must be shut."""
        self._rows = None


class Passage:
    """Leave to touch vLLM's rows for one job. Once `shut` has returned nobody does, and nobody will."""

    __slots__ = ("_lock", "_open")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = True

    def through(self, copy: Callable[[], None]) -> bool:
        """Copy one row if the passage is open. True when that was done."""
        with self._lock:
            if self._open:
                copy()
            return self._open

    def shut(self) -> None:
        """From now on no row is touched; waits for the row that is being copied, if one is."""
        with self._lock:
            self._open = False


class Passages:
    """The passages of the jobs under way. The scheduler's thread opens and shuts them, copies ask for theirs."""

    def __init__(self) -> None:
        self._of: dict[JobId, Passage] = {}

    def open(self, job_id: JobId) -> None:
        """A job begins."""
        self._of[job_id] = Passage()

    def of(self, job_id: JobId) -> Passage:
        """A job's passage."""
        return self._of[job_id]

    def shut(self, job_id: JobId) -> None:
        """A job was given up, though its I/O may go on."""
        self._of[job_id].shut()

    def remove(self, job_id: JobId) -> None:
        """A job has ended."""
        del self._of[job_id]

    def shut_all(self) -> None:
        """Every job is given up."""
        for passage in self._of.values():
            passage.shut()


class StagingRows:
    """Rows of our own, page-aligned, one after another: `count` of `row_bytes` bytes. Used by the loop's thread.

    The row given back last is taken first: what is not needed is never touched, and what is stays in the caches.
    """

    def __init__(self, count: int, row_bytes: int) -> None:
        self._memory = mmap.mmap(-1, count * row_bytes)
        with suppress(OSError):  # a kernel without huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._view = np.frombuffer(self._memory, dtype=np.uint8).reshape(count, row_bytes)
        self._checksums = [bytes(CHECKSUM_BYTES)] * count
        self._free = list(range(count))

    @property
    def num_rows(self) -> int:
        return int(self._view.shape[0])

    @property
    def row_bytes(self) -> int:
        return int(self._view.shape[1])

    @property
    def view(self) -> npt.NDArray[np.uint8]:
        return self._view

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` rows. Raises IntegrityError if there are too few: jobs are started only when there is room."""
        if count > len(self._free):
            raise IntegrityError(f"{count} staging rows were wanted, {len(self._free)} are free")
        start = len(self._free) - count
        taken = self._free[start:]
        del self._free[start:]
        return taken

    def give_back(self, rows: Sequence[int]) -> None:
        """No I/O touches these rows any more."""
        self._free += rows

    def checksum(self, row: int) -> bytes:
        """The checksum that travels with a row."""
        return self._checksums[row]

    def set_checksum(self, row: int, digest: bytes) -> None:
        self._checksums[row] = digest

    def stamp(self, worker: int, rows: IntArray, generations: IntArray) -> None:
        """No worker writes here."""

    def stamped(self, rows: IntArray, generations: IntArray) -> npt.NDArray[np.bool_]:
        """No worker writes here: every row is as whole as its checksum says."""
        return np.ones(len(rows), dtype=np.bool_)

    def end_use(self, worker: int, rows: IntArray) -> None:
        """No worker uses these rows."""

    def uses_ended(self, worker: int, rows: IntArray) -> IntArray:
        """No worker uses these rows."""
        return np.zeros(len(rows), dtype=np.int64)


class StagedTier(LoadStore):
    """A backend behind staging rows: its jobs name rows of vLLM, the backend sees those of its context only.

    A row is sealed where it is copied: its checksum is taken of the very bytes that go to the disk.
    """

    medium: ClassVar[Medium] = FS
    Options: ClassVar[type[TierOptions]] = TierOptions

    def __init__(self, backend: LoadStore, primary: PrimaryRows, passages: Passages, threads: Executor) -> None:
        self.options = backend.options
        self._backend = backend
        self._primary = primary
        self._passages = passages
        self._threads = threads
        self._staging: StagingRows

    async def open(self, context: TierContext) -> Opened:
        """Open the backend; blocks pass through the rows of the context."""
        assert isinstance(context.rows, StagingRows)
        self._staging = context.rows
        return await self._backend.open(context)

    async def lookup(self, keys: Sequence[OffloadKey]) -> Sequence[LookupResult]:
        """The backend's answer."""
        return await self._backend.lookup(keys)

    async def store(self, job: TransferJob) -> JobResult:
        """Copy vLLM's rows, then store the copies. CANCELLED where the job was given up before they were made."""
        rows = self._staging.take(job.num_blocks)
        try:
            if not await self._on_thread(partial(self._fill, self._passages.of(job.job_id), _chunks(job), rows)):
                return JobResult.uniform(job, CANCELLED)
            return await self._backend.store(_restaged(job, rows))
        finally:
            self._staging.give_back(rows)

    async def load(self, job: TransferJob) -> JobResult:
        """Load into rows of ours, then copy what was verified. CANCELLED where the job was given up before that."""
        rows = self._staging.take(job.num_blocks)
        try:
            result = await self._backend.load(_restaged(job, rows))
            found = [outcome for group in result.outcomes for outcome in group]
            passage = self._passages.of(job.job_id)
            if await self._on_thread(partial(self._empty, passage, _chunks(job), rows, found)):
                return result
            outcomes = tuple(tuple(CANCELLED if o.ok else o for o in group) for group in result.outcomes)
            return replace(result, outcomes=outcomes, bytes_moved=0)
        finally:
            self._staging.give_back(rows)

    async def close(self) -> None:
        """Close the backend."""
        await self._backend.close()

    async def _on_thread(self, copy: Callable[[], bool]) -> bool:
        return await outlast(asyncio.get_running_loop().run_in_executor(self._threads, copy))

    def _fill(self, passage: Passage, chunks: Sequence[int], rows: Sequence[int]) -> bool:
        """Copy and seal; what a staging row has beyond vLLM's is zero, never an earlier block's."""
        used = self._primary.row_bytes
        for chunk, row in zip(chunks, rows, strict=True):
            target = self._staging.view[row]
            if not passage.through(partial(self._primary.copy_from, chunk, target)):
                return False
            target[used:] = 0
            self._staging.set_checksum(row, checksum(target.data))
        return True

    def _empty(
        self, passage: Passage, chunks: Sequence[int], rows: Sequence[int], outcomes: Sequence[BlockOutcome]
    ) -> bool:
        for chunk, row, outcome in zip(chunks, rows, outcomes, strict=True):
            copy = partial(self._primary.copy_to, chunk, self._staging.view[row])
            if outcome.ok and not passage.through(copy):
                return False
        return True


def _chunks(job: TransferJob) -> list[int]:
    chunks: list[int] = []
    for group in job.groups:
        assert not isinstance(group.staging, GPURuns)
        chunks += group.staging.tolist()
    return chunks


def _restaged(job: TransferJob, rows: Sequence[int]) -> TransferJob:
    """The job with our rows in place of vLLM's."""
    groups: list[GroupTransfer] = []
    start = 0
    for group in job.groups:
        end = start + len(group.keys)
        groups.append(replace(group, staging=int_array(rows[start:end])))
        start = end
    return replace(job, groups=tuple(groups))
