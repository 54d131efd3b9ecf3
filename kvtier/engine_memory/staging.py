"""Between an engine's memory and the tier: every block passes through aligned memory of kvtier.

The engine may give a block's place to another block, reset or unmap its memory while a disk is stuck. So no I/O touches
it.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import compress, islice

import numpy as np
import numpy.typing as npt

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.aio.shielded_wait import shielded_wait
from kvtier.engine_memory.memory import EngineMemory
from kvtier.errors import IntegrityError
from kvtier.tier_api.checksum import CHECKSUM_BYTES, checksum
from kvtier.tier_api.contract import AnswersLookups, LoadStore, LookupResult, Opened, TierContext
from kvtier.types.arrays import IntArray
from kvtier.types.geometry import Geometry
from kvtier.types.jobs import CANCELLED, JobResult, TransferJob
from kvtier.types.keys import GroupIndex, JobId, OffloadKey


class CopyPermit:
    """Permission to copy from or to the engine's memory for one job: `with permit as granted:` around each copy.

    Once `shut` has returned nothing of it is touched.
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

    @property
    def given_up(self) -> bool:
        """True once it was shut: the engine does not wait for the job any more."""
        return not self._open

    def shut(self) -> None:
        """From now on nothing is touched; waits for the block that is being copied, if one is."""
        with self._lock:
            self._open = False


Place = tuple[GroupIndex, int]
"""A block's group, and where it is in the engine's memory."""
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
    """A backend behind staging rows: its jobs name places in the engine's memory, the backend sees rows of its context.

    A block is sealed where it is copied: its checksum is taken of the very bytes that go to the tier.
    """

    def __init__(self, backend: LoadStore, memory: EngineMemory, threads: DaemonPool) -> None:
        self.options = backend.options
        self.backend = backend
        self.permits: CopyPermits = {}
        self.counters: object = getattr(backend, "counters", None)
        self.LOOK_UP_BEFORE_STORE = backend.LOOK_UP_BEFORE_STORE  # type: ignore[misc]  # this object's own
        self._memory = memory
        self._threads = threads
        self._staging: StagingRows
        self._geometry: Geometry

    async def open(self, context: TierContext) -> Opened:
        """Open the backend; blocks pass through the rows of the context."""
        assert isinstance(context.rows, StagingRows)
        self._staging, self._geometry = context.rows, context.geometry
        return await self.backend.open(context)

    async def lookup(self, keys: Sequence[OffloadKey]) -> Sequence[LookupResult]:
        """What a shared tier answers."""
        assert isinstance(self.backend, AnswersLookups)
        return await self.backend.lookup(keys)

    async def store(self, job: TransferJob) -> JobResult:
        """Copy the engine's blocks, then store the copies. CANCELLED where the job was given up before that."""
        with self._staging.taken(job.num_blocks) as rows:
            if not await shielded_wait(self._threads.run(self._fill, self.permits[job.job_id], _places(job), rows)):
                return JobResult.uniform(job, CANCELLED)
            return await self.backend.store(_restaged(job, rows))

    async def load(self, job: TransferJob) -> JobResult:
        """Load into staging rows, then copy what was verified. CANCELLED where the job was given up before that."""
        permit = self.permits[job.job_id]
        if permit.given_up:  # while it waited
            return JobResult.uniform(job, CANCELLED)
        with self._staging.taken(job.num_blocks) as rows:
            result = await self.backend.load(_restaged(job, rows))
            good = [outcome.ok for group in result.outcomes for outcome in group]
            if await shielded_wait(self._threads.run(self._empty, permit, _places(job), rows, good)):
                return result
            outcomes = tuple(tuple(CANCELLED if o.ok else o for o in group) for group in result.outcomes)
            return replace(result, outcomes=outcomes, bytes_moved=0)

    async def close(self) -> None:
        """Close the backend."""
        await self.backend.close()

    def _fill(self, permit: CopyPermit, places: Sequence[Place], rows: Sequence[int]) -> bool:
        """Copy and seal; what a staging row has beyond the engine's block is zero, never an earlier block's."""
        for (group, place), row in zip(places, rows, strict=True):
            target = self._staging.view[row, : self._geometry.aligned_bytes(group)]
            start = 0
            with permit as granted:
                if not granted:
                    return False
                for piece in self._memory.pieces(group, place):
                    np.copyto(target[start : start + piece.size].reshape(piece.shape), piece)
                    start += piece.size
            target[start:] = 0
            self._staging.set_checksum(row, checksum(target.data))
        return True

    def _empty(self, permit: CopyPermit, places: Sequence[Place], rows: Sequence[int], good: Sequence[bool]) -> bool:
        for (group, place), row in compress(zip(places, rows, strict=True), good):
            source = self._staging.view[row]
            start = 0
            with permit as granted:
                if not granted:
                    return False
                for piece in self._memory.pieces(group, place):
                    np.copyto(piece, source[start : start + piece.size].reshape(piece.shape))
                    start += piece.size
        return True


def _places(job: TransferJob) -> list[Place]:
    return [(group.group, place) for group in job.row_groups for place in group.rows]


def _restaged(job: TransferJob, rows: Sequence[int]) -> TransferJob:
    """The job with staging rows in place of the engine's memory."""
    left = iter(rows)
    groups = tuple(replace(group, rows=list(islice(left, len(group.keys)))) for group in job.row_groups)
    return replace(job, groups=groups)
