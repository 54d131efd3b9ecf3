"""Transfer jobs: what is to move where, and what became of each block.

A job moves offloaded blocks of several groups one way. There are two kinds of groups: between GPU blocks and CPU rows
(`GPUGroup`: the jobs of engines and of the CPU tier), and between CPU rows and a lower tier (`RowGroup`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter

from kvtier.errors import UsageError
from kvtier.types.arrays import NO_IDS, IntArray
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.keys import GROUP_BYTES, GroupIndex, JobId, OffloadKey
from kvtier.types.values import job_value


class JobKind(StrEnum):
    """The direction of a job: STORE into a tier, LOAD from it."""

    STORE = "store"
    LOAD = "load"


class BlockStatus(StrEnum):
    """The end of one offloaded block of a job. Only STORED, LOADED and PRESENT are success."""

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
    HELD_BACK = "held_back"
    WRITE_BUDGET = "write_budget"
    BYPASSED = "bypassed"


class SkipReason(StrEnum):
    """Why a block was not sent to a tier although the tier would have taken it. Nothing is lost by it.

    NOT_ADMITTED: its use did not earn it a write so far. BYPASSED: the tier's policy values what it would evict for it
    more. ALREADY_THERE: the tier has it.
    """

    NOT_ADMITTED = "not_admitted"
    BYPASSED = "bypassed"
    ALREADY_THERE = "already_there"


@dataclass(frozen=True, slots=True)
class BlockOutcome:
    """The outcome of one block: a status, the reason of a drop, the errno of a failure (0 when there is none).

    `ok` is True when the block's bytes are where the job wanted them.
    """

    status: BlockStatus
    reason: DropReason | None = None
    errno: int = 0
    ok: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        good = (BlockStatus.STORED, BlockStatus.LOADED, BlockStatus.PRESENT)
        object.__setattr__(self, "ok", self.status in good)


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


PARTIAL = dropped(DropReason.PARTIAL)


def failed(errno: int) -> BlockOutcome:
    """The outcome of a block whose I/O failed with an errno."""
    return BlockOutcome(BlockStatus.FAILED, None, errno)


KEYS_OF = attrgetter("keys")
"""The keys of a group; a loop over groups calls no function of Python for it."""


@job_value
class GPUGroup:
    """Blocks of one group in a job between GPU blocks and CPU rows: an engine's job, or a job of the CPU tier.

    `runs` says which GPU blocks hold them. `rows` and `generations` name the row of each key and the generation of its
    fill; they are empty in the jobs that an engine hands to the whole stack, which have no rows yet.
    """

    group: GroupIndex
    keys: tuple[OffloadKey, ...]
    runs: GPURuns
    rows: IntArray = field(default_factory=NO_IDS.view)
    generations: IntArray = field(default_factory=NO_IDS.view)


@job_value
class RowGroup:
    """Blocks of one group in a job between CPU rows and a lower tier, one row for each key.

    `slots` and `generations` say where the blocks are in an owned tier; they are empty for a shared one.
    """

    group: GroupIndex
    keys: tuple[OffloadKey, ...]
    rows: Sequence[int]
    slots: Sequence[int] = ()
    generations: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class RegionFormat:
    """A region of a tier is given to slots of one size. Nothing of an earlier generation in it is valid."""

    region: int
    slot_bytes: int
    generation: int


@job_value
class TransferJob:
    """A unit of work for one tier: groups of blocks, one direction, one deadline (seconds on the stack's clock).

    `formats` are the regions that must be formatted before the job's first write into them. Several jobs may name the
    same format; a generation that the region already has changes nothing. `epoch` is the namespace's epoch that the
    stored blocks belong to. `urgent`: an engine waits for it within a step; a GPU tier with `urgent_lane` does not
    queue it behind other jobs.
    """

    job_id: JobId
    kind: JobKind
    groups: tuple[GPUGroup | RowGroup, ...]
    deadline: float | None = None
    epoch: int = 0
    formats: tuple[RegionFormat, ...] = ()
    urgent: bool = False

    @property
    def num_blocks(self) -> int:
        """Offloaded blocks of all groups."""
        return sum(map(len, map(KEYS_OF, self.groups)))

    @property
    def gpu_groups(self) -> tuple[GPUGroup, ...]:
        """The groups of a job between GPU blocks and rows. Raises UsageError for any other job."""
        for group in self.groups:
            if not isinstance(group, GPUGroup):
                raise UsageError(f"job {self.job_id} names rows where GPU blocks are needed")
        return self.groups  # type: ignore[return-value]  # checked just now

    @property
    def row_groups(self) -> tuple[RowGroup, ...]:
        """The groups of a job between rows and a lower tier. Raises UsageError for any other job."""
        for group in self.groups:
            if not isinstance(group, RowGroup):
                raise UsageError(f"job {self.job_id} names GPU blocks where rows are needed")
        return self.groups  # type: ignore[return-value]  # checked just now


@job_value
class JobResult:
    """The outcomes of a job: `outcomes[i][j]` belongs to key j of the job's i-th group.

    `bytes_moved` counts payload bytes that really moved, `seconds` the time from start to end of the transfer.
    """

    job_id: JobId
    outcomes: tuple[tuple[BlockOutcome, ...], ...]
    bytes_moved: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """True when every block succeeded."""
        for outcomes in self.outcomes:
            for outcome in outcomes:
                if not outcome.ok:
                    return False
        return True

    def fits(self, job: TransferJob) -> bool:
        """True when there is one outcome for each block of the job."""
        return list(map(len, self.outcomes)) == list(map(len, map(KEYS_OF, job.groups)))

    @staticmethod
    def uniform(job: TransferJob, outcome: BlockOutcome) -> JobResult:
        """The same outcome for every block of a job, no bytes moved."""
        return JobResult(job.job_id, tuple((outcome,) * len(group.keys) for group in job.groups))


def by_group(keys: Sequence[OffloadKey]) -> dict[GroupIndex, list[int]]:
    """The places of keys by their group, each group where its first key is."""
    places: dict[bytes, list[int]] = {}
    for at, key in enumerate(keys):
        places.setdefault(key[-GROUP_BYTES:], []).append(at)
    return {GroupIndex(int.from_bytes(suffix, "big")): members for suffix, members in places.items()}
