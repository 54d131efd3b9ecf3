"""Transfer jobs: what is to move where, and what became of each block.

A job moves offloaded blocks of several groups between a tier and its *staging*: GPU blocks for the CPU tier, rows of
the shared region for every tier below. Which GPU pages make up an offloaded block is said by runs, so unaligned
heads and tails and interior holes (null blocks of a sliding window) are explicit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from kvtier.errors import UsageError
from kvtier.keys import GroupIndex, JobId, OffloadKey

IntArray = npt.NDArray[np.int64]


def int_array(values: Sequence[int] | IntArray) -> IntArray:
    """A contiguous int64 array of ids."""
    return np.ascontiguousarray(values, dtype=np.int64)


FEW = 64
"""Up to so many numbers, a list of them is looked at faster than an array."""


def distinct(values: IntArray) -> IntArray:
    """The distinct values, ascending.

    Not `np.unique`: from 2.3 on that lets the GIL go inside C++, and a daemon thread that is in it when the interpreter
    ends aborts the whole process ("terminate called without an active exception").
    """
    ordered = np.sort(values)
    return ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))] if len(ordered) else ordered


NO_IDS: IntArray = int_array(())


def no_ids() -> IntArray:
    """The empty array, as a default of fields."""
    return NO_IDS


class JobKind(StrEnum):
    STORE = "store"
    LOAD = "load"


class BlockStatus(StrEnum):
    """What became of one offloaded block of a job. Only STORED, LOADED and PRESENT are success."""

    STORED = "stored"
    LOADED = "loaded"
    PRESENT = "present"
    DROPPED = "dropped"
    FAILED = "failed"
    CORRUPT = "corrupt"
    MISSING = "missing"
    CANCELLED = "cancelled"
    LATE = "late"


class DropReason(StrEnum):
    """Why a block was not kept. A drop is a choice or a lack of room, not an error."""

    NO_ROW = "no_row"
    NO_SLOT = "no_slot"
    NO_REGION = "no_region"
    BACKLOG = "backlog"
    TIER_DOWN = "tier_down"
    PARTIAL = "partial"
    IN_FLIGHT = "in_flight"
    KEY_TOO_LONG = "key_too_long"
    DISK_FULL = "disk_full"
    RESET = "reset"
    CLOSING = "closing"


@dataclass(frozen=True, slots=True)
class BlockOutcome:
    """The outcome of one block: a status, the reason of a drop, the errno of a failure (0 when there is none)."""

    status: BlockStatus
    reason: DropReason | None = None
    errno: int = 0

    @property
    def ok(self) -> bool:
        """True when the block's bytes are where the job wanted them."""
        return self.status in (BlockStatus.STORED, BlockStatus.LOADED, BlockStatus.PRESENT)


STORED = BlockOutcome(BlockStatus.STORED)
LOADED = BlockOutcome(BlockStatus.LOADED)
PRESENT = BlockOutcome(BlockStatus.PRESENT)
CORRUPT = BlockOutcome(BlockStatus.CORRUPT)
MISSING = BlockOutcome(BlockStatus.MISSING)
CANCELLED = BlockOutcome(BlockStatus.CANCELLED)
LATE = BlockOutcome(BlockStatus.LATE)
_DROPPED = {reason: BlockOutcome(BlockStatus.DROPPED, reason) for reason in DropReason}


def dropped(reason: DropReason) -> BlockOutcome:
    """The outcome of a block that was not kept."""
    return _DROPPED[reason]


def failed(errno: int) -> BlockOutcome:
    """The outcome of a block whose I/O failed with an errno."""
    return BlockOutcome(BlockStatus.FAILED, None, errno)


@dataclass(frozen=True, slots=True, eq=False)
class GPURuns:
    """Which GPU blocks hold which sub-blocks: run i covers sub-blocks `firsts[i] .. firsts[i] + counts[i] - 1` of
    offloaded block `blocks[i]` (a position in the group's keys).

    `gpu_blocks` lists the GPU block ids of all runs one after another; its length is `counts.sum()`.
    """

    blocks: IntArray
    firsts: IntArray
    counts: IntArray
    gpu_blocks: IntArray

    def __post_init__(self) -> None:
        if not (len(self.blocks) == len(self.firsts) == len(self.counts)):
            raise UsageError("blocks, firsts and counts of runs must be of one length")
        if int(self.counts.sum()) != len(self.gpu_blocks):
            raise UsageError(
                f"runs cover {int(self.counts.sum())} sub-blocks but name {len(self.gpu_blocks)} GPU blocks"
            )

    @staticmethod
    def whole(gpu_blocks: Sequence[int] | IntArray, factor: int = 1) -> GPURuns:
        """Runs for whole offloaded blocks: `factor` consecutive entries of `gpu_blocks` each."""
        ids = int_array(gpu_blocks)
        if len(ids) % factor:
            raise UsageError(f"{len(ids)} GPU blocks are no whole number of offloaded blocks of {factor}")
        count = len(ids) // factor
        return GPURuns(
            np.arange(count, dtype=np.int64),
            np.zeros(count, dtype=np.int64),
            np.full(count, factor, dtype=np.int64),
            ids,
        )

    def pages(self) -> tuple[IntArray, IntArray, IntArray]:
        """One entry for each GPU page: (position of the offloaded block, sub-block, GPU block id), each (pages,)."""
        blocks = np.repeat(self.blocks, self.counts)
        starts = np.cumsum(self.counts) - self.counts
        within = np.arange(len(self.gpu_blocks), dtype=np.int64) - np.repeat(starts, self.counts)
        return blocks, np.repeat(self.firsts, self.counts) + within, self.gpu_blocks

    def covers_whole(self, num_blocks: int, factor: int) -> npt.NDArray[np.bool_]:
        """For each of `num_blocks` positions: True if every sub-block 0..factor-1 is written exactly once."""
        blocks, subs, _ = self.pages()
        inside = (blocks >= 0) & (blocks < num_blocks) & (subs >= 0) & (subs < factor)
        if not bool(inside.all()):
            raise UsageError("a run reaches outside the job's offloaded blocks")
        written = np.bincount(blocks * factor + subs, minlength=num_blocks * factor)
        once: npt.NDArray[np.bool_] = (written.reshape(num_blocks, factor) == 1).all(axis=1)
        return once

    def select(self, positions: IntArray) -> GPURuns:
        """The runs of the offloaded blocks at `positions`, renumbered to the order in `positions`."""
        return RunIndex(self).select(positions)


class RunIndex:
    """Cuts a group's runs into those of chosen offloaded blocks without walking the whole list."""

    def __init__(self, runs: GPURuns) -> None:
        order = np.argsort(runs.blocks, kind="stable")
        starts = np.cumsum(runs.counts) - runs.counts
        self.blocks = runs.blocks[order]
        self.firsts = runs.firsts[order]
        self.counts = runs.counts[order]
        self.starts = starts[order]
        self.gpu_blocks = runs.gpu_blocks

    def select(self, positions: IntArray) -> GPURuns:
        """The runs of the offloaded blocks at `positions`, renumbered 0.. in that order."""
        low = np.searchsorted(self.blocks, positions, side="left")
        high = np.searchsorted(self.blocks, positions, side="right")
        runs_each = high - low
        total = int(runs_each.sum())
        offsets = np.cumsum(runs_each) - runs_each
        index = np.arange(total, dtype=np.int64) + np.repeat(low - offsets, runs_each)
        counts = self.counts[index]
        pages = int(counts.sum())
        page_offsets = np.cumsum(counts) - counts
        page = (
            np.arange(pages, dtype=np.int64) - np.repeat(page_offsets, counts) + np.repeat(self.starts[index], counts)
        )
        new_blocks = np.repeat(np.arange(len(positions), dtype=np.int64), runs_each)
        return GPURuns(new_blocks, self.firsts[index], counts, self.gpu_blocks[page])


@dataclass(frozen=True, slots=True, eq=False)
class GPULoadStoreSpec:
    """Where blocks are on the GPU, in the compact form engines hand over.

    `block_ids` lists the GPU blocks of all groups one group after another, `group_sizes[g]` says how many belong to
    group g, and `block_indices[g]` is the logical index of group g's first GPU block in its request, which places a
    head that does not begin on an offloaded block's boundary.
    """

    block_ids: IntArray
    group_sizes: tuple[int, ...]
    block_indices: tuple[int, ...]

    def runs(self, factor: int) -> tuple[GPURuns, ...]:
        """One GPURuns for each group; offloaded block 0 of a group is the one its first GPU block lies in."""
        if len(self.group_sizes) != len(self.block_indices):
            raise UsageError("group_sizes and block_indices must name the same groups")
        if sum(self.group_sizes) != len(self.block_ids):
            raise UsageError(f"group_sizes add up to {sum(self.group_sizes)}, not to {len(self.block_ids)} block ids")
        result = []
        start = 0
        for size, first in zip(self.group_sizes, self.block_indices, strict=True):
            logical = first + np.arange(size, dtype=np.int64)
            ids = self.block_ids[start : start + size]
            start += size
            if not size:
                result.append(GPURuns(NO_IDS, NO_IDS, NO_IDS, NO_IDS))
                continue
            block = logical // factor - first // factor
            heads = np.flatnonzero(np.diff(block, prepend=-1))
            counts = np.diff(heads, append=size)
            result.append(GPURuns(block[heads], logical[heads] % factor, int_array(counts), ids))
        return tuple(result)


Staging = GPURuns | IntArray


@dataclass(frozen=True, slots=True, eq=False)
class GroupTransfer:
    """One group's share of a job.

    `staging` says where the blocks are on the upper side: GPURuns for a job on the CPU tier, one row for each key
    for a job on a lower tier. `slots` and `generations` (one for each key) say where they are in an owned tier (for
    the CPU tier: the rows); they are empty for shared tiers and in jobs that an engine hands to the whole stack.
    """

    group: GroupIndex
    keys: tuple[OffloadKey, ...]
    staging: Staging
    slots: IntArray = field(default_factory=no_ids)
    generations: IntArray = field(default_factory=no_ids)


@dataclass(frozen=True, slots=True)
class RegionCut:
    """A region of a tier is given to slots of one size. Nothing of an earlier generation in it is valid."""

    region: int
    slot_bytes: int
    generation: int


@dataclass(frozen=True, slots=True, eq=False)
class TransferJob:
    """A unit of work for one tier: groups of blocks, one direction, one deadline (seconds on the stack's clock).

    `cuts` are the regions that must be cut before the job's first write into them; one may be told more than once, and
    a generation that a region already has is no new cut. `epoch` is the namespace's epoch that the stored blocks
    belong to.
    """

    job_id: JobId
    kind: JobKind
    groups: tuple[GroupTransfer, ...]
    deadline: float | None = None
    epoch: int = 0
    cuts: tuple[RegionCut, ...] = ()

    @property
    def num_blocks(self) -> int:
        return sum(len(group.keys) for group in self.groups)


@dataclass(frozen=True, slots=True, eq=False)
class JobResult:
    """What became of each block: `outcomes[i][j]` belongs to key j of the job's i-th group.

    `bytes_moved` counts payload bytes that really moved, `seconds` the time from start to end of the transfer.
    """

    job_id: JobId
    outcomes: tuple[tuple[BlockOutcome, ...], ...]
    bytes_moved: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """True when every block succeeded."""
        return all(outcome.ok for group in self.outcomes for outcome in group)

    @staticmethod
    def uniform(job: TransferJob, outcome: BlockOutcome) -> JobResult:
        """The same outcome for every block of a job, no bytes moved."""
        return JobResult(job.job_id, tuple((outcome,) * len(group.keys) for group in job.groups))
