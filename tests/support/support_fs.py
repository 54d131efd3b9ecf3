"""Rows, jobs and tiers for tests of the filesystem tier. A payload is a function of its key and generation."""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import Path

import numpy as np
import xxhash

from kvtier.errors import RootBusyError
from kvtier.tier.contract import Opened, TierContext
from kvtier.types.geometry import Geometry, GroupLayout, KVLayout, TensorRef
from kvtier.types.jobs import BlockOutcome, JobKind, JobResult, RegionFormat, RowGroup, TransferJob
from kvtier.types.keys import GroupIndex, JobId, OffloadKey, key_group, make_key
from kvtier.types.namespace import Namespace
from kvtier_fs import FSBackend, FSOptions
from kvtier_fs.local.opening import Hooks

PAGE = mmap.PAGESIZE


class TestRows:
    """A page-aligned region of one process, with a checksum for each row."""

    __test__ = False

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        self.num_rows = num_rows
        self.row_bytes = row_bytes
        self.view = np.frombuffer(mmap.mmap(-1, num_rows * row_bytes), dtype=np.uint8).reshape(num_rows, row_bytes)
        self.digests = [bytes(16)] * num_rows

    def checksum(self, row: int) -> bytes:
        return self.digests[row]

    def set_checksum(self, row: int, digest: bytes) -> None:
        self.digests[row] = digest


@lru_cache(256)  # most are wanted twice: to be stored, and to be compared
def payload(key: bytes, generation: int, length: int) -> np.ndarray:
    """What a block must hold: every byte follows from its key and generation."""
    seed = int.from_bytes(hashlib.sha256(key + generation.to_bytes(8, "big")).digest()[:8], "big")
    found = np.random.Generator(np.random.SFC64(seed)).integers(0, 256, length, dtype=np.uint8)
    found.flags.writeable = False
    return found


def layout(*page_bytes: int, factor: int = 1) -> KVLayout:
    """A layout with one group for each page size."""
    return KVLayout(tuple(GroupLayout((TensorRef(0, size),)) for size in page_bytes), block_size_factor=factor)


def keys(count: int, group: int = 0, start: int = 0) -> list[OffloadKey]:
    """Distinct keys of a group."""
    return [make_key(hashlib.sha256(f"{group}/{start + i}".encode()).digest(), group) for i in range(count)]


class Tier:
    """An open tier with its rows, and a small stand-in for the control plane: it hands out slots and generations."""

    def __init__(self, backend: FSBackend, opened: Opened, rows: TestRows, geometry: Geometry) -> None:
        assert opened.space is not None
        self.backend = backend
        self.opened = opened
        self.space = opened.space
        self.rows = rows
        self.geometry = geometry
        self.epoch = opened.epoch
        self.region_sizes = {one.region: one.slot_bytes for one in opened.recovered.formats}
        self.region_generations = {one.region: one.generation for one in opened.recovered.formats}
        self.directory: dict[OffloadKey, tuple[int, int]] = {}
        found = opened.recovered
        for key, slot, generation in zip(found.keys, found.slots.tolist(), found.generations.tolist(), strict=True):
            self.directory[key] = (slot, generation)
        self.generation = max((generation for _, generation in self.directory.values()), default=0)
        self.job = 0

    def format_region(self, region: int, group: int) -> RegionFormat:
        """Format a region for slots of a group."""
        self.region_generations[region] = self.region_generations.get(region, 0) + 1
        self.region_sizes[region] = self.space.slot_bytes[group]
        return RegionFormat(region, self.space.slot_bytes[group], self.region_generations[region])

    def free_slots(self, group: int) -> Iterator[int]:
        """Slots of a group's size that no key is in, regions in turn."""
        taken = {slot for slot, _ in self.directory.values()}
        size, per_region = self.space.slot_bytes[group], self.space.slots_per_region
        for index in range(self.space.region_bytes // size):
            for region, formatted in self.region_sizes.items():
                slot = region * per_region + index
                if formatted == size and slot not in taken:
                    yield slot

    def fill(self, row: int, key: OffloadKey, generation: int) -> None:
        """Put a key's payload and checksum into a row."""
        length = self.geometry.aligned_bytes(key_group(key))
        self.rows.view[row, :length] = payload(key, generation, length)
        self.rows.view[row, length:] = 0
        self.rows.digests[row] = xxhash.xxh3_128(self.rows.view[row, :length]).digest()

    def holds(self, row: int, key: OffloadKey, generation: int) -> bool:
        """True if a row holds a key's payload."""
        length = self.geometry.aligned_bytes(key_group(key))
        return bool(np.array_equal(self.rows.view[row, :length], payload(key, generation, length)))

    def store_job(self, names: Sequence[OffloadKey], formats: Sequence[RegionFormat] = ()) -> TransferJob:
        """A job that stores keys of one group from rows 0.. into free slots; rows are filled."""
        group = key_group(names[0])
        slots = self.free_slots(group)
        places = []
        for row, key in enumerate(names):
            self.generation += 1
            place = (next(slots), self.generation)
            self.fill(row, key, self.generation)
            self.directory[key] = place
            places.append(place)
        return self._job(JobKind.STORE, names, places, tuple(formats))

    def load_job(self, names: Sequence[OffloadKey]) -> TransferJob:
        """A job that loads keys of one group into rows 0.., which are overwritten first."""
        self.rows.view[: len(names)] = 0xEE
        return self._job(JobKind.LOAD, names, [self.directory[key] for key in names], ())

    def _job(
        self,
        kind: JobKind,
        names: Sequence[OffloadKey],
        places: Sequence[tuple[int, int]],
        formats: tuple[RegionFormat, ...],
    ) -> TransferJob:
        self.job += 1
        transfer = RowGroup(
            GroupIndex(key_group(names[0])),
            tuple(names),
            range(len(names)),
            [slot for slot, _ in places],
            [generation for _, generation in places],
        )
        return TransferJob(JobId(self.job), kind, (transfer,), None, self.epoch, formats)

    async def store(self, names: Sequence[OffloadKey], formats: Sequence[RegionFormat] = ()) -> list[BlockOutcome]:
        """Store keys of one group; keys that were not stored are forgotten."""
        outcomes = flat(await self.backend.store(self.store_job(names, formats)))
        for key, outcome in zip(names, outcomes, strict=True):
            if not outcome.ok:
                del self.directory[key]
        return outcomes

    async def load(self, names: Sequence[OffloadKey]) -> list[BlockOutcome]:
        """Load keys of one group into rows 0.. and check every byte of what counts as loaded."""
        outcomes = flat(await self.backend.load(self.load_job(names)))
        for row, (key, outcome) in enumerate(zip(names, outcomes, strict=True)):
            if outcome.ok:
                assert self.holds(row, key, self.directory[key][1]), f"wrong bytes for key {key.hex()}"
        return outcomes

    async def store_all(self, names: Sequence[OffloadKey]) -> None:
        """Store keys of group 0, in as many new regions as it takes."""
        for start in range(0, len(names), self.rows.num_rows):
            batch = names[start : start + self.rows.num_rows]
            formats = []
            while sum(1 for _ in self.free_slots(0)) < len(batch):
                formats.append(self.format_region(len(self.region_sizes), 0))
            outcomes = await self.store(batch, formats)
            assert all(outcome.ok for outcome in outcomes), outcomes

    async def load_all(self, names: Sequence[OffloadKey]) -> list[BlockOutcome]:
        """Load keys of one group, a row's worth at a time."""
        outcomes = []
        for start in range(0, len(names), self.rows.num_rows):
            outcomes += await self.load(names[start : start + self.rows.num_rows])
        return outcomes


def flat(result: JobResult) -> list[BlockOutcome]:
    """The outcomes of all groups in one list."""
    return [outcome for group in result.outcomes for outcome in group]


def counted(tier: Tier) -> dict[str, int]:
    """What an open tier counted since it was opened."""
    return {name: count for name, count in tier.backend.counters.items() if not name.startswith("open.")}


def options(*roots: Path, **changes: object) -> FSOptions:
    """Options for small tests: buffered threads unless told otherwise."""
    fields = {"roots": [str(root) for root in roots], "capacity": 8 << 20, "min_free_bytes": 0, "io_engine": "threads"}
    return FSOptions.model_validate(fields | {"direct": "off", "io_threads": 2} | changes)


@asynccontextmanager
async def open_tier(
    settings: FSOptions,
    shape: KVLayout | None = None,
    *,
    tag: str = "",
    rows: int = 32,
    hooks: Hooks | None = None,
    alignment: int = PAGE,
):
    """An open tier, closed at the end."""
    geometry = Geometry(shape or layout(16384), alignment)
    region = TestRows(rows, geometry.row_bytes)
    backend = FSBackend(settings, hooks)
    context = TierContext("fs", geometry, Namespace(geometry.layout, tag=tag), time.monotonic, rows=region)
    try:
        opened = await backend.open(context)
        yield Tier(backend, opened, region, geometry)
    finally:
        await backend.close()


@asynccontextmanager
async def open_when_free(settings: FSOptions, shape: KVLayout | None = None):
    """An open tier, as soon as whoever has the roots lets go of them."""
    async with asyncio.timeout(20):
        while True:
            try:
                tier = open_tier(settings, shape)
                opened = await tier.__aenter__()
                break
            except RootBusyError:
                await asyncio.sleep(0.01)
    try:
        yield opened
    finally:
        await tier.__aexit__(None, None, None)


def bytes_on_disk(*roots: Path) -> int:
    """What roots occupy, as the file system counts it, folders included."""
    total = 0
    for root in roots:
        for folder, _, files in os.walk(root):
            total += sum(os.lstat(path).st_blocks * 512 for path in [folder, *(os.path.join(folder, f) for f in files)])
    return total


def slot_place(tier: Tier, key: OffloadKey) -> tuple[Path, int]:
    """The file and the offset of the slot a key is in (its header page comes first)."""
    slot, _ = tier.directory[key]
    region, index = divmod(slot, tier.space.slots_per_region)
    root, local = tier.backend._router.locate(region)
    plan = root.plan
    offset = plan.slot_offset(local, index, tier.region_sizes[region])
    return Path(root.path) / f"slab-{plan.file_of(local):05d}", offset
