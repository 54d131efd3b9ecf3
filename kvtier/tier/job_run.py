"""A job in progress: the outcomes it has so far, and the future that is done when its last block has ended."""

import asyncio
import errno
from collections.abc import Iterable
from typing import cast

from kvtier.errors import UsageError
from kvtier.types.jobs import LATE, BlockOutcome, DropReason, JobKind, JobResult, TransferJob, dropped, failed


def error_outcome(number: int) -> BlockOutcome:
    """The outcome of a block whose I/O ended with an errno: a full disk drops it, anything else fails it."""
    return dropped(DropReason.DISK_FULL) if number in (errno.ENOSPC, errno.EDQUOT) else failed(number)


def check_job(job: TransferJob, num_groups: int, num_rows: int) -> None:
    """Raise UsageError for a job whose groups or rows do not exist: its rows become places in memory."""
    for group in job.row_groups:
        if len(group.keys) != len(group.rows):
            raise UsageError("a job on this tier names a row for each key")
        if not 0 <= group.group < num_groups:
            raise UsageError(f"there is no group {group.group}")
        if group.rows and not 0 <= min(group.rows) <= max(group.rows) < num_rows:
            raise UsageError("a job names a row that does not exist")


class JobRun:
    """A job in progress: its outcomes so far, and the future that is done when the last block has ended."""

    def __init__(self, job: TransferJob, kind: JobKind, loop: asyncio.AbstractEventLoop) -> None:
        self.job = job
        self.groups = job.row_groups
        self.kind = kind
        self.finished: asyncio.Future[None] = loop.create_future()
        self._outcomes: list[list[BlockOutcome | None]] = []
        self._left = 0
        for group in self.groups:
            self._outcomes.append([None] * len(group.keys))
            self._left += len(group.keys)
        self.bytes_moved = 0
        if not self._left:
            self.finished.set_result(None)

    def end(self, group: int, position: int, outcome: BlockOutcome, payload_bytes: int = 0) -> None:
        """Record the outcome of a block. The first outcome counts."""
        self.end_all(group, (position,), outcome, payload_bytes)

    def end_all(self, group: int, positions: Iterable[int], outcome: BlockOutcome, payload_bytes: int = 0) -> None:
        """Record the outcome of blocks of a group, `payload_bytes` each. The first outcome counts."""
        outcomes, ended = self._outcomes[group], 0
        for position in positions:
            if outcomes[position] is None:
                outcomes[position] = outcome
                ended += 1
        self.bytes_moved += ended * payload_bytes
        self._left -= ended
        if not self._left and not self.finished.done():
            self.finished.set_result(None)

    def give_up(self) -> None:
        """Report every block that has not ended as late: its I/O is stuck in the kernel and keeps its buffers."""
        for group, outcomes in enumerate(self._outcomes):
            self.end_all(group, range(len(outcomes)), LATE)

    def finished_after_cancel(self) -> asyncio.Future[None]:
        """The future that is done when the last block has ended, after a cancellation has reached `finished`."""
        if self.finished.cancelled():
            self.finished = self.finished.get_loop().create_future()
            if not self._left:
                self.finished.set_result(None)
        return self.finished

    def result(self, seconds: float) -> JobResult:
        """The result of the job, once finished."""
        assert not self._left
        outcomes = cast("tuple[tuple[BlockOutcome, ...], ...]", tuple(map(tuple, self._outcomes)))
        return JobResult(self.job.job_id, outcomes, self.bytes_moved, seconds)
