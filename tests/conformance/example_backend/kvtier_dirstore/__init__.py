"""A whole backend: a shared tier that keeps one file for each block in a folder. Small, right, not fast, unbounded."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, Literal

from kvtier.aio.shielded_wait import shielded_wait
from kvtier.errors import UsageError
from kvtier.options import LowerTierOptions, TierOptions
from kvtier.tier.checksum import CHECKSUM_BYTES, checksum
from kvtier.tier.contract import LoadStore, LookupResult, Opened, TierContext
from kvtier.types.jobs import (
    CORRUPT,
    LOADED,
    MISSING,
    STORED,
    BlockOutcome,
    JobKind,
    JobResult,
    RowGroup,
    TransferJob,
    failed,
)
from kvtier.types.keys import Medium, OffloadKey


class DirOptions(LowerTierOptions):
    type: Literal["dirstore"] = "dirstore"
    folder: str


class DirStore(LoadStore):
    medium: ClassVar[Medium] = Medium("DIR")
    Options: ClassVar[type[TierOptions]] = DirOptions
    options: DirOptions

    def __init__(self, options: TierOptions) -> None:
        super().__init__(options)
        self._context: TierContext | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._jobs: set[asyncio.Future[JobResult]] = set()

    async def open(self, context: TierContext) -> Opened:
        if self._context is not None or context.rows is None:
            raise UsageError("a dirstore is opened once, with rows")
        self._context, self._namespace = context, context.namespace.digest()
        self._folder = Path(self.options.folder) / self._namespace.hex()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._threads = ThreadPoolExecutor(2, "dirstore")
        return Opened(1 << 40, epoch=self._epoch(), mode="one file a block")

    def _epoch(self) -> int:
        return max((int(path.name[6:]) for path in self._folder.glob("epoch-*")), default=0)

    def _file(self, key: OffloadKey, epoch: int) -> Path:
        return self._folder / hashlib.sha256(epoch.to_bytes(8, "big") + key).hexdigest()

    async def lookup(self, keys: Sequence[OffloadKey]) -> Sequence[LookupResult]:
        epoch = self._epoch()
        return [LookupResult.HIT if self._file(key, epoch).exists() else LookupResult.MISS for key in keys]

    async def reset(self, epoch: int) -> None:
        (self._folder / f"epoch-{epoch}").touch()

    async def store(self, job: TransferJob) -> JobResult:
        return await self._run(job, JobKind.STORE)

    async def load(self, job: TransferJob) -> JobResult:
        return await self._run(job, JobKind.LOAD)

    async def _run(self, job: TransferJob, kind: JobKind) -> JobResult:
        if self._threads is None:
            raise UsageError("this tier is not open")
        running = asyncio.get_running_loop().run_in_executor(self._threads, self._move_all, job, kind)
        self._jobs.add(running)
        running.add_done_callback(self._jobs.discard)
        return await shielded_wait(running)  # rows are ours until the thread is done with them, cancelled or not

    def _move_all(self, job: TransferJob, kind: JobKind) -> JobResult:
        move, moved = (self._load if kind is JobKind.LOAD else self._store), 0
        outcomes = []
        for group in job.row_groups:
            outcomes.append(tuple(self._attempt(move, job, group, i) for i in range(len(group.keys))))
            moved += sum(one.ok for one in outcomes[-1]) * self._context.geometry.aligned_bytes(group.group)
        return JobResult(job.job_id, tuple(outcomes), moved)

    def _attempt(self, move, job: TransferJob, group: RowGroup, i: int) -> BlockOutcome:
        row = group.rows[i]
        data = self._context.rows.view[row, : self._context.geometry.aligned_bytes(group.group)].data
        try:
            return move(self._file(group.keys[i], job.epoch), row, data)
        except FileNotFoundError:
            return MISSING
        except OSError as error:
            return failed(error.errno or 5)

    def _store(self, path: Path, row: int, data: memoryview) -> BlockOutcome:
        temporary = path.with_name(f"{path.name}.{os.getpid()}.{id(self)}.{row}")
        temporary.write_bytes(self._context.rows.checksum(row) + data)
        temporary.rename(path)
        return STORED

    def _load(self, path: Path, row: int, data: memoryview) -> BlockOutcome:
        found = memoryview(path.read_bytes())
        digest, payload = bytes(found[:CHECKSUM_BYTES]), found[CHECKSUM_BYTES:]
        if len(payload) != len(data) or checksum(payload) != digest:
            return CORRUPT
        data[:] = payload
        self._context.rows.set_checksum(row, digest)
        return LOADED

    async def close(self) -> None:
        if self._threads is not None:
            threads, self._threads = self._threads, None
            if self._jobs:
                await asyncio.wait(self._jobs)
            threads.shutdown()
