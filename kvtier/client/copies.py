"""Copies between GPU blocks and rows that an engine has begun, and the rows that are lent to it. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from errno import EIO
from functools import lru_cache
from itertools import chain, islice

import numpy as np

from kvtier.service.wire import Places
from kvtier.types.arrays import int_array
from kvtier.types.jobs import (
    KEYS_OF,
    BlockOutcome,
    BlockStatus,
    DropReason,
    GPUGroup,
    JobResult,
    TransferJob,
    dropped,
    failed,
)
from kvtier.types.keys import JobId, OffloadKey


class LentRows:
    """Rows that the engine may fill, each with the generation of its fill, the first ones first."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._generations: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, places: Places) -> None:
        """These rows were lent. Raises WireError for places that are none."""
        rows, generations = places.lists()
        self._rows += rows
        self._generations += generations

    def take(self, count: int) -> tuple[list[int], list[int]]:
        """(rows, generations) of up to so many."""
        rows, generations = self._rows[:count], self._generations[:count]
        del self._rows[:count], self._generations[:count]
        return rows, generations

    def clear(self) -> None:
        """Nothing is lent any more."""
        self._rows.clear()
        self._generations.clear()


def keys_of(job: TransferJob) -> Sequence[OffloadKey]:
    """The keys of all groups."""
    groups = job.groups
    return groups[0].keys if len(groups) == 1 else list(chain.from_iterable(map(KEYS_OF, groups)))


def by_groups(job: TransferJob, outcomes: Iterable[BlockOutcome]) -> tuple[tuple[BlockOutcome, ...], ...]:
    """The outcomes of all blocks of a job, as those of each group."""
    each = iter(outcomes)
    return tuple([tuple(islice(each, len(group.keys))) for group in job.groups])


@dataclass(slots=True, eq=False)
class RowCopy:
    """The blocks of a job that are copied, under a number that workers report.

    `copied`: the positions of these blocks in the job, in order, and `keys` theirs; the others end as `without`.
    `runs`: (number, outcome) of these blocks, once they have ended. A reset has made a load `void` that was in flight;
    a store is `lost` whose connection has ended. `reported` are the outcomes by its worker, of such a load or a store.
    """

    number: int
    job: TransferJob
    keys: Sequence[OffloadKey]
    copied: Sequence[int]
    without: BlockOutcome
    whole: bool = field(init=False)
    runs: list[tuple[int, BlockOutcome]] = field(init=False, default_factory=list)
    void: bool = field(init=False, default=False)
    lost: bool = field(init=False, default=False)
    reported: Sequence[BlockOutcome] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.whole = len(self.copied) == len(self.keys)
        if not self.whole:
            self.keys = [self.keys[at] for at in self.copied]

    def work(self, rows: Sequence[int], generations: Sequence[int]) -> TransferJob:
        """The job of a worker: these blocks alone, with their rows."""
        job, groups = self.job, list[GPUGroup]()
        first = start = 0
        for group in job.gpu_groups:
            size = count = len(group.keys)
            keys, runs = group.keys, group.runs
            if not self.whole:
                mine = [at - start for at in self.copied if start <= at < start + size]
                count = len(mine)
                if count < size:
                    keys, runs = tuple(group.keys[at] for at in mine), runs.select(int_array(mine))
            if count:
                end = first + count
                arrays = np.array(rows[first:end], np.int64), np.array(generations[first:end], np.int64)
                groups.append(GPUGroup(group.group, keys, runs, *arrays))
                first = end
            start += size
        return TransferJob(JobId(self.number), job.kind, tuple(groups))

    def outcomes(self) -> tuple[tuple[BlockOutcome, ...], ...]:
        """The outcomes of all blocks of the job, for each of its groups."""
        groups, runs = self.job.groups, self.runs
        if self.whole and len(runs) == 1:
            return tuple([(runs[0][1],) * len(group.keys) for group in groups])
        each = [self.without] * self.job.num_blocks
        ended = chain.from_iterable([(outcome,) * count for count, outcome in runs])
        for position, outcome in zip(self.copied, ended, strict=True):
            each[position] = outcome
        return by_groups(self.job, each)

    def result(self) -> JobResult:
        """The result of the job, without its seconds and bytes."""
        return JobResult(self.job.job_id, self.outcomes())


@lru_cache(64)
def outcome_of(status: str, reason: str, errno: int) -> BlockOutcome:
    """The outcome that a stack process says a block has."""
    if status == BlockStatus.FAILED:
        return failed(errno)
    try:
        return dropped(DropReason(reason)) if reason else BlockOutcome(BlockStatus(status))
    except ValueError:
        return failed(EIO)  # of a later release
