"""kvtier's filesystem tier as a contestant: FSBackend on the shared region of CPUBackend, with the directory of the
control plane, and checksums taken as the CPU tier takes them when blocks arrive there.

A job is stored once its rows have their checksums, which are taken while other jobs are stored; the clock starts with
the first job that has them. Their CPU time counts in full.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from benchmarks.fs_child import LOAD, OVERWRITE, Contestant, Job, Pass, Refused, Setup, serve
from kvtier.aio.daemon_pool import DaemonPool
from kvtier.control.tiers.owned_tier import OwnedTier
from kvtier.tier.contract import TierContext
from kvtier.types.geometry import Geometry, GroupLayout, KVLayout, TensorRef
from kvtier.types.jobs import JobKind, RowGroup, TransferJob
from kvtier.types.keys import GroupIndex, JobId, OffloadKey
from kvtier.types.namespace import Namespace
from kvtier_cpu import CPUBackend, CPUOptions
from kvtier_cpu.backend import POOL_THREADS, RowHashing
from kvtier_cpu.region.shared_region import seal_rows
from kvtier_fs import FSBackend, FSOptions

FILLERS = 1 << 40
"""Numbers of blocks that only fill the tier up, far from those that are measured."""


class KVTier(Contestant):
    """The whole tier. Slots for twice the rows; what is stored beyond evicts the oldest."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._notes = ""
        self._jobs = 0
        self._filled = False

    def open(self, setup: Setup) -> npt.NDArray[np.uint8]:
        self._filled = False
        return self._runner.run(self._open(setup))

    async def _open(self, setup: Setup) -> npt.NDArray[np.uint8]:
        slots = 2 * setup.blocks
        capacity = int(slots * (setup.block_bytes + 4096) * 1.01) + slots * 64 + (16 << 20) + 24 * setup.block_bytes
        self._fs = FSBackend(
            FSOptions.model_validate(
                {"roots": [f"{setup.folder}/root"], "capacity": capacity, "min_free_bytes": 0, "io_depth": setup.depth}
            )
        )
        layout = KVLayout((GroupLayout((TensorRef(0, setup.block_bytes),)),))
        geometry = Geometry(layout, await self._fs.probe_alignment())
        self._cpu = CPUBackend(CPUOptions(cpu_bytes_to_use=setup.blocks * geometry.row_bytes))
        namespace = Namespace(layout)
        region = await self._cpu.open(TierContext("cpu", geometry, namespace, time.monotonic))
        context = TierContext("fs", geometry, namespace, time.monotonic, rows=self._cpu.rows)
        opened = await self._fs.open(context)
        assert opened.space is not None
        self._epoch = opened.epoch
        self._tier = OwnedTier("fs", opened.space, "lru")
        self._seals = DaemonPool("seals", POOL_THREADS)
        self._hashing = RowHashing(self._seals)
        self._notes = f"{opened.mode}; rows {region.mode}"
        return self._cpu.rows.view[: setup.blocks, : setup.block_bytes]

    def notes(self) -> str:
        return self._notes

    def prepare(self, work: Pass, jobs: Sequence[Job]) -> float:
        """Take the first job's checksums. Before the first overwrite, fill up, so that every block evicts another."""
        if work.kind == OVERWRITE and not self._filled:
            self._filled = True
            self._runner.run(self._fill_up())
        if work.kind == LOAD:
            return 0.0
        cpu = time.process_time()
        self._runner.run(self._seal(jobs[0]))
        return time.process_time() - cpu

    async def _fill_up(self) -> None:
        number, count = FILLERS, min(64, self._cpu.rows.num_rows)
        while not self._tier.evictions:
            job = Job.of(range(number, number + count))
            await self._seal(job)
            await self._store(job)
            number += count

    def move(self, work: Pass, jobs: Sequence[Job]) -> list[float]:
        return self._runner.run(self._move(work, jobs))

    async def _move(self, work: Pass, jobs: Sequence[Job]) -> list[float]:
        turn, seconds = iter(jobs), []
        loading = work.kind == LOAD

        async def one_by_one() -> None:
            for job in turn:
                if not loading and job is not jobs[0]:
                    await self._seal(job)
                begun = time.perf_counter()
                await (self._load(job) if loading else self._store(job))
                seconds.append(time.perf_counter() - begun)

        await asyncio.gather(*(one_by_one() for _ in range(work.at_once)))
        return seconds

    def _transfer(self, kind: JobKind, job: Job, slots: list[int]) -> TransferJob:
        self._jobs += 1
        generation, num_rows = self._tier.table.generation, self._cpu.rows.num_rows
        rows = [number % num_rows for number in job.numbers]
        group = RowGroup(GroupIndex(0), tuple(keys_of(job)), rows, slots, [generation[slot] for slot in slots])
        formats = self._tier.placement.formats_for(slots) if kind is JobKind.STORE else ()
        return TransferJob(JobId(self._jobs), kind, (group,), None, self._epoch, formats)

    async def _seal(self, job: Job) -> None:
        """Take the checksums of a job's rows, as the CPU tier does."""
        rows = np.arange(job.numbers.start, job.numbers.stop, dtype=np.int64) % self._cpu.rows.num_rows
        await self._hashing.each(seal_rows, self._cpu.rows, 0, rows)

    async def _store(self, job: Job) -> None:
        slots = self._tier.reserve(keys_of(job))
        if len(slots) != len(job.keys):
            raise Refused(f"{len(slots)} slots for {len(job.keys)} blocks")
        transfer = self._transfer(JobKind.STORE, job, slots)
        result = await self._fs.store(transfer)
        if not result.ok:
            raise Refused(f"not all blocks were stored: {next(o for g in result.outcomes for o in g if not o.ok)}")
        self._tier.placement.complete_formats(transfer.formats)
        self._tier.commit(slots)
        self._tier.take_changes()

    async def _load(self, job: Job) -> None:
        slots = list(map(self._tier.ready, keys_of(job)))
        found = [slot for slot in slots if slot is not None]
        if len(found) != len(slots):
            raise Refused("a block is not there any more")
        self._tier.pin(found)
        result = await self._fs.load(self._transfer(JobKind.LOAD, job, found))
        self._tier.unpin(found)
        self._tier.touch(found)
        if not result.ok:
            raise Refused(f"not all blocks were loaded: {next(o for g in result.outcomes for o in g if not o.ok)}")

    def close(self) -> None:
        self._runner.run(self._close())

    async def _close(self) -> None:
        await self._fs.close()
        await self._cpu.close()
        self._seals.shutdown()


def keys_of(job: Job) -> list[OffloadKey]:
    """A job's keys as kvtier names them."""
    return cast("list[OffloadKey]", job.keys)


if __name__ == "__main__":
    serve(KVTier())
