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

from kvtier.errors import ConfigError, UsageError
from kvtier.jobs import LOADED, STORED, BlockOutcome, JobResult, TransferJob, failed
from kvtier.keys import GPU, JobId, Medium, OffloadKey
from kvtier.loadstore import LoadStore, LookupResult, Opened, Ownership, TierContext
from kvtier.options import TierOptions
from kvtier.outlast import outlast


class EngineCopyOptions(TierOptions):
    """What a handed-over copier can be told."""

    type: Literal["engine"] = "engine"


class EngineCopies(LoadStore):
    """Stands in for one worker's GPU tier. Its jobs end when the engine's thread calls `end`, or when it is closed.

    A job may be ended before it has begun here: the engine's thread does not wait for the stack's loop.
    """

    medium: ClassVar[Medium] = GPU
    BLOCK_SIZE_ALIGNMENT: ClassVar[int] = 1
    ownership: ClassVar[Ownership] = Ownership.OWNED
    Options: ClassVar[type[TierOptions]] = EngineCopyOptions

    def __init__(self, options: TierOptions | None = None) -> None:
        options = EngineCopyOptions() if options is None else options
        if not isinstance(options, EngineCopyOptions):
            raise ConfigError(f"handed-over copies take EngineCopyOptions, not {type(options).__name__}")
        self.options: EngineCopyOptions = options
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[JobId, asyncio.Future[int]] = {}
        self._ended: dict[JobId, int] = {}
        self._closed = False

    async def open(self, context: TierContext) -> Opened:
        """Nothing is acquired."""
        if self._loop is not None or self._closed:
            raise UsageError("handed-over copies are opened once")
        self._loop = asyncio.get_running_loop()
        return Opened(capacity_bytes=0, mode=f"copied by the engine's worker {context.worker}")

    async def lookup(self, keys: Sequence[OffloadKey]) -> Sequence[LookupResult]:
        """Never answered here: the engine's own prefix cache knows what the GPU holds. Raises UsageError."""
        raise UsageError("handed-over copies have no directory; ask the engine's prefix cache")

    async def store(self, job: TransferJob) -> JobResult:
        """Rows to GPU blocks: ends when the engine says so."""
        return await self._wait(job, STORED)

    async def load(self, job: TransferJob) -> JobResult:
        """GPU blocks to rows: ends when the engine says so."""
        return await self._wait(job, LOADED)

    async def close(self) -> None:
        """What has not ended has failed. Idempotent."""
        self._closed = True
        for future in self._waiting.values():
            if not future.done():
                future.set_result(errno.ECANCELED)
        self._ended.clear()

    def end(self, job_ids: Iterable[JobId], reason: int = 0) -> None:
        """The copies of these jobs are over, on every worker; `reason` is 0 or an errno. From any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end, tuple(job_ids), reason)

    def _end(self, job_ids: Sequence[JobId], reason: int) -> None:
        for job_id in job_ids:
            future = self._waiting.get(job_id)
            if future is None:
                if not self._closed:
                    self._ended[job_id] = reason
            elif not future.done():
                future.set_result(reason)

    async def _wait(self, job: TransferJob, success: BlockOutcome) -> JobResult:
        if self._loop is None:
            raise UsageError("handed-over copies are not open")
        reason = self._ended.pop(job.job_id, None)
        if reason is None:
            if self._closed:
                return JobResult.uniform(job, failed(errno.ECANCELED))
            future: asyncio.Future[int] = self._loop.create_future()
            self._waiting[job.job_id] = future
            try:
                reason = await outlast(future)
            finally:
                del self._waiting[job.job_id]
        return JobResult.uniform(job, failed(reason) if reason else success)
