"""The contract between the stack and its tiers: one async LoadStore for every medium."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvtier.geometry import Geometry
from kvtier.jobs import NO_IDS, IntArray, JobResult, RegionCut, TransferJob
from kvtier.keys import Medium, OffloadKey
from kvtier.namespace import Namespace
from kvtier.options import TierOptions

if TYPE_CHECKING:
    import torch

Clock = Callable[[], float]
"""Seconds on a monotonic clock; handed in, so a simulator can replace it."""


class LookupResult(StrEnum):
    """HIT: loadable now. HIT_PENDING: on its way or in a lower tier. RETRY: presence unknown yet. MISS: not here."""

    HIT = "hit"
    HIT_PENDING = "hit_pending"
    RETRY = "retry"
    MISS = "miss"


class Ownership(StrEnum):
    """OWNED: placement and eviction live in the control plane. SHARED: in the backend; other hosts write too."""

    OWNED = "owned"
    SHARED = "shared"


class Rows(Protocol):
    """The shared region as lower tiers and workers see it.

    `view` is a writable zero-copy buffer of shape (num_rows, row_bytes), uint8. Stamps make a fill visible: a row may
    become ready only when every worker with a slice of its own has stamped it with the generation the fill was issued
    for.
    """

    @property
    def num_rows(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def view(self) -> npt.NDArray[np.uint8]: ...
    def stamp(self, worker: int, rows: IntArray, generations: IntArray) -> None:
        """Worker `worker` says: its whole slice of these rows holds these generations. Only that worker calls it."""

    def stamped(self, rows: IntArray, generations: IntArray) -> npt.NDArray[np.bool_]:
        """For each row: True if every worker with a slice of its own stamped it with that generation."""

    def end_use(self, worker: int, rows: IntArray) -> None:
        """Worker `worker` has ended one use (either direction) of each of these rows."""

    def uses_ended(self, worker: int, rows: IntArray) -> IntArray:
        """How many uses of each row a worker has ended so far, shape (rows,)."""

    def checksum(self, row: int) -> bytes:
        """The 16-byte checksum that travels with the row (xxh3-128 of the group's aligned bytes)."""

    def set_checksum(self, row: int, digest: bytes) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class KVCaches:
    """An engine's KV cache on one worker: `tensors[i]` is an 8-bit tensor of shape (num_blocks, page bytes), on any
    device, possibly strided; the groups of the layout refer to tensors by index."""

    tensors: Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class TierContext:
    """What a backend is given when it is opened.

    `rows` is None for the tiers that come before the region exists (GPU and CPU). `workers` (CPU tier only) are the
    LoadStores that copy between GPU blocks and rows, one for each worker: the GPU tier of this process, or links to
    workers in other processes.
    """

    name: str
    geometry: Geometry
    namespace: Namespace
    clock: Clock
    engine_id: str = ""
    worker: int = 0
    kv_caches: KVCaches | None = None
    rows: Rows | None = None
    workers: Sequence[LoadStore] = ()


@dataclass(frozen=True, slots=True)
class SlotSpace:
    """What an owned tier offers for placement: equal regions, each cut into slots of one size at a time.

    `regions_by_root[r]` regions belong to root r; regions are numbered over the roots in order. `slot_bytes[g]` is the
    size of a slot for group g. A slot's id is `region * slots_per_region + index` with
    `slots_per_region = region_bytes // min(slot_bytes)`.
    """

    region_bytes: int
    regions_by_root: tuple[int, ...]
    slot_bytes: tuple[int, ...]

    @property
    def num_regions(self) -> int:
        return sum(self.regions_by_root)

    @property
    def slots_per_region(self) -> int:
        return self.region_bytes // min(self.slot_bytes)

    @property
    def num_slot_ids(self) -> int:
        return self.num_regions * self.slots_per_region


@dataclass(frozen=True, slots=True, eq=False)
class ForeignBlocks:
    """What another namespace left in an owned tier; it stays for as long as there is room beside it.

    `slots` hold its blocks, the oldest first. `regions` are cut to sizes that this layout does not use, and hold
    blocks of this namespace and of those that come before it.
    """

    slots: IntArray = field(default_factory=lambda: NO_IDS)
    regions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Recovered:
    """What an owned tier found in itself when it was opened: `keys[i]` is whole in `slots[i]` with `generations[i]`.

    Ordered from the oldest generation to the newest, each key once. A cut with no slot size only says which
    generations of a region were used. `foreign` stands in the order in which it may be overwritten: when no other
    slot is left, and before a block of our own is evicted.
    """

    keys: Sequence[OffloadKey] = ()
    slots: IntArray = field(default_factory=lambda: NO_IDS)
    generations: IntArray = field(default_factory=lambda: NO_IDS)
    cuts: tuple[RegionCut, ...] = ()
    foreign: tuple[ForeignBlocks, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """What a tier is, once open. `space` is None for shared tiers. `mode` and `notes` are for people."""

    capacity_bytes: int
    space: SlotSpace | None = None
    recovered: Recovered = field(default_factory=Recovered)
    epoch: int = 0
    mode: str = ""
    notes: tuple[str, ...] = ()


class LoadStore(ABC):
    """One tier's data plane. Constructors do no I/O; `open` does all of it.

    A load that reports LOADED returned exactly the bytes stored under that key in this namespace; everything else is
    an outcome with a reason. No method raises for bad luck. Buffers named by a job belong to the tier until the call
    returns, also when it is cancelled: cancelling never stops I/O under way.
    """

    medium: ClassVar[Medium]
    BLOCK_SIZE_ALIGNMENT: ClassVar[int] = 1
    ownership: ClassVar[Ownership] = Ownership.OWNED
    Options: ClassVar[type[TierOptions]]
    options: TierOptions

    @abstractmethod
    def __init__(self, options: TierOptions) -> None:
        """Keep the options as `self.options`; no I/O."""

    @abstractmethod
    async def open(self, context: TierContext) -> Opened:
        """Acquire everything the tier needs. Raises ResourceError or ConfigError and leaves nothing behind."""

    @abstractmethod
    async def lookup(self, keys: Sequence[OffloadKey]) -> Sequence[LookupResult]:
        """Presence of each key. Owned tiers are answered by the control plane and are not asked."""

    @abstractmethod
    async def store(self, job: TransferJob) -> JobResult:
        """Move the job's blocks from its staging into this tier; one outcome for each block."""

    @abstractmethod
    async def load(self, job: TransferJob) -> JobResult:
        """Move the job's blocks from this tier into its staging; one outcome for each block."""

    @abstractmethod
    async def close(self) -> None:
        """End I/O within a deadline and release everything. Idempotent."""


@runtime_checkable
class ProbesAlignment(Protocol):
    """A backend that can ask the real device for an alignment above its class's floor (a power of two)."""

    async def probe_alignment(self) -> int: ...


@runtime_checkable
class Resettable(Protocol):
    """A tier that outlives the process: raising the epoch makes everything before it unreachable, durably."""

    async def reset(self, epoch: int) -> None: ...


@runtime_checkable
class ProvidesRows(Protocol):
    """The tier that owns the shared region."""

    @property
    def rows(self) -> Rows: ...


@runtime_checkable
class JoinsRows(Protocol):
    """A tier whose region processes of other workers can map, without owning it, and close again."""

    async def join(self, context: TierContext, note: str = "") -> Rows: ...
    def worker_notes(self) -> list[str]: ...
