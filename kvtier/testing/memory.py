"""Tiers in memory, owned and shared: to test stacks without a disk, and to read before writing a backend."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field

from kvtier.errors import UsageError
from kvtier.options import ByteSize, LowerTierOptions, TierOptions
from kvtier.tier.checksum import checksum
from kvtier.tier.contract import LoadStore, LookupResult, Opened, Recovered, SlotSpace, TierContext
from kvtier.types.arrays import int_array
from kvtier.types.jobs import (
    CORRUPT,
    LATE,
    LOADED,
    MISSING,
    STORED,
    BlockOutcome,
    DropReason,
    JobKind,
    JobResult,
    RegionFormat,
    RowGroup,
    TransferJob,
    dropped,
)
from kvtier.types.keys import Medium, OffloadKey

Place = tuple[bytes | int, ...]


class MemoryOptions(LowerTierOptions):
    """Options of the tiers in memory."""

    type: Literal["memory"] = "memory"
    capacity: ByteSize = Field(default=16 << 20, description="bytes of all blocks together")
    slots_per_region: int = Field(default=16, ge=1, description="slots of the largest group in a region (owned only)")


class MemoryBlock(NamedTuple):
    """A block at rest: whose it is, its bytes, and the checksum that came with its row."""

    namespace: bytes
    epoch: int
    key: OffloadKey
    generation: int
    payload: bytearray
    digest: bytes


@dataclass(slots=True, eq=False)
class MemoryStorage:
    """The storage that outlives a tier in memory, as a disk would: hand it to the next tier. Tests may change the
    payloads.

    `blocks` is keyed by the tier: (slot,) in an owned one, (namespace, epoch, key) in a shared one.
    """

    blocks: dict[Place, MemoryBlock] = field(default_factory=dict)
    formats: dict[int, RegionFormat] = field(default_factory=dict)
    epochs: dict[bytes, int] = field(default_factory=dict)


class _InMemory(LoadStore):
    """The base of both tiers: copying rows, one block after another, between turns of the event loop."""

    medium: ClassVar[Medium] = Medium("MEMORY")
    Options: ClassVar[type[TierOptions]] = MemoryOptions
    options: MemoryOptions

    def __init__(self, options: TierOptions, storage: MemoryStorage | None = None) -> None:
        super().__init__(options)
        self.storage = storage or MemoryStorage()
        self._context: TierContext | None = None
        self._closed = False
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def open(self, context: TierContext) -> Opened:
        """Begin with what the storage holds. Raises UsageError when opened before, or without rows."""
        if self._context is not None or self._closed:
            raise UsageError("this tier was opened before; make a new one")
        if context.rows is None:
            raise UsageError("a tier in memory moves rows of the shared region and was given none")
        opened = self._open(context)
        self._context = context
        return opened

    async def store(self, job: TransferJob) -> JobResult:
        """Copy rows into the storage. Blocks that have not begun at the deadline are LATE, at close dropped."""
        return await self._run(job, JobKind.STORE)

    async def load(self, job: TransferJob) -> JobResult:
        """Copy blocks into rows once everything about them was verified."""
        return await self._run(job, JobKind.LOAD)

    async def reset(self, epoch: int) -> None:
        """Make everything of this namespace before `epoch` unreachable, as durably as the storage is."""
        self.storage.epochs[self._opened().namespace.digest()] = epoch

    async def close(self) -> None:
        """Jobs in flight end at their next block; then nothing is left. Idempotent."""
        self._closed = True
        await self._idle.wait()

    @abstractmethod
    def _open(self, context: TierContext) -> Opened:
        """The facts of the tier, from the storage."""

    @abstractmethod
    def _place(self, job: TransferJob, group: RowGroup, position: int) -> tuple[Place, int]:
        """The place of a block, and its generation."""

    def _prepare(self, job: TransferJob, context: TierContext) -> None:
        """Before a job's first block."""

    def _opened(self) -> TierContext:
        if self._context is None or self._closed:
            raise UsageError("this tier is not open")
        return self._context

    async def _run(self, job: TransferJob, kind: JobKind) -> JobResult:
        context = self._opened()
        started, moved = context.clock(), 0
        self._prepare(job, context)
        self._running += 1
        self._idle.clear()
        try:
            outcomes = []
            for group in job.row_groups:
                ended = []
                for position in range(len(group.keys)):
                    await asyncio.sleep(0)
                    ended.append(self._refuse(job, context) or self._move(job, kind, group, position))
                    moved += context.geometry.aligned_bytes(group.group) if ended[-1].ok else 0
                outcomes.append(tuple(ended))
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()
        return JobResult(job.job_id, tuple(outcomes), moved, context.clock() - started)

    def _refuse(self, job: TransferJob, context: TierContext) -> BlockOutcome | None:
        if self._closed:
            return dropped(DropReason.CLOSING)
        return LATE if job.deadline is not None and context.clock() > job.deadline else None

    def _move(self, job: TransferJob, kind: JobKind, group: RowGroup, position: int) -> BlockOutcome:
        context = self._context
        if context is None or context.rows is None:
            raise UsageError("a job on a tier below the CPU names one row for each key")
        key, row = group.keys[position], group.rows[position]
        place, generation = self._place(job, group, position)
        data = context.rows.view[row, : context.geometry.aligned_bytes(group.group)]
        namespace = context.namespace.digest()
        if kind is JobKind.STORE:
            digest = context.rows.checksum(row)
            block = MemoryBlock(namespace, job.epoch, key, generation, bytearray(data.data), digest)
            return self._keep(place, block)
        found = self.storage.blocks.get(place)
        if found is None:
            return MISSING
        wanted = (namespace, job.epoch, key, generation, len(data))
        if (*found[:4], len(found.payload)) != wanted or checksum(memoryview(found.payload)) != found.digest:
            return CORRUPT
        data[:] = np.frombuffer(found.payload, dtype=np.uint8)
        context.rows.set_checksum(row, found.digest)
        return LOADED

    def _keep(self, place: Place, block: MemoryBlock) -> BlockOutcome:
        self.storage.blocks[place] = block
        return STORED


class MemoryTier(_InMemory):
    """An owned tier: the control plane chooses the slots. Everything is verified at every load, as a tier must."""

    def _open(self, context: TierContext) -> Opened:
        geometry = context.geometry
        sizes = tuple(geometry.aligned_bytes(group) for group in range(geometry.num_groups))
        region_bytes = max(sizes) * self.options.slots_per_region
        regions = self.options.capacity // region_bytes
        if regions < len(set(sizes)):
            raise UsageError(f"a capacity of {self.options.capacity} bytes is less than a region for each slot size")
        space = SlotSpace(region_bytes, (regions,), sizes)
        epoch = self.storage.epochs.get(context.namespace.digest(), 0)
        self._slots_per_region = space.slots_per_region
        return Opened(self.options.capacity, space, self._recovered(context, space, epoch), epoch, "in memory")

    def _recovered(self, context: TierContext, space: SlotSpace, epoch: int) -> Recovered:
        newest: dict[OffloadKey, tuple[int, int]] = {}
        self.storage.formats = {
            region: region_format
            for region, region_format in self.storage.formats.items()
            if region < space.num_regions
        }
        namespace = context.namespace.digest()
        for place, block in self.storage.blocks.items():
            slot = int(place[0])
            if (block.namespace, block.epoch) == (namespace, epoch) and slot < space.num_slot_ids:
                newest[block.key] = max(newest.get(block.key, (-1, -1)), (block.generation, slot))
        ordered = sorted(newest.items(), key=lambda item: item[1])
        return Recovered(
            [key for key, _ in ordered],
            int_array([slot for _, (_, slot) in ordered]),
            int_array([generation for _, (generation, _) in ordered]),
            tuple(region_format for _, region_format in sorted(self.storage.formats.items())),
        )

    def _prepare(self, job: TransferJob, context: TierContext) -> None:
        for region_format in job.formats:
            known = self.storage.formats.get(region_format.region)
            if known is not None and known.generation >= region_format.generation:
                continue
            self.storage.formats[region_format.region] = region_format
            first = region_format.region * self._slots_per_region
            for slot in range(first, first + self._slots_per_region):
                self.storage.blocks.pop((slot,), None)

    def _place(self, job: TransferJob, group: RowGroup, position: int) -> tuple[Place, int]:
        return (group.slots[position],), group.generations[position]


class SharedMemoryTier(_InMemory):
    """A shared tier: it places and evicts by itself (oldest first), and several tiers may use one storage at once."""

    def _open(self, context: TierContext) -> Opened:
        epoch = self.storage.epochs.get(context.namespace.digest(), 0)
        return Opened(self.options.capacity, None, epoch=epoch, mode="in memory, shared")

    async def lookup(self, keys: Sequence[OffloadKey]) -> Sequence[LookupResult]:
        """HIT for what the storage holds in this namespace and epoch."""
        digest = self._opened().namespace.digest()
        epoch = self.storage.epochs.get(digest, 0)
        held = ((digest, epoch, bytes(key)) in self.storage.blocks for key in keys)
        return [LookupResult.HIT if hit else LookupResult.MISS for hit in held]

    def _place(self, job: TransferJob, group: RowGroup, position: int) -> tuple[Place, int]:
        return (self._opened().namespace.digest(), job.epoch, bytes(group.keys[position])), 0

    def _keep(self, place: Place, block: MemoryBlock) -> BlockOutcome:
        blocks = self.storage.blocks
        if len(block.payload) > self.options.capacity:
            return dropped(DropReason.NO_SLOT)
        blocks.pop(place, None)
        while sum(len(kept.payload) for kept in blocks.values()) + len(block.payload) > self.options.capacity:
            del blocks[next(iter(blocks))]
        return super()._keep(place, block)
