"""Copies that the engine carries out itself: for engines that schedule their own transfers, such as vLLM.

The stack decides which rows, the engine's own workers move the bytes between them and GPU blocks, and the stack waits
until the engine says that a copy has ended. Whether the bytes really arrived is read from the workers' stamps in the
shared region, never from the engine's word.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal

from kvtier.aio.shielded_wait import shielded_wait
from kvtier.errors import UsageError
from kvtier.options import TierOptions
from kvtier.tier.contract import LoadStore, Opened, TierContext
from kvtier.types.jobs import LOADED, STORED, BlockOutcome, JobResult, TransferJob, failed
from kvtier.types.keys import GPU, JobId, Medium


class EngineCopyOptions(TierOptions):
    """Options of copies by the engine."""

    type: Literal["engine"] = "engine"


class EngineCopies(LoadStore):
    """Stands in for one worker's GPU tier. Its jobs end when the engine's thread calls `end`, or when it is closed.

    A job may be ended before it has begun here: the engine's thread does not wait for the stack's loop.
    """

    medium: ClassVar[Medium] = GPU
    Options: ClassVar[type[TierOptions]] = EngineCopyOptions

    def __init__(self, options: TierOptions | None = None) -> None:
        super().__init__(options or EngineCopyOptions())
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ends: dict[JobId, asyncio.Future[int]] = {}
        self._closed = False

    async def open(self, context: TierContext) -> Opened:
        """Nothing is acquired."""
        if self._loop is not None or self._closed:
            raise UsageError("handed-over copies are opened once")
        self._loop = asyncio.get_running_loop()
        return Opened(capacity_bytes=0, mode=f"copied by the engine's worker {context.worker}")

    async def store(self, job: TransferJob) -> JobResult:
        """Rows to GPU blocks: ends when the engine says so."""
        return await self._wait(job, STORED)

    async def load(self, job: TransferJob) -> JobResult:
        """GPU blocks to rows: ends when the engine says so."""
        return await self._wait(job, LOADED)

    async def close(self) -> None:
        """Fail what has not ended. Idempotent."""
        self._closed = True
        self._end(tuple(self._ends), errno.ECANCELED)

    def end(self, job_ids: Iterable[JobId], reason: int = 0) -> None:
        """The copies of these jobs are over, on every worker; `reason` is 0 or an errno. From any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end, tuple(job_ids), reason)

    def _end(self, job_ids: Sequence[JobId], reason: int) -> None:
        for job_id in job_ids:
            end = self._end_of(job_id)
            if not end.done():
                end.set_result(reason)

    def _end_of(self, job_id: JobId) -> asyncio.Future[int]:
        """Done when the engine has ended the job's copies; its result is the reason."""
        end = self._ends.get(job_id)
        if end is None:
            end = self._ends[job_id] = asyncio.get_running_loop().create_future()
            if self._closed:
                end.set_result(errno.ECANCELED)
        return end

    async def _wait(self, job: TransferJob, success: BlockOutcome) -> JobResult:
        if self._loop is None:
            raise UsageError("handed-over copies are not open")
        try:
            reason = await shielded_wait(self._end_of(job.job_id))
        finally:
            del self._ends[job.job_id]
        return JobResult.uniform(job, failed(reason) if reason else success)
