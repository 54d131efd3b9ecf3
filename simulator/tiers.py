"""A GPU and a CPU tier without threads or shared memory, and an observer around the tier below."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Literal

import numpy as np

from kvtier.options import PolicyName, TierOptions
from kvtier.testing.driver import TestRows
from kvtier.tier.checksum import checksum
from kvtier.tier.contract import AnswersLookups, LoadStore, Opened, Resettable, SlotSpace, TierContext
from kvtier.types.geometry import Geometry, KVLayout
from kvtier.types.jobs import CORRUPT, LOADED, PARTIAL, STORED, BlockOutcome, GPUGroup, JobResult, TransferJob, failed
from kvtier.types.keys import CPU, GPU, Medium, OffloadKey
from simulator.ages import AgeWatch
from simulator.fault_profile import FaultProfile
from simulator.oracle import Bytes, Oracle

GPUPages = Sequence[Sequence[Bytes]]
"""The GPU memory of all workers: `pages[worker][group]` of shape (blocks, page bytes)."""


def gpu_pages(layout: KVLayout, num_blocks: int) -> GPUPages:
    """GPU memory of all workers of a layout."""
    groups = layout.groups
    return [[np.zeros((num_blocks, group.page_bytes), np.uint8) for group in groups] for _ in range(layout.world_size)]


PAUSES = 0.3
"""How often a copy pauses before a page."""


class SimulatedGPU(LoadStore):
    """A worker that does nothing: the simulated CPU tier copies by itself."""

    medium: ClassVar[Medium] = GPU
    Options: ClassVar[type[TierOptions]] = TierOptions

    def __init__(self, options: TierOptions) -> None:
        self.options = options

    async def open(self, context: TierContext) -> Opened:
        return Opened(0)

    async def store(self, job: TransferJob) -> JobResult:
        return JobResult.uniform(job, failed(errno.ENOTSUP))

    async def load(self, job: TransferJob) -> JobResult:
        return JobResult.uniform(job, failed(errno.ENOTSUP))

    async def close(self) -> None:
        """There is nothing to release."""


class SimulatedCPUOptions(TierOptions):
    """Options of the simulated CPU tier."""

    type: Literal["cpu"] = "cpu"
    rows: int = 8
    policy: PolicyName = "lru"
    free_watermark: float = 0.0
    retained_max: float = 1.0
    """All of it: the control plane leaves rows for others."""


class SimulatedCPU(LoadStore):
    """Rows in private memory. Copies pause between pages and fail at the rate of the fault profile."""

    medium: ClassVar[Medium] = CPU
    BLOCK_SIZE_ALIGNMENT: ClassVar[int] = 4096
    Options: ClassVar[type[TierOptions]] = SimulatedCPUOptions

    def __init__(self, options: SimulatedCPUOptions, gpu: GPUPages, oracle: Oracle, rng: Random) -> None:
        self.options: SimulatedCPUOptions = options
        self._gpu = gpu
        self.fault_profile = FaultProfile()
        self._oracle = oracle
        self._rng = rng
        self._rows: TestRows | None = None
        self._copying = 0
        self._geometry: Geometry

    @property
    def rows(self) -> TestRows:
        assert self._rows is not None
        return self._rows

    async def open(self, context: TierContext) -> Opened:
        geometry = self._geometry = context.geometry
        self._rows = TestRows(self.options.rows, geometry.row_bytes)
        self._oracle.rows_are(self._rows)
        size = self.options.rows * geometry.row_bytes
        return Opened(size, SlotSpace(size, (1,), (geometry.row_bytes,) * geometry.num_groups))

    async def store(self, job: TransferJob) -> JobResult:
        outcomes = []
        for group in job.gpu_groups:
            pages, factor = self._pages(group), self._geometry.factor
            whole = [len(own) == factor and {sub for sub, _ in own} == set(range(factor)) for own in pages]
            filled = [await self._fill(group, i, pages[i]) if whole[i] else PARTIAL for i in range(len(whole))]
            outcomes.append(tuple(filled))
        return JobResult(job.job_id, tuple(outcomes), sum(o.ok for group in outcomes for o in group))

    async def load(self, job: TransferJob) -> JobResult:
        outcomes = []
        for group in job.gpu_groups:
            pages = self._pages(group)
            outcomes.append(tuple([await self._empty(group, i, pages[i]) for i in range(len(group.keys))]))
        return JobResult(job.job_id, tuple(outcomes), sum(o.ok for group in outcomes for o in group))

    async def close(self) -> None:
        """Wait for the copies in flight, which use buffers of the caller."""
        while self._copying:  # noqa: ASYNC110 - virtual time costs nothing
            await asyncio.sleep(0.01)

    def _pages(self, group: GPUGroup) -> list[list[tuple[int, int]]]:
        """For each block its pages: (sub-block, GPU block)."""
        pages: list[list[tuple[int, int]]] = [[] for _ in group.keys]
        runs, at = group.runs, 0
        gpu_blocks = runs.gpu_blocks.tolist()
        for block, first, count in zip(runs.blocks.tolist(), runs.firsts.tolist(), runs.counts.tolist(), strict=True):
            pages[block] += enumerate(gpu_blocks[at : at + count], first)
            at += count
        return pages

    async def _fill(self, group: GPUGroup, i: int, pages: list[tuple[int, int]]) -> BlockOutcome:
        self._copying += 1
        try:
            return await self._copy_in(group, i, pages)
        finally:
            self._copying -= 1

    async def _empty(self, group: GPUGroup, i: int, pages: list[tuple[int, int]]) -> BlockOutcome:
        self._copying += 1
        try:
            return await self._copy_out(group, i, pages)
        finally:
            self._copying -= 1

    async def _copy_in(self, group: GPUGroup, i: int, pages: list[tuple[int, int]]) -> BlockOutcome:
        row, geometry = int(group.rows[i]), self._geometry
        view = self.rows.view[row]
        page_bytes = geometry.page_bytes(group.group)
        for worker in range(geometry.world_size):
            for sub, gpu in pages:
                if (drawn := self._rng.random()) < PAUSES:
                    await self._pause(drawn)
                if self._rng.random() < self.fault_profile.copy_fails:
                    return failed(errno.EIO)
                at = geometry.offset(group.group, worker, sub)
                self._oracle.row_written(row, "a copy from the GPU")
                view[at : at + page_bytes] = self._gpu[worker][group.group][gpu]
        size = geometry.aligned_bytes(group.group)
        view[geometry.kv_bytes_per_offloaded_block(group.group) : size] = 0
        self.rows.set_checksum(row, checksum(view[:size].data))
        return STORED

    async def _copy_out(self, group: GPUGroup, i: int, pages: list[tuple[int, int]]) -> BlockOutcome:
        row, geometry = int(group.rows[i]), self._geometry
        view = self.rows.view[row]
        if checksum(view[: geometry.aligned_bytes(group.group)].data) != self.rows.checksum(row):
            self._oracle.violation(f"row {row} does not match the checksum that travels with it")
            return CORRUPT
        page_bytes = geometry.page_bytes(group.group)
        for worker in range(geometry.world_size):
            for sub, gpu in pages:
                if (drawn := self._rng.random()) < PAUSES:
                    await self._pause(drawn)
                if self._rng.random() < self.fault_profile.copy_fails:
                    return failed(errno.EIO)
                at = geometry.offset(group.group, worker, sub)
                self._oracle.row_read(row, "a copy to the GPU")
                self._oracle.gpu_written(group.group, gpu)
                self._gpu[worker][group.group][gpu] = view[at : at + page_bytes]
        return LOADED

    async def _pause(self, drawn: float) -> None:
        """Let other tasks run between two pages; for long if `drawn` is low."""
        long = drawn < self.fault_profile.slow / 20
        await asyncio.sleep(self._rng.uniform(0.1, 4.0) if long else self._rng.random() * 1e-4)


@dataclass(frozen=True, slots=True)
class GroupBuffers:
    """One group of a transfer, the GPU blocks lent to it, and ((sub-block, GPU block), key) for each page."""

    group: GPUGroup
    gpu: list[int]
    pages: list[tuple[tuple[int, int], OffloadKey]]


class ObservedTier(LoadStore):
    """Wraps the tier below: compares the outcomes it reports with what the disks did."""

    def __init__(self, inner: LoadStore, oracle: Oracle, ages: AgeWatch | None = None) -> None:
        self.options = inner.options
        self.inner = inner
        self.medium = inner.medium  # type: ignore[misc]
        self.BLOCK_SIZE_ALIGNMENT = inner.BLOCK_SIZE_ALIGNMENT  # type: ignore[misc]
        self._oracle = oracle
        self._ages = ages
        self._lengths: tuple[int, ...] = ()
        if isinstance(inner, AnswersLookups):
            vars(self)["lookup"] = inner.lookup

    async def open(self, context: TierContext) -> Opened:
        opened = await self.inner.open(context)
        geometry = context.geometry
        self._lengths = tuple(4096 + geometry.aligned_bytes(group) for group in range(geometry.num_groups))
        return opened

    async def store(self, job: TransferJob) -> JobResult:
        return await self._run(job, False)

    async def load(self, job: TransferJob) -> JobResult:
        return await self._run(job, True)

    async def reset(self, epoch: int) -> None:
        assert isinstance(self.inner, Resettable)
        await self.inner.reset(epoch)

    async def close(self) -> None:
        self._oracle.disks_closing = True
        await self.inner.close()

    async def _run(self, job: TransferJob, reading: bool) -> JobResult:
        rows = [row for group in job.row_groups for row in group.rows]
        self._oracle.job_begins(reading, rows, job)
        begun = self._ages.begins(job, reading) if self._ages is not None else 0.0
        result = await (self.inner.load(job) if reading else self.inner.store(job))
        self._oracle.job_ended(reading, rows)
        if reading and self._ages is not None:
            self._ages.loaded(job, result, begun)
        names = [outcome.status.value for group in result.outcomes for outcome in group]
        self._oracle.record.covered.update(f"blocks of {'loads' if reading else 'stores'} {name}" for name in names)
        self._oracle.note(f"fs job {job.job_id} {job.kind} rows {rows}: {','.join(names)}")
        for group, outcomes in zip(job.row_groups, result.outcomes, strict=True):
            for row, outcome in zip(group.rows, outcomes, strict=True):
                if outcome in (STORED, LOADED):
                    self._oracle.succeeded(reading, row, self._lengths[group.group])
        return result
