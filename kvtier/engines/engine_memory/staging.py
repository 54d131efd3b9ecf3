"""Between an engine's memory and the tier: every block passes through aligned memory of kvtier.

The engine may give a block's place to another block, reset or unmap its memory while a disk is stuck. So no I/O touches
it.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import compress, islice

import numpy as np
import numpy.typing as npt

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.aio.shielded_wait import shielded_wait
from kvtier.engines.engine_memory.memory import Bytes, EngineMemory
from kvtier.errors import IntegrityError
from kvtier.tier.checksum import checksum
from kvtier.tier.contract import AnswersLookups, LoadStore, LookupResult, Opened, TierContext
from kvtier.types.geometry import Geometry
from kvtier.types.jobs import CANCELLED, JobResult, RowGroup, TransferJob
from kvtier.types.keys import GroupIndex, JobId, OffloadKey

MADV_WIPEONFORK = 18
"""Of Linux, and not in Python's `mmap`: a forked child sees zeros, so no page has to be copied for it."""


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


class Frames:
    """Frames for the blocks of a geometry, each with room for a block of the largest group.

    A job has frames of its own, and as many blocks of a group in each as fit. A block takes as many rows as it needs,
    one behind the other, and is named by the first. `blocks[g]` blocks of group g fit into one.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.row_bytes = math.lcm(mmap.PAGESIZE, geometry.alignment)
        groups = range(geometry.num_groups)
        self._block_rows = [-(-geometry.aligned_bytes(group) // self.row_bytes) for group in groups]
        self.num_rows = max(self._block_rows)
        self.num_bytes = self.num_rows * self.row_bytes
        self.blocks = [self.num_rows // rows for rows in self._block_rows]

    def job_bytes(self, job: TransferJob) -> int:
        """The bytes of the frames that a job takes."""
        return sum(map(self.needed, job.row_groups)) * self.num_bytes

    def needed(self, group: RowGroup) -> int:
        """The number of frames that the blocks of a group take."""
        return -(-len(group.keys) // self.blocks[group.group])

    def rows(self, group: int, frames: Iterable[int]) -> Iterator[int]:
        """Rows at which blocks of a group begin in these frames."""
        step = self._block_rows[group]
        for frame in frames:
            first = frame * self.num_rows
            yield from range(first, first + self.num_rows - step + 1, step)


class StagingRows:
    """The rows of `count` frames, in memory of kvtier. For the loop's thread.

    The frame returned last is taken first: frames that are not needed stay unpopulated, the others stay in the CPU
    caches. The memory is private, because most systems have no huge pages for shared memory. In a huge page a block is
    one segment for a disk, and else one for each 4 KiB, with which a virtual disk has half its speed.
    """

    def __init__(self, count: int, frames: Frames) -> None:
        self._frames = frames
        self.num_rows, self.row_bytes = count * frames.num_rows, frames.row_bytes
        memory = mmap.mmap(-1, count * frames.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_DONTDUMP)  # copies of blocks have no place in a core dump
        for advice in (MADV_WIPEONFORK, mmap.MADV_HUGEPAGE):
            with suppress(OSError):  # a kernel without it
                memory.madvise(advice)
        self.view: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8).reshape(self.num_rows, self.row_bytes)
        self._bytes = self.view.reshape(-1)
        self._checksums: dict[int, bytes] = {}
        self._free = list(range(count))

    def block(self, row: int, length: int) -> Bytes:
        """The first bytes of the block that begins at a row."""
        start = row * self.row_bytes
        return self._bytes[start : start + length]

    @contextmanager
    def taken(self, job: TransferJob) -> Iterator[list[int]]:
        """A row for each block of a job, in their order, for as long as I/O touches them.

        Raises IntegrityError if there are too few frames: jobs are started only when there is room.
        """
        needed = list(map(self._frames.needed, job.row_groups))
        start = len(self._free) - sum(needed)
        if start < 0:
            raise IntegrityError(f"{sum(needed)} staging frames were wanted, {len(self._free)} are free")
        frames = self._free[start:]
        del self._free[start:]
        try:
            left = iter(frames)
            yield [
                row
                for group, count in zip(job.row_groups, needed, strict=True)
                for row in islice(self._frames.rows(group.group, islice(left, count)), len(group.keys))
            ]
        finally:
            self._free += frames

    def checksum(self, row: int) -> bytes:
        """The checksum that travels with the block that begins at a row."""
        return self._checksums[row]

    def set_checksum(self, row: int, digest: bytes) -> None:
        self._checksums[row] = digest


class StagedTier(LoadStore):
    """A backend behind staging rows: its jobs name places in the engine's memory, the backend sees rows of its context.

    A block is sealed where it is copied: its checksum is taken of the very bytes that go to the tier.
    """

    def __init__(self, backend: LoadStore, memory: EngineMemory, threads: DaemonPool) -> None:
        self.options = backend.options
        self.backend = backend
        self.permits: CopyPermits = {}
        self.counters: object = getattr(backend, "counters", None)
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
        """The answers of a shared tier."""
        assert isinstance(self.backend, AnswersLookups)
        return await self.backend.lookup(keys)

    async def store(self, job: TransferJob) -> JobResult:
        """Copy the engine's blocks, then store the copies. CANCELLED where the job was given up before that."""
        with self._staging.taken(job) as rows:
            if not await shielded_wait(self._threads.run(self._fill, self.permits[job.job_id], _places(job), rows)):
                return JobResult.uniform(job, CANCELLED)
            return await self.backend.store(_restaged(job, rows))

    async def load(self, job: TransferJob) -> JobResult:
        """Load into staging rows, then copy what was verified. CANCELLED where the job was given up before that."""
        permit = self.permits[job.job_id]
        if permit.given_up:  # while it waited
            return JobResult.uniform(job, CANCELLED)
        with self._staging.taken(job) as rows:
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
            target = self._staging.block(row, self._geometry.aligned_bytes(group))
            with permit as granted:
                if not granted:
                    return False
                end = self._memory.read(group, place, target)
            target[end:] = 0
            self._staging.set_checksum(row, checksum(target.data))
        return True

    def _empty(self, permit: CopyPermit, places: Sequence[Place], rows: Sequence[int], good: Sequence[bool]) -> bool:
        for (group, place), row in compress(zip(places, rows, strict=True), good):
            source = self._staging.block(row, self._geometry.aligned_bytes(group))
            with permit as granted:
                if not granted:
                    return False
                self._memory.write(group, place, source)
        return True


def _places(job: TransferJob) -> list[Place]:
    return [(group.group, place) for group in job.row_groups for place in group.rows]


def _restaged(job: TransferJob, rows: Sequence[int]) -> TransferJob:
    """The job with staging rows in place of the engine's memory."""
    left = iter(rows)
    groups = tuple(replace(group, rows=list(islice(left, len(group.keys)))) for group in job.row_groups)
    return replace(job, groups=groups)
