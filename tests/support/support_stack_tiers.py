"""A third party's tiers in memory, owned and shared, that hang, fail, raise and count on request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from kvtier.options import LowerTierOptions, SharedTierOptions, TierOptions
from kvtier.tier.contract import LoadStore, LookupResult, Opened, Rows, SlotSpace, TierContext
from kvtier.tier.registry import Backends
from kvtier.types.jobs import CORRUPT, LOADED, MISSING, STORED, BlockOutcome, JobKind, JobResult, RowGroup, TransferJob
from kvtier.types.keys import Medium, OffloadKey, key_group

LOAD, STORE = JobKind.LOAD, JobKind.STORE


class MemoryOptions(LowerTierOptions):
    type: Literal["memory", "shared", "wide", "probed"] = "memory"
    slots: int = Field(default=64, ge=1)


class SharedOptions(SharedTierOptions):
    type: Literal["shared"] = "shared"


class MemoryTier(LoadStore):
    """Keeps copies of rows by slot; checks key and generation at every load, as a tier must.

    `gates[kind]`, while clear, hold every call of a kind before it moves a byte. `raises[kind]` ends every call,
    `spoil` may replace an outcome. `begun` lists the kinds in the order calls began, `moving` counts blocks inside
    calls, `most` the highest it was.
    """

    medium: ClassVar[Medium] = Medium("MEMORY")
    Options: ClassVar[type[TierOptions]] = MemoryOptions
    options: MemoryOptions

    def __init__(self, options: TierOptions) -> None:
        super().__init__(options)
        self.gates = {kind: asyncio.Event() for kind in JobKind}
        for gate in self.gates.values():
            gate.set()
        self.raises: dict[JobKind, Exception] = {}
        self.spoil: Callable[[JobKind, OffloadKey], BlockOutcome | None] = lambda kind, key: None
        self.begun: list[JobKind] = []
        self.moving = dict.fromkeys(JobKind, 0)
        self.most = 0
        self.close_gate = asyncio.Event()
        self.close_gate.set()
        self.closes = 0
        self.epochs: list[int] = []
        self.kept: dict[object, tuple[OffloadKey, int, np.ndarray, bytes]] = {}
        self.context: TierContext | None = None

    @property
    def rows(self) -> Rows:
        assert self.context is not None
        assert self.context.rows is not None
        return self.context.rows

    async def open(self, context: TierContext) -> Opened:
        self.context = context
        space = SlotSpace(context.geometry.row_bytes, (self.options.slots,), self._slot_bytes())
        return Opened(self.options.slots * context.geometry.row_bytes, space, mode="in memory")

    def _slot_bytes(self) -> tuple[int, ...]:
        assert self.context is not None
        return (self.context.geometry.row_bytes,) * self.context.geometry.num_groups

    async def store(self, job: TransferJob) -> JobResult:
        return await self._move(job, STORE)

    async def load(self, job: TransferJob) -> JobResult:
        return await self._move(job, LOAD)

    async def reset(self, epoch: int) -> None:
        self.epochs.append(epoch)

    async def close(self) -> None:
        self.closes += 1
        await self.close_gate.wait()

    def hold(self, *kinds: JobKind) -> None:
        for kind in kinds:
            self.gates[kind].clear()

    def let_go(self) -> None:
        for gate in (*self.gates.values(), self.close_gate):
            gate.set()

    async def _move(self, job: TransferJob, kind: JobKind) -> JobResult:
        self.begun.append(kind)
        self.moving[kind] += job.num_blocks
        self.most = max(self.most, sum(self.moving.values()))
        try:
            await asyncio.sleep(0)
            await self.gates[kind].wait()
            if kind in self.raises:
                raise self.raises[kind]
            outcomes = tuple(tuple(self._block(job, group, i) for i in range(len(group.keys))) for group in job.groups)
            moved = sum(one.ok for group in outcomes for one in group) * self.rows.row_bytes
            return JobResult(job.job_id, outcomes, moved)
        finally:
            self.moving[kind] -= job.num_blocks

    def _place(self, job: TransferJob, group: RowGroup, i: int) -> tuple[object, int]:
        return group.slots[i], group.generations[i]

    def _block(self, job: TransferJob, group: RowGroup, i: int) -> BlockOutcome:
        key, row = group.keys[i], group.rows[i]
        assert key_group(key) == group.group
        spoiled = self.spoil(job.kind, key)
        if spoiled is not None:
            return spoiled
        place, generation = self._place(job, group, i)
        if job.kind is STORE:
            self.kept[place] = key, generation, self.rows.view[row].copy(), self.rows.checksum(row)
            return STORED
        if place not in self.kept:
            return MISSING
        kept_key, kept_generation, data, digest = self.kept[place]
        if (kept_key, kept_generation) != (key, generation):
            return CORRUPT
        self.rows.view[row] = data
        self.rows.set_checksum(row, digest)
        return LOADED


class SharedTier(MemoryTier):
    """A store on the network: placement is its own, other engines write too. `remote` may be shared by several.

    `answers`, while clear, holds every lookup; `asked` lists the keys of each.
    """

    medium: ClassVar[Medium] = Medium("REMOTE")
    Options: ClassVar[type[TierOptions]] = SharedOptions

    def __init__(self, options: TierOptions) -> None:
        super().__init__(options)
        self.answers = asyncio.Event()
        self.answers.set()
        self.asked: list[list[OffloadKey]] = []
        self.answer_with: Callable[[OffloadKey], LookupResult] = self._presence
        self._epoch = 0

    async def open(self, context: TierContext) -> Opened:
        self.context = context
        return Opened(1 << 40, mode="remote")

    def _presence(self, key: OffloadKey) -> LookupResult:
        return LookupResult.HIT if (key, self._epoch) in self.kept else LookupResult.MISS

    async def lookup(self, keys: Sequence[OffloadKey]) -> Sequence[LookupResult]:
        self.asked.append(list(keys))
        await self.answers.wait()
        return [self.answer_with(key) for key in keys]

    async def reset(self, epoch: int) -> None:
        self._epoch = epoch

    def _place(self, job: TransferJob, group: RowGroup, i: int) -> tuple[object, int]:
        return (group.keys[i], job.epoch), 0


class WideTier(MemoryTier):
    """A device with large blocks."""

    BLOCK_SIZE_ALIGNMENT: ClassVar[int] = 3 * 4096


class ProbedTier(MemoryTier):
    """A device that turns out to want more than its class says."""

    async def probe_alignment(self) -> int:
        return 16384


def backends() -> Backends:
    """The installed backends, and these."""
    mine = {"memory": "MemoryTier", "shared": "SharedTier", "wide": "WideTier", "probed": "ProbedTier"}
    points = [EntryPoint(name, f"{__name__}:{value}", Backends.GROUP) for name, value in mine.items()]
    return Backends([*entry_points(group=Backends.GROUP), *points])
