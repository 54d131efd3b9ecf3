"""Copies between GPU blocks and rows that the workers of engines carry out, as the CPU tier of a pool sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from errno import ECANCELED
from itertools import chain, islice
from typing import ClassVar, Literal

from kvtier.errors import UsageError
from kvtier.options import TierOptions
from kvtier.tier.contract import LoadStore, Opened, TierContext
from kvtier.types.jobs import LOADED, JobResult, TransferJob, failed
from kvtier.types.keys import GPU, Medium


class SessionCopyOptions(TierOptions):
    """Options of copies that the processes of engines carry out."""

    type: Literal["session"] = "session"


FilledRow = tuple[int, int]
"""A row and the generation of its fill."""


@dataclass(slots=True, eq=False)
class FillWait:
    """A wait for fills, of which this number is left."""

    left: int
    ended: asyncio.Future[None]


class FillEnds:
    """The ends of fills; workers may report them before the CPU tier waits for them. `waiters` wait for each."""

    def __init__(self, waiters: int) -> None:
        self._waiters = waiters
        self._ends: dict[FilledRow, list[int]] = {}
        self._waits: dict[FilledRow, list[FillWait]] = {}
        self._cancelled = False

    def end(self, fills: Sequence[FilledRow], errors: Sequence[int]) -> None:
        """These fills have ended, each with 0 or an errno."""
        for fill, error in zip(fills, errors, strict=True):
            self._ends[fill] = [error, self._waiters]
            for wait in self._waits.pop(fill, ()):
                wait.left -= 1
                if not wait.left and not wait.ended.done():
                    wait.ended.set_result(None)

    async def wait(self, fills: Sequence[FilledRow]) -> list[int]:
        """The error of each fill, once all of them have ended."""
        left = [fill for fill in fills if fill not in self._ends]
        if left and not self._cancelled:
            wait = FillWait(len(left), asyncio.get_running_loop().create_future())
            for fill in left:
                self._waits.setdefault(fill, []).append(wait)
            await wait.ended
        errors = []
        for fill in fills:
            end = self._ends.get(fill)
            errors.append(ECANCELED if end is None else end[0])
            if end is not None:
                end[1] -= 1
                if not end[1]:
                    del self._ends[fill]
        return errors

    def cancel(self) -> None:
        """Every fill that has not ended fails."""
        self._cancelled = True
        for wait in chain.from_iterable(self._waits.values()):
            if not wait.ended.done():
                wait.ended.set_result(None)
        self._waits.clear()


class SessionCopies(LoadStore):
    """Stands in for a worker's GPU tier: its jobs end when the workers of an engine have reported the copies.

    A call waits in the task of the CPU tier's own, which nothing cancels but the end of the loop.
    """

    medium: ClassVar[Medium] = GPU
    Options: ClassVar[type[TierOptions]] = SessionCopyOptions

    def __init__(self, ends: FillEnds) -> None:
        super().__init__(SessionCopyOptions())
        self._ends = ends

    async def open(self, context: TierContext) -> Opened:
        """Nothing is acquired."""
        return Opened(capacity_bytes=0, mode="copied by the engines' workers")

    async def load(self, job: TransferJob) -> JobResult:
        """GPU blocks to rows: what the workers reported for each row."""
        fills = [
            fill
            for group in job.gpu_groups
            for fill in zip(group.rows.tolist(), group.generations.tolist(), strict=True)
        ]
        ended = iter([failed(error) if error else LOADED for error in await self._ends.wait(fills)])
        return JobResult(job.job_id, tuple([tuple(islice(ended, len(group.keys))) for group in job.groups]))

    async def store(self, job: TransferJob) -> JobResult:
        """Loads of engines never pass here: an engine copies out of the rows that are leased to it."""
        raise UsageError("a stack process copies nothing into GPU blocks")

    async def close(self) -> None:
        """Fail what has not ended. Idempotent."""
        self._ends.cancel()
