"""The contract between the stack and its tiers. The author of a tier needs this module and `kvtier.types`.

A tier is a subclass of `LoadStore`. The stack opens it once, hands it jobs on one event loop, several at a time, and
closes it. A job names blocks by key, says where their bytes are on the upper side (rows, or GPU blocks) and, for an
owned tier, where they belong in the tier (`slots`, `generations`). The answer is one outcome for each block.

There are two kinds of tier below the CPU:

* An *owned* tier has one owner, this stack. The control plane places blocks in its slots, evicts them and answers
  lookups. The tier says in `Opened.space` which slots it has, and in `Opened.recovered` which blocks it still holds.
* A *shared* tier places and evicts by itself, because other hosts write too. Its `Opened.space` is None, and it
  implements `AnswersLookups` and `Resettable`.

Other abilities are optional protocols, recognized by the presence of their methods: `ProbesAlignment`, `Resettable`,
`FencesCopies`, `ProvidesRows`, `SealsRows` and `FitsGeometry` here, and `DryRuns` in `kvtier.tier.registry`. The tools
read what a tier keeps through an inspector of its own (`kvtier.tier.inspection`).

`kvtier.testing.conformance` holds a tier to all of this; `tests/conformance/example_backend` is a small whole tier.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvtier.errors import UsageError
from kvtier.options import TierOptions
from kvtier.tier.block_age import BlockAges
from kvtier.types.arrays import NO_IDS, IntArray
from kvtier.types.geometry import Geometry
from kvtier.types.jobs import JobResult, RegionFormat, TransferJob
from kvtier.types.keys import GroupIndex, Medium, OffloadKey
from kvtier.types.namespace import Namespace

if TYPE_CHECKING:
    import asyncio

    import torch

Clock = Callable[[], float]
"""Seconds on a monotonic clock. It is passed in, so that a simulator can replace it."""


class LookupResult(StrEnum):
    """The answer of a lookup of a key.

    HIT: loadable now. HIT_PENDING: being stored, or in a lower tier. RETRY: not known yet, because the lookup in a
    shared tier is in flight. MISS: not here. A tier that implements `AnswersLookups` answers HIT or MISS.
    """

    HIT = "hit"
    HIT_PENDING = "hit_pending"
    RETRY = "retry"
    MISS = "miss"


class LoadStore(ABC):
    """The data plane of one tier: moves the bytes of blocks, and verifies what it moved.

    Promises that every tier keeps:

    * LOADED means that the row holds exactly the bytes stored under that key in this namespace. Everything else is an
      outcome with a reason.
    * I/O errors, full disks and damaged blocks are outcomes, never exceptions. UsageError means a defect of the caller.
    * The constructor does no I/O; `open` does all of it.
    * The memory a job names belongs to the tier until the call returns. A cancelled call returns only after the I/O in
      flight has ended, because I/O that has begun cannot be taken back.

    All calls come from the event loop that called `open`, and none may block it: blocking work belongs on threads of
    the tier's own. `store` and `load` are called many times at once.

    `BLOCK_SIZE_ALIGNMENT`: offsets and lengths of the tier's I/O are multiples of this many bytes. Rows are aligned to
    the least common multiple over the tiers of a stack.
    """

    medium: ClassVar[Medium]
    BLOCK_SIZE_ALIGNMENT: ClassVar[int] = 1
    Options: ClassVar[type[TierOptions]]
    options: TierOptions

    def __init__(self, options: TierOptions) -> None:
        """Keep the options as `self.options`; no I/O. Raises UsageError for the options of another tier."""
        if not isinstance(options, self.Options):
            raise UsageError(f"{type(self).__name__} takes {self.Options.__name__}, not {type(options).__name__}")
        self.options = options

    @abstractmethod
    async def open(self, context: TierContext) -> Opened:
        """Acquire everything the tier needs. Raises ResourceError or ConfigError and leaves nothing behind then."""

    @abstractmethod
    async def store(self, job: TransferJob) -> JobResult:
        """Copy the job's blocks from its staging into this tier; one outcome for each block.

        The bytes of a block are the first `geometry.aligned_bytes(group)` of its row; `Rows.checksum` is theirs.
        """

    @abstractmethod
    async def load(self, job: TransferJob) -> JobResult:
        """Copy the job's blocks from this tier into its staging; one outcome for each block.

        A tier below the CPU verifies the bytes first, and records their checksum by `Rows.set_checksum`. After any
        outcome but LOADED the row's content is undefined and not used.
        """

    @abstractmethod
    async def close(self) -> None:
        """End the I/O within a deadline and release everything. Jobs in flight still return outcomes. Idempotent."""


@runtime_checkable
class AnswersLookups(Protocol):
    """A shared tier. It knows what it holds, so it answers lookups; the control plane cannot."""

    async def lookup(self, keys: Sequence[OffloadKey]) -> Sequence[LookupResult]:
        """HIT or MISS for each key. A HIT is a hint: the load that follows may still find the block gone."""


@runtime_checkable
class ProbesAlignment(Protocol):
    """A tier whose device may need a larger alignment than BLOCK_SIZE_ALIGNMENT says."""

    async def probe_alignment(self) -> int:
        """The alignment in bytes that the device needs, a power of two. Called before `open`."""


@runtime_checkable
class Resettable(Protocol):
    """A tier whose blocks outlive the process."""

    async def reset(self, epoch: int) -> None:
        """Make every block stored under an earlier epoch of this namespace unreachable, durably."""


@runtime_checkable
class StatesEpoch(Protocol):
    """A tier whose store states the epoch of a namespace to other processes."""

    async def state_epoch(self, epoch: int) -> int:
        """Before the first job: have the store state this epoch, unless it states another one than when it was opened.
        Returns what it states, which holds in the tier. Raises ResourceError."""

    def leave_epoch(self) -> None:
        """Find and store nothing any more that other processes store or find, until the tier is opened again. A reset
        of its stack failed, so others may come to this epoch with the weights of before."""


@runtime_checkable
class FencesCopies(Protocol):
    """A tier that may copy the engine's GPU blocks beside the engine's own work on a device."""

    @property
    def beside_engine(self) -> bool:
        """True if it does so, now that it is open. Nothing needs a fence in host memory."""

    def fence(self) -> None:
        """Copies that are submitted from now on begin after the work that the calling thread gave its stream so far.

        From any thread. Never raises because of the device, and waits for nothing.
        """


@runtime_checkable
class ProvidesRows(Protocol):
    """The tier that owns the shared region: the CPU tier."""

    @property
    def rows(self) -> Rows:
        """The region. Raises UsageError while the tier is not open."""


@runtime_checkable
class SealsRows(Protocol):
    """A CPU tier whose rows may be filled by processes that copy into them themselves."""

    def seal(self, filled: Sequence[tuple[GroupIndex, Sequence[int]]]) -> asyncio.Future[None] | None:
        """Seal rows that hold whole blocks, given as (group, rows): zeros behind each block, and its checksum.

        Returns None if that is done, or what is done when it is. Call in the event loop.
        """


@runtime_checkable
class AttachesRows(Protocol):
    """A CPU tier whose rows a process can map by descriptors that another one passed on."""

    @classmethod
    def attach(cls, context: TierContext, num_rows: int, rows_fd: int, control_fd: int) -> Rows:
        """The rows, as worker `context.worker` uses them. The caller keeps the descriptors. Raises RegionError."""


@runtime_checkable
class FitsGeometry(Protocol):
    """A CPU tier whose blocks may be of another length than its rows were made for."""

    def use_geometry(self, geometry: Geometry) -> None:
        """Before the first job: blocks are as long as this geometry says, in rows that stay as they are.

        Raises GeometryError if a row is too short for one.
        """


class Rows(Protocol):
    """Rows of bytes in host memory that the tiers address in place. A row holds one block, and the block's checksum."""

    @property
    def num_rows(self) -> int:
        """The number of rows."""

    @property
    def row_bytes(self) -> int:
        """Bytes from one row to the next: the aligned size of the largest group."""

    @property
    def view(self) -> npt.NDArray[np.uint8]:
        """All rows as one writable array without a copy: shape (num_rows, row_bytes), uint8, contiguous."""

    def checksum(self, row: int) -> bytes:
        """The 16-byte checksum recorded for a row: xxh3-128 of the group's aligned bytes."""

    def set_checksum(self, row: int, digest: bytes) -> None:
        """Record the checksum of what a row holds now."""


@dataclass(frozen=True, slots=True, eq=False)
class TierContext:
    """All that a tier is given when it is opened.

    `rows` are those of the region; the CPU tier gets None, because it makes the region. `workers` is for the CPU tier
    alone: the tiers that copy between GPU blocks and rows, one for each worker of the engine. `kv_caches` and `worker`
    are for those: `kv_caches[i]` has an 8-bit type and the shape (num_blocks, page bytes), on any device, perhaps
    strided; the groups of the layout refer to tensors by index. `new_epoch` is for tiers whose blocks outlive the
    process: the epoch that a namespace begins at in a store that states none of it; None: the tier's own choice.
    """

    name: str
    geometry: Geometry
    namespace: Namespace
    clock: Clock
    worker: int = 0
    kv_caches: Sequence[torch.Tensor] | None = None
    rows: Rows | None = None
    workers: Sequence[LoadStore] = ()
    new_epoch: int | None = None


@dataclass(frozen=True, slots=True)
class SlotSpace:
    """The space of an owned tier: regions of equal size, each formatted into slots of one size at a time.

    `regions_by_root[r]` regions belong to root r; regions are numbered over the roots in order. `slot_bytes[g]` is the
    size of a slot for group g. A slot's id is `region * slots_per_region + index` with
    `slots_per_region = region_bytes // min(slot_bytes)`.
    """

    region_bytes: int
    regions_by_root: tuple[int, ...]
    slot_bytes: tuple[int, ...]

    @classmethod
    def of_slots(cls, num_slots: int, num_groups: int = 1) -> SlotSpace:
        """The space of a tier without regions: `num_slots` slots, ids from 0, each for a block of any group."""
        return cls(num_slots, (1,), (1,) * num_groups)

    @property
    def num_regions(self) -> int:
        """Regions of all roots."""
        return sum(self.regions_by_root)

    @property
    def slots_per_region(self) -> int:
        """Slot ids that a region takes up: its slots when it is formatted for the smallest size."""
        return self.region_bytes // min(self.slot_bytes)

    @property
    def num_slot_ids(self) -> int:
        """The largest slot id and one."""
        return self.num_regions * self.slots_per_region


@dataclass(frozen=True, slots=True, eq=False)
class ForeignBlocks:
    """Blocks of another namespace in an owned tier. They stay for as long as there is room beside them.

    `slots` hold those blocks, the oldest first. `regions` are formatted for sizes that this layout does not use; they
    hold blocks of this namespace and of those that come before it in `Recovered.foreign`.
    """

    slots: IntArray = field(default_factory=lambda: NO_IDS)
    regions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Recovered:
    """The blocks that an owned tier found on its devices when it was opened: `keys[i]` is whole in `slots[i]` with
    `generations[i]`.

    The order is from the oldest generation to the newest, each key once. `formats` says how the regions are
    formatted; one with a slot size of 0 only says which generations were used in a region. `foreign` is in the order
    in which it may be overwritten: when no other slot is left, and before a block of our own is evicted.
    """

    keys: Sequence[OffloadKey] = ()
    slots: IntArray = field(default_factory=lambda: NO_IDS)
    generations: IntArray = field(default_factory=lambda: NO_IDS)
    formats: tuple[RegionFormat, ...] = ()
    foreign: tuple[ForeignBlocks, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """The facts of an open tier. `space` is None for a shared tier. `mode` and `notes` are for people to read, `layout`
    and `io_engine` what of `mode` is a name: how blocks lie in the tier, and what reads and writes them.

    `ages`, of an owned tier: its generations are wall-clock times, and `recovered` has no block that is too old.
    `open_seconds` is how long opening took, which the stack fills in.

    For shared tiers, which other hosts write too. `is_new_epoch`: the store stated no epoch of the namespace before; a
    lost one may have been further. `look_up_before_store`: a lookup of a job's keys costs much less than to store them,
    so the stack makes one before each store and sends only what is not there. `probe_prefix`: each key of a lookup
    costs a request, so the stack looks up few of a prompt's blocks; those before one that is there count as there too.
    """

    capacity_bytes: int
    space: SlotSpace | None = None
    recovered: Recovered = field(default_factory=Recovered)
    epoch: int = 0
    mode: str = ""
    layout: str = ""
    io_engine: str = ""
    notes: tuple[str, ...] = ()
    ages: BlockAges | None = None
    open_seconds: float = 0.0
    is_new_epoch: bool = False
    look_up_before_store: bool = False
    probe_prefix: bool = False
