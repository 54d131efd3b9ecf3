"""The blocks of a job that the workers copy, and the outcome of each over all workers."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvtier.errors import UsageError
from kvtier.types.arrays import outside
from kvtier.types.jobs import CORRUPT, BlockOutcome, BlockStatus, DropReason, GPUGroup, TransferJob, dropped, failed
from kvtier.types.values import job_value

UNSTAMPED = failed(errno.EIO)
"""Every worker reported success, but not every stamp is there: the row is a miss."""
PARTIAL = dropped(DropReason.PARTIAL)

_BY_SEVERITY = (
    BlockStatus.LOADED,
    BlockStatus.PRESENT,
    BlockStatus.STORED,
    BlockStatus.DROPPED,
    BlockStatus.MISSING,
    BlockStatus.CANCELLED,
    BlockStatus.LATE,
    BlockStatus.FAILED,
    BlockStatus.CORRUPT,
)

Outcomes = list[list[BlockOutcome]]


@job_value
class BlockSelection:
    """Blocks of one group that the workers copy: those at `positions` in the keys of the job's group `index`.

    `transfer` is the group that the workers are given, with these blocks alone.
    """

    index: int
    positions: Sequence[int]
    transfer: GPUGroup

    def select(self, chosen: Sequence[int]) -> BlockSelection:
        """Only the `chosen` blocks, by their order in this selection."""
        if len(chosen) == len(self.positions):
            return self
        old, at = self.transfer, np.asarray(chosen, np.int64)
        transfer = replace(
            old,
            keys=tuple(old.keys[i] for i in chosen),
            runs=old.runs.select(at),
            rows=old.rows[at],
            generations=old.generations[at],
        )
        return BlockSelection(self.index, [self.positions[i] for i in chosen], transfer)

    def pages(self, outcomes: Sequence[BlockOutcome]) -> int:
        """The number of GPU pages that the blocks with a good outcome have."""
        runs = self.transfer.runs
        good = np.array([outcome.ok for outcome in outcomes], dtype=np.bool_)
        return len(runs.gpu_blocks) if good.all() else int(runs.counts[good[runs.blocks]].sum())


def select_whole(job: TransferJob, num_groups: int, factor: int) -> tuple[Outcomes, list[BlockSelection]]:
    """The blocks of a store that the workers copy: those whose runs name every sub-block exactly once.

    The outcome of the others is dropped(PARTIAL). Raises UsageError for a job that is not one of the CPU tier's.
    """
    outcomes, selections = select_all(job, num_groups, PARTIAL)
    whole = []
    for selection in selections:
        runs, count = selection.transfer.runs, len(selection.positions)
        if runs.all_whole(count, factor):
            whole.append(selection)
        elif (covered := runs.covers_whole(count, factor)).any():
            whole.append(selection.select(np.flatnonzero(covered).tolist()))
    return outcomes, whole


def select_all(
    job: TransferJob, num_groups: int, outcome: BlockOutcome = CORRUPT
) -> tuple[Outcomes, list[BlockSelection]]:
    """Every block of a job, and for each block the outcome it has if no worker copies it.

    Checks only what this tier indexes by; the GPU tier checks the rest. Raises UsageError for a job that is not one of
    the CPU tier's.
    """
    outcomes, selections = [], []
    for index, group in enumerate(job.gpu_groups):
        count = len(group.keys)
        if not 0 <= group.group < num_groups:
            raise UsageError(f"there is no group {group.group} among {num_groups}")
        if not (len(group.rows) == len(group.generations) == count):
            raise UsageError(f"{count} keys need as many rows and generations")
        if outside(group.runs.blocks, count) is not None:
            raise UsageError("a run reaches outside the job's offloaded blocks")
        outcomes.append([outcome] * count)
        if count:
            selections.append(BlockSelection(index, range(count), group))
    return outcomes, selections


def worst(reports: Sequence[Sequence[BlockOutcome]]) -> Sequence[BlockOutcome]:
    """For each block the gravest outcome that a worker reported; of equally grave ones the first."""
    return [max(outcomes, key=_severity) for outcomes in zip(*reports, strict=True)]


def _severity(outcome: BlockOutcome) -> int:
    return _BY_SEVERITY.index(outcome.status)
