"""Workers of the CPU tier in plain numpy: they copy pages between arrays and rows, and misbehave on request."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from kvtier.options import TierOptions
from kvtier.tier.contract import LoadStore, Opened, Rows, TierContext
from kvtier.types.arrays import int_array
from kvtier.types.geometry import Geometry
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import LOADED, STORED, BlockOutcome, GPUGroup, JobKind, JobResult, TransferJob
from kvtier.types.keys import GPU, GroupIndex, JobId, make_key

GPU_BLOCKS = 64


class ArrayWorker(LoadStore):
    """Worker `worker` with `pages[group]` of shape (GPU_BLOCKS, page bytes).

    `refuses` are rows it reports as failed; `raises` ends every call; `gate`, while it is set to an unset event, holds
    every call. `seen` are the jobs it was given, `entered` is set once there was one.
    """

    medium = GPU
    Options: ClassVar[type[TierOptions]] = TierOptions

    def __init__(self, geometry: Geometry, worker: int) -> None:
        rng = np.random.default_rng(worker)
        self.geometry, self.worker = geometry, worker
        self.pages = [
            rng.integers(1, 256, (GPU_BLOCKS, geometry.page_bytes(group)), dtype=np.uint8)
            for group in range(geometry.num_groups)
        ]
        self.rows: Rows | None = None
        self.seen: list[TransferJob] = []
        self.refuses: dict[int, BlockOutcome] = {}
        self.raises: BaseException | None = None
        self.gate: asyncio.Event | None = None
        self.entered = asyncio.Event()
        self.calls_ended = 0

    async def open(self, context: TierContext) -> Opened:
        return Opened(0)

    async def close(self) -> None:
        """Nothing to release."""

    async def load(self, job: TransferJob) -> JobResult:
        return await self._copy(job, to_rows=True)

    async def store(self, job: TransferJob) -> JobResult:
        return await self._copy(job, to_rows=False)

    async def _copy(self, job: TransferJob, to_rows: bool) -> JobResult:
        assert self.rows is not None
        self.seen.append(job)
        self.entered.set()
        if self.gate is not None:
            await self.gate.wait()
        if self.raises is not None:
            raise self.raises
        outcomes = []
        for group in job.groups:
            size = self.geometry.page_bytes(group.group)
            for block, sub, gpu in zip(*(part.tolist() for part in group.runs.pages()), strict=True):
                start = self.geometry.offset(group.group, self.worker, sub)
                place = self.rows.view[int(group.rows[block]), start : start + size]
                page = self.pages[group.group][gpu]
                if to_rows:
                    place[:] = page
                else:
                    page[:] = place
            done = LOADED if to_rows else STORED
            outcomes.append(tuple(self.refuses.get(row, done) for row in group.rows.tolist()))
        self.calls_ended += 1
        return JobResult(job.job_id, tuple(outcomes))


def transfer(group: int, runs: GPURuns, rows: Sequence[int], generation: int = 1) -> GPUGroup:
    """A transfer of one block for each row; every row gets a generation of its own from `generation` on."""
    keys = tuple(make_key(f"{group}/{row}".encode(), group) for row in rows)
    places = int_array(list(rows))
    return GPUGroup(GroupIndex(group), keys, runs, places, places + generation)


def job(kind: JobKind, *groups: GPUGroup) -> TransferJob:
    return TransferJob(JobId(7), kind, groups)


def disk_error() -> OSError:
    return OSError(errno.ENODEV, "the device fell off the bus")
