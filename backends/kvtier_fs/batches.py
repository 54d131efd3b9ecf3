"""What is under way: a job with the outcomes it has so far, and blocks of it that began together.

Blocks have no objects of their own; a batch holds a list for each thing that is known of them.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from kvtier.jobs import LATE, BlockOutcome, DropReason, JobKind, JobResult, TransferJob, dropped, failed


def error_outcome(number: int) -> BlockOutcome:
    """The outcome of a block whose I/O ended with an errno: a full disk drops it, anything else fails it."""
    return dropped(DropReason.DISK_FULL) if number in (errno.ENOSPC, errno.EDQUOT) else failed(number)


class JobRun:
    """One job on its way: its outcomes so far, and the future that is done when the last block has ended."""

    def __init__(self, job: TransferJob, kind: JobKind, loop: asyncio.AbstractEventLoop) -> None:
        self.job = job
        self.kind = kind
        self._loop = loop
        self.finished: asyncio.Future[None] = loop.create_future()
        self._outcomes: list[list[BlockOutcome | None]] = [[None] * len(group.keys) for group in job.groups]
        self._left = job.num_blocks
        self.bytes_moved = 0
        if not self._left:
            self.finished.set_result(None)

    def end(self, group: int, position: int, outcome: BlockOutcome, payload_bytes: int = 0) -> None:
        """Note what became of a block. The first word counts."""
        self.end_all(group, (position,), outcome, payload_bytes)

    def end_all(self, group: int, positions: Iterable[int], outcome: BlockOutcome, payload_bytes: int = 0) -> None:
        """Note what became of blocks of a group, `payload_bytes` each. The first word counts."""
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

    def going_on(self) -> asyncio.Future[None]:
        """What is done when the last block has ended, after a cancellation has reached `finished`."""
        if self.finished.cancelled():
            self.finished = self._loop.create_future()
            if not self._left:
                self.finished.set_result(None)
        return self.finished

    def result(self, seconds: float) -> JobResult:
        """What to tell the stack, once finished."""
        outcomes = tuple(tuple(outcome or LATE for outcome in group) for group in self._outcomes)
        return JobResult(self.job.job_id, outcomes, self.bytes_moved, seconds)


@dataclass(slots=True, eq=False)
class Batch:
    """Blocks of one group of a job that began together, in the order of their places; entry i of each list is block i.

    `payloads` are the rows' own memory, at `addresses`; `fds` and `offsets` say where the slots begin. `regions`,
    `indices` and `cuts` name the slots; `fixed` is what their headers say or should, `digests` the payloads' checksums
    (of a store). `left` counts the blocks that have not ended.
    """

    run: JobRun
    group: int
    positions: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    payloads: list[memoryview] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    regions: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    fixed: list[bytes] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    left: int = 0
    pieces: list[int] = field(default_factory=list)
    """Requests that have not ended, of blocks that take more than one each."""
    errors: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.positions)

    def end(self, first: int, last: int, outcome: BlockOutcome) -> None:
        """Report the outcome of blocks `first` to `last - 1` to their job."""
        moved = len(self.payloads[first]) if outcome.ok else 0
        self.run.end_all(self.group, self.positions[first:last], outcome, moved)


class Share(Protocol):
    """One group's blocks of a job on one root, of which some have not begun."""

    run: JobRun

    def take(self, count: int) -> Batch | None:
        """The next blocks, `count` at most, without those that cannot move, which have ended; None after the last."""

    def end(self, outcome: BlockOutcome) -> None:
        """End all that have not begun."""
