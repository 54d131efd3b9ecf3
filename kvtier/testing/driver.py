"""An open tier and a small stand-in for the control plane above it: it hands out rows, slots and generations.

The content of a block is a function of its full key and generation, so that a wrong byte names its owner: the sequence
of 64-bit little-endian words `base + i * STEP` (modulo 2**64), with `base` the xxh3 hash of key and generation. Every
word of a block found in the wrong place gives the base back, and with it the block it belongs to.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.errors import UsageError
from kvtier.tier.checksum import CHECKSUM_BYTES, checksum
from kvtier.tier.contract import LoadStore, Opened, SlotSpace, TierContext
from kvtier.types.geometry import Geometry
from kvtier.types.jobs import BlockOutcome, BlockStatus, JobKind, JobResult, RegionFormat, RowGroup, TransferJob
from kvtier.types.keys import JobId, OffloadKey, key_group


class TestRows:
    """A `Rows` in private memory: base page-aligned, rows one after another, zeros at first.

    `row_bytes` that are a multiple of a tier's alignment make every row aligned to it, up to a page.
    """

    __test__ = False  # for pytest: no test class, whatever the name is

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        if num_rows < 1 or row_bytes < 1:
            raise UsageError(f"rows need at least 1 row and byte, got {num_rows} and {row_bytes}")
        self._memory = mmap.mmap(-1, num_rows * row_bytes)
        self._view = np.frombuffer(self._memory, dtype=np.uint8).reshape(num_rows, row_bytes)
        self._checksums = [bytes(CHECKSUM_BYTES)] * num_rows

    @property
    def num_rows(self) -> int:
        return int(self._view.shape[0])

    @property
    def row_bytes(self) -> int:
        return int(self._view.shape[1])

    @property
    def view(self) -> npt.NDArray[np.uint8]:
        return self._view

    def checksum(self, row: int) -> bytes:
        """The 16-byte checksum that was set for a row; zeros before that."""
        return self._checksums[row]

    def set_checksum(self, row: int, digest: bytes) -> None:
        """Keep a row's checksum. Raises UsageError unless it has 16 bytes."""
        if len(digest) != CHECKSUM_BYTES:
            raise UsageError(f"a checksum has {CHECKSUM_BYTES} bytes, this one {len(digest)}")
        self._checksums[row] = bytes(digest)


Bytes = npt.NDArray[np.uint8]

WORD_BYTES = 8
STEP = 0x9E3779B97F4A7C15


def content(key: OffloadKey, generation: int, length: int) -> Bytes:
    """The `length` bytes that a block of this key and generation holds, shape (length,), uint8."""
    ramp = np.arange(-(-length // WORD_BYTES), dtype=np.uint64) * np.uint64(STEP)
    ramp += np.uint64(_base(key, generation))
    return ramp.astype("<u8", copy=False).view(np.uint8)[:length]


def _base(key: OffloadKey, generation: int) -> int:
    return xxhash.xxh3_64_intdigest(key + generation.to_bytes(8, "little"))


class Owners:
    """The blocks of a test, by their contents: whose bytes were found where others should be."""

    def __init__(self, blocks: Iterable[tuple[OffloadKey, int]] = ()) -> None:
        self._blocks: dict[int, tuple[OffloadKey, int]] = {}
        for key, generation in blocks:
            self.note(key, generation)

    def note(self, key: OffloadKey, generation: int) -> None:
        """Remember a block that was given its content."""
        self._blocks[_base(key, generation)] = key, generation

    def complaint(self, found: Bytes, key: OffloadKey, generation: int) -> str:
        """The fault in the bytes of a block, naming the owner of the first wrong word; empty if nothing is."""
        wrong = np.flatnonzero(found != content(key, generation, len(found)))
        if not len(wrong):
            return ""
        at = int(wrong[0])
        return (
            f"key {key.hex()} generation {generation}: {len(wrong)} of {len(found)} bytes are wrong, "
            f"from byte {at} on {self._owner(found, at)}"
        )

    def _owner(self, found: Bytes, at: int) -> str:
        start = at // WORD_BYTES * WORD_BYTES
        piece = found[start : start + WORD_BYTES].tobytes()
        if not any(piece):
            return "there are zeros"
        index = start // WORD_BYTES
        base = (int.from_bytes(piece.ljust(WORD_BYTES, b"\0"), "little") - index * STEP) % (1 << 64)
        if len(piece) == WORD_BYTES and base in self._blocks:
            key, generation = self._blocks[base]
            return f"they belong to key {key.hex()} generation {generation}"
        return f"they belong to no block ({piece.hex()})"


JUNK = 0xEE
NO_SLOT = -1


@dataclass(slots=True)
class _SlotAllocator:
    """The free slots of an owned tier, the formats of its regions, and those still to be made."""

    space: SlotSpace
    formats: dict[int, RegionFormat] = field(default_factory=dict)
    unsent: dict[int, RegionFormat] = field(default_factory=dict)
    free: dict[int, list[int]] = field(default_factory=dict)

    def region_of(self, slot: int) -> int:
        return slot // self.space.slots_per_region

    def slots_of(self, region_format: RegionFormat) -> list[int]:
        """The slots a region has in this format."""
        first = region_format.region * self.space.slots_per_region
        return list(range(first, first + self.space.region_bytes // region_format.slot_bytes))

    def format_region(self, size: int) -> bool:
        """Format a region for slots of a size: one without a format, or of an unused size. False if there is none."""
        for region in range(self.space.num_regions):
            region_format = self.formats.get(region)
            if region_format is None or region_format.slot_bytes not in self.space.slot_bytes:
                new = RegionFormat(region, size, region_format.generation + 1 if region_format else 1)
                self.formats[region] = self.unsent[region] = new
                self.free.setdefault(size, []).extend(self.slots_of(new))
                return True
        return False


class Driver:
    """An open tier, its rows, and what should be in it. `directory[key]` is (slot, generation); slot -1 if shared.

    A block's content follows from its key and generation; in a shared tier, which has no generations, from its key
    and the epoch. Loads are checked byte for byte; what is wrong is an AssertionError that names the owner.
    """

    def __init__(self, tier: LoadStore, opened: Opened, context: TierContext, rows: TestRows) -> None:
        self.tier = tier
        self.opened = opened
        self.context = context
        self.rows = rows
        self.geometry: Geometry = context.geometry
        self.epoch = opened.epoch
        self.owners = Owners()
        self.directory: dict[OffloadKey, tuple[int, int]] = {}
        self._places = _SlotAllocator(opened.space) if opened.space is not None else None
        self._jobs = 0
        found = opened.recovered
        for key, slot, generation in zip(found.keys, found.slots.tolist(), found.generations.tolist(), strict=True):
            self.directory[key] = (slot, generation)
            self.owners.note(key, generation)
        self._generation = max((generation for _, generation in self.directory.values()), default=0)
        if self._places is not None:
            self._restore(self._places, found.formats)

    @property
    def owned(self) -> bool:
        """True for a tier whose slots the control plane hands out."""
        return self._places is not None

    def _restore(self, places: _SlotAllocator, formats: Sequence[RegionFormat]) -> None:
        taken = {slot for slot, _ in self.directory.values()}
        for region_format in formats:
            places.formats[region_format.region] = region_format
            if region_format.slot_bytes in places.space.slot_bytes:
                free = [slot for slot in places.slots_of(region_format) if slot not in taken]
                places.free.setdefault(region_format.slot_bytes, []).extend(free)

    # -- rows ------------------------------------------------------------------------------------------------------

    def payload(self, key: OffloadKey, generation: int) -> Bytes:
        """The right bytes of a row for a block: its content, then zeros up to the aligned size."""
        group = key_group(key)
        data = np.zeros(self.geometry.aligned_bytes(group), dtype=np.uint8)
        length = self.geometry.kv_bytes_per_offloaded_block(group)
        data[:length] = content(key, generation, length)
        return data

    def fill(self, row: int, key: OffloadKey, generation: int) -> None:
        """Put a block and its checksum into a row; the bytes beyond its aligned size are junk, as in a used row."""
        data = self.payload(key, generation)
        self.rows.view[row] = JUNK
        self.rows.view[row, : len(data)] = data
        self.rows.set_checksum(row, checksum(data.data))
        self.owners.note(key, generation)

    def complaint(self, row: int, key: OffloadKey, generation: int) -> str:
        """The fault in a row that a block was loaded into; empty if nothing is."""
        expected = self.payload(key, generation)
        found = self.rows.view[row, : len(expected)]
        length = self.geometry.kv_bytes_per_offloaded_block(key_group(key))
        wrong = self.owners.complaint(found[:length], key, generation)
        if wrong:
            return f"row {row}: {wrong}"
        if not np.array_equal(found, expected):
            return f"row {row}: the padding of key {key.hex()} is not zero"
        if self.rows.checksum(row) != checksum(expected.data):
            return f"row {row}: key {key.hex()} was loaded without its checksum"
        return ""

    # -- places ----------------------------------------------------------------------------------------------------

    def evict(self, key: OffloadKey) -> None:
        """Forget a block; its slot may be used again at once."""
        slot, _ = self.directory.pop(key)
        if self._places is not None:
            self._places.free.setdefault(self._slot_bytes(key), []).append(slot)

    def _slot_bytes(self, key: OffloadKey) -> int:
        assert self.opened.space is not None
        return self.opened.space.slot_bytes[key_group(key)]

    def _take(self, key: OffloadKey, keep: Sequence[OffloadKey]) -> int:
        """A slot for a key; evicts the oldest of its size that is not to be kept when there is no other."""
        if self._places is None:
            return NO_SLOT
        size = self._slot_bytes(key)
        if not self._places.free.get(size) and not self._places.format_region(size):
            for old in self.directory:
                if self._slot_bytes(old) == size and old not in keep:
                    self.evict(old)
                    break
            else:
                raise UsageError(f"the tier under test has no slot of {size} bytes left; give it more capacity")
        return self._places.free[size].pop()

    # -- jobs ------------------------------------------------------------------------------------------------------

    def store_job(self, keys: Sequence[OffloadKey], rows: Sequence[int] | None = None) -> TransferJob:
        """A job that stores keys of any groups from rows (0, 1, .. by default), filled here. Forgets older copies."""
        for key in keys:
            if key in self.directory:
                self.evict(key)
        for key, row in zip(keys, rows or range(len(keys)), strict=True):
            slot = self._take(key, keys)
            self._generation += 1
            generation = self._generation if self.owned else self.epoch
            self.directory[key] = (slot, generation)
            self.fill(row, key, generation)
        return self._job(JobKind.STORE, keys, rows)

    def load_job(self, keys: Sequence[OffloadKey], rows: Sequence[int] | None = None) -> TransferJob:
        """A job that loads keys into rows, which are filled with junk first. Unknown keys only in a shared tier."""
        self.rows.view[list(rows or range(len(keys)))] = JUNK
        return self._job(JobKind.LOAD, keys, rows)

    def _job(self, kind: JobKind, keys: Sequence[OffloadKey], rows: Sequence[int] | None) -> TransferJob:
        row_of = dict(zip(keys, rows or range(len(keys)), strict=True))
        groups: dict[int, list[OffloadKey]] = {}
        for key in keys:
            groups.setdefault(key_group(key), []).append(key)
        self._jobs += 1
        transfers = tuple(self._transfer(names, row_of) for names in groups.values())
        return TransferJob(JobId(self._jobs), kind, transfers, None, self.epoch, self._formats(kind, keys))

    def _transfer(self, keys: Sequence[OffloadKey], row_of: dict[OffloadKey, int]) -> RowGroup:
        slots = [self.directory[key][0] for key in keys] if self.owned else []
        generations = [self.directory[key][1] for key in keys] if self.owned else []
        return RowGroup(key_group(keys[0]), tuple(keys), [row_of[key] for key in keys], slots, generations)

    def _formats(self, kind: JobKind, keys: Sequence[OffloadKey]) -> tuple[RegionFormat, ...]:
        if self._places is None or kind is JobKind.LOAD:
            return ()
        regions = {self._places.region_of(self.directory[key][0]): None for key in keys}
        return tuple(self._places.unsent[region] for region in regions if region in self._places.unsent)

    def outcomes(self, job: TransferJob, result: JobResult) -> dict[OffloadKey, BlockOutcome]:
        """The outcome of each key of a job; its shape must be the job's."""
        assert result.job_id == job.job_id, f"job {job.job_id} was answered as job {result.job_id}"
        shape = [len(outcomes) for outcomes in result.outcomes]
        wanted = [len(group.keys) for group in job.groups]
        assert shape == wanted, f"a job of {wanted} blocks by group has outcomes for {shape}"
        return {
            key: outcome
            for group, outcomes in zip(job.groups, result.outcomes, strict=True)
            for key, outcome in zip(group.keys, outcomes, strict=True)
        }

    async def store(
        self, keys: Sequence[OffloadKey], rows: Sequence[int] | None = None
    ) -> dict[OffloadKey, BlockOutcome]:
        """Store keys; those that were not stored are forgotten."""
        job = self.store_job(keys, rows)
        return self.stored(job, await self.tier.store(job))

    def stored(self, job: TransferJob, result: JobResult) -> dict[OffloadKey, BlockOutcome]:
        """Note what a store has come to."""
        outcomes = self.outcomes(job, result)
        for key, outcome in outcomes.items():
            of_loads = (BlockStatus.LOADED, BlockStatus.MISSING, BlockStatus.CORRUPT)
            assert outcome.status not in of_loads, f"a store was {outcome.status}"
            if not outcome.ok:
                self.evict(key)
            elif self._places is not None:
                self._places.unsent.pop(self._places.region_of(self.directory[key][0]), None)
        return outcomes

    async def load(
        self, keys: Sequence[OffloadKey], rows: Sequence[int] | None = None
    ) -> dict[OffloadKey, BlockOutcome]:
        """Load keys and check every byte of those that count as loaded."""
        job = self.load_job(keys, rows)
        return self.loaded(job, await self.tier.load(job))

    def loaded(self, job: TransferJob, result: JobResult) -> dict[OffloadKey, BlockOutcome]:
        """Check the bytes of a load: right where it reports them, and none beyond a block's own."""
        outcomes = self.outcomes(job, result)
        for group in job.row_groups:
            beyond = self.rows.view[list(group.rows), self.geometry.aligned_bytes(group.group) :]
            assert bool((beyond == JUNK).all()), f"a load wrote beyond the blocks of group {group.group}"
            for key, row in zip(group.keys, group.rows, strict=True):
                outcome = outcomes[key]
                assert outcome.status not in (BlockStatus.STORED, BlockStatus.PRESENT), f"a load was {outcome.status}"
                if outcome.ok:
                    generation = self.directory[key][1] if self.owned else self.epoch
                    wrong = self.complaint(row, key, generation)
                    assert not wrong, wrong
        return outcomes
