"""A shared tier over a pool of blocks in memory: bounded, the oldest block is evicted first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from kvtier.errors import UsageError
from kvtier.options import ByteSize, LowerTierOptions, TierOptions
from kvtier.tier.checksum import checksum
from kvtier.tier.contract import LoadStore, LookupResult, Opened, TierContext
from kvtier.types.jobs import (
    CORRUPT,
    LOADED,
    MISSING,
    STORED,
    BlockOutcome,
    DropReason,
    JobResult,
    RowGroup,
    TransferJob,
    dropped,
)
from kvtier.types.keys import Medium, OffloadKey

Name = tuple[bytes, int, OffloadKey]
"""Namespace, epoch and key: all that must match for a block to be the one that is asked for."""


class Pool:
    """What a server would hold: blocks with the checksums of their rows, and the epoch of each namespace."""

    def __init__(self) -> None:
        self.blocks: dict[Name, tuple[bytes, bytearray]] = {}
        self.epochs: dict[bytes, int] = {}
        self.used_bytes = 0

    def put(self, name: Name, digest: bytes, data: memoryview, capacity: int) -> None:
        if name in self.blocks:
            self.used_bytes -= len(self.blocks.pop(name)[1])
        while self.used_bytes + len(data) > capacity:
            self.used_bytes -= len(self.blocks.pop(next(iter(self.blocks)))[1])
        self.blocks[name] = digest, bytearray(data)
        self.used_bytes += len(data)


class RamOptions(LowerTierOptions):
    """What the stack file may say of the tier. `type` is the name of the entry point."""

    type: Literal["ramstore"] = "ramstore"
    capacity: ByteSize


class RamStore(LoadStore):
    """Moves blocks between rows and a pool; another tier may use the same pool."""

    medium: ClassVar[Medium] = Medium("RAM")
    Options: ClassVar[type[TierOptions]] = RamOptions

    def __init__(self, options: TierOptions, pool: Pool | None = None) -> None:
        assert isinstance(options, RamOptions)
        self.options: RamOptions = options
        self._pool = pool or Pool()
        self._context: TierContext | None = None
        self._closed = False

    async def open(self, context: TierContext) -> Opened:
        if self._context is not None or context.rows is None:
            raise UsageError("a ramstore is opened once, with rows")
        self._context, self._namespace = context, context.namespace.digest()
        return Opened(self.options.capacity, epoch=self._epoch, mode="memory")  # no space: a shared tier

    @property
    def _epoch(self) -> int:
        return self._pool.epochs.get(self._namespace, 0)

    async def lookup(self, keys: Sequence[OffloadKey]) -> Sequence[LookupResult]:
        found = ((self._namespace, self._epoch, key) in self._pool.blocks for key in keys)
        return [LookupResult.HIT if here else LookupResult.MISS for here in found]

    async def store(self, job: TransferJob) -> JobResult:
        return self._run(job, self._store)

    async def load(self, job: TransferJob) -> JobResult:
        return self._run(job, self._load)

    async def reset(self, epoch: int) -> None:
        self._pool.epochs[self._namespace] = epoch  # names hold the epoch, so older blocks are not found

    async def close(self) -> None:
        self._closed = True

    def _run(self, job: TransferJob, move) -> JobResult:
        if self._context is None or self._closed:
            raise UsageError("the ramstore is not open")
        outcomes = [tuple(move(job.epoch, group, i) for i in range(len(group.keys))) for group in job.row_groups]
        moved = [
            sum(outcome.ok for outcome in each) * self._context.geometry.aligned_bytes(group.group)
            for group, each in zip(job.row_groups, outcomes, strict=True)
        ]
        return JobResult(job.job_id, tuple(outcomes), sum(moved))

    def _row(self, group: RowGroup, i: int) -> tuple[int, memoryview]:
        row = group.rows[i]
        return row, self._context.rows.view[row, : self._context.geometry.aligned_bytes(group.group)].data

    def _store(self, epoch: int, group: RowGroup, i: int) -> BlockOutcome:
        row, data = self._row(group, i)
        if len(data) > self.options.capacity:
            return dropped(DropReason.NO_SLOT)
        name = self._namespace, epoch, group.keys[i]
        self._pool.put(name, self._context.rows.checksum(row), data, self.options.capacity)
        return STORED

    def _load(self, epoch: int, group: RowGroup, i: int) -> BlockOutcome:
        row, data = self._row(group, i)
        digest, payload = self._pool.blocks.get((self._namespace, epoch, group.keys[i]), (b"", bytearray()))
        if not digest:
            return MISSING
        if len(payload) != len(data) or checksum(memoryview(payload)) != digest:
            return CORRUPT
        data[:] = payload
        self._context.rows.set_checksum(row, digest)
        return LOADED
