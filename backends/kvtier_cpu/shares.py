"""Which blocks of a job the workers are asked for, and what their answers add up to."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvtier.errors import UsageError
from kvtier.geometry import Geometry
from kvtier.jobs import (
    CORRUPT,
    BlockOutcome,
    BlockStatus,
    DropReason,
    GPURuns,
    GroupTransfer,
    IntArray,
    TransferJob,
    dropped,
    failed,
)

UNSEEN = failed(errno.EIO)
"""Every worker reported success, but not every stamp is there: the row is a miss."""

_SEVERITY = {
    status: rank
    for rank, status in enumerate(
        (
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
    )
}

Outcomes = list[list[BlockOutcome]]


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """The blocks of one group that go to the workers: those at `positions` in the keys of the job's group `index`.

    `transfer` is what the workers get to see, renumbered to these blocks.
    """

    index: int
    positions: IntArray
    transfer: GroupTransfer

    def select(self, chosen: IntArray) -> Share:
        """The share of only the `chosen` blocks, by their order in this one."""
        if len(chosen) == len(self.positions):
            return self
        old = self.transfer
        transfer = replace(
            old,
            keys=tuple(old.keys[i] for i in chosen.tolist()),
            staging=_runs(old).select(chosen),
            slots=old.slots[chosen],
            generations=old.generations[chosen],
        )
        return Share(self.index, self.positions[chosen], transfer)

    def pages(self, outcomes: Sequence[BlockOutcome]) -> int:
        """How many GPU pages the blocks with a good outcome have."""
        good = np.array([outcome.ok for outcome in outcomes], dtype=np.bool_)
        runs = _runs(self.transfer)
        return int(runs.counts[good[runs.blocks]].sum())


def whole_blocks(job: TransferJob, geometry: Geometry) -> tuple[Outcomes, list[Share]]:
    """The shares of a store: only blocks whose runs name every sub-block exactly once; the others are dropped.

    Raises UsageError for a job that is not one of the CPU tier's.
    """
    outcomes, shares = all_blocks(job, geometry, dropped(DropReason.PARTIAL))
    whole = []
    for share in shares:
        covered = _runs(share.transfer).covers_whole(len(share.positions), geometry.factor)
        if covered.any():
            whole.append(share.select(np.flatnonzero(covered)))
    return outcomes, whole


def all_blocks(job: TransferJob, geometry: Geometry, outcome: BlockOutcome = CORRUPT) -> tuple[Outcomes, list[Share]]:
    """Every block of a job as shares, and for each block the outcome it has if no worker is asked for it.

    Raises UsageError for a job that is not one of the CPU tier's.
    """
    shares = []
    for index, group in enumerate(job.groups):
        _check(group, geometry)
        if group.keys:
            shares.append(Share(index, np.arange(len(group.keys), dtype=np.int64), group))
    return [[outcome] * len(group.keys) for group in job.groups], shares


def worst(outcomes: Iterable[BlockOutcome]) -> BlockOutcome:
    """The gravest outcome a worker reported for a block; of equally grave ones the first."""
    return max(outcomes, key=lambda outcome: _SEVERITY[outcome.status])


def as_tuples(outcomes: Outcomes) -> tuple[tuple[BlockOutcome, ...], ...]:
    """Outcomes in the form a JobResult has them."""
    return tuple(tuple(group) for group in outcomes)


def _runs(group: GroupTransfer) -> GPURuns:
    if not isinstance(group.staging, GPURuns):
        raise UsageError("a job of the CPU tier names its GPU blocks by runs, not rows")
    return group.staging


def _check(group: GroupTransfer, geometry: Geometry) -> None:
    runs, blocks = _runs(group), len(group.keys)
    if not 0 <= group.group < geometry.num_groups:
        raise UsageError(f"there is no group {group.group} among {geometry.num_groups}")
    if not (len(group.slots) == len(group.generations) == blocks):
        raise UsageError(f"{blocks} keys need as many rows and generations")
    if len(runs.blocks) and not (int(runs.blocks.min()) >= 0 and int(runs.blocks.max()) < blocks):
        raise UsageError("a run reaches outside the job's offloaded blocks")
