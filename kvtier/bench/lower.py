"""Measuring a tier below the CPU: blocks of one size from rows into its slots and back, in a place of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from kvtier.bench.content import WIPED, Pattern
from kvtier.bench.figures import Figure
from kvtier.bench.moving import CHUNK_BLOCKS, KEY_BYTES, SINGLE_JOBS, Course, Timing
from kvtier.checksum import checksum
from kvtier.jobs import NO_IDS, GroupTransfer, IntArray, JobKind, RegionCut, TransferJob, distinct, int_array
from kvtier.keys import GroupIndex, JobId, OffloadKey, make_key
from kvtier.loadstore import LoadStore, Opened, Rows, SlotSpace


@dataclass(slots=True, eq=False)
class _Chunk:
    """Blocks of one job: the rows `first .. last - 1`. `stored` is the number of the last pass that stored them."""

    first: int
    last: int
    stored: int = 0


class LowerTierBench:
    """Stores into and loads from one open tier, each row of `rows` into a slot of its own, roots in turn."""

    def __init__(self, tier: LoadStore, opened: Opened, rows: Rows, seed: int) -> None:
        self._tier = tier
        self._opened = opened
        self._rows = rows
        self._slots = NO_IDS if opened.space is None else _slots_in_turn(opened.space)[: rows.num_rows]
        self.num_blocks = rows.num_rows if opened.space is None else len(self._slots)
        self._pattern = Pattern(rows.row_bytes, seed)
        self._pass = 0
        self.wrong = 0
        self.checked = 0

    async def measure(self, seconds: float, inflight_bytes: int, bytes_per_token: float) -> list[Figure]:
        """Store and load everything for about `seconds` each way, then single blocks. Raises ResourceError for a
        block that came to a bad end."""
        size = self._rows.row_bytes
        per_job = max(1, min(CHUNK_BLOCKS, inflight_bytes // size // 4, self.num_blocks))
        lanes = max(1, inflight_bytes // size // per_job)
        chunks = [_Chunk(first, min(first + per_job, self.num_blocks)) for first in range(0, self.num_blocks, per_job)]
        bulk = Course(seconds, lanes)
        stores = await self._store(chunks, bulk)
        loads = await self._load([chunk for chunk in chunks if chunk.stored], bulk)
        ready = [row for chunk in chunks if chunk.stored for row in range(chunk.first, chunk.last)]
        singles = [_Chunk(row, row + 1) for row in ready[:SINGLE_JOBS]]
        single = Course(seconds, 1)
        one_stored = await self._store(singles, single, once=True)
        one_loaded = await self._load([chunk for chunk in singles if chunk.stored], single, once=True)
        return [
            Figure("store", size, stores, one_stored, bytes_per_token),
            Figure("load", size, loads, one_loaded, bytes_per_token),
        ]

    async def _store(self, chunks: Sequence[_Chunk], course: Course, once: bool = False) -> Timing:
        timing = Timing()
        while not course.over(timing):
            self._pass += 1
            self._pattern.fill(self._rows.view[: self.num_blocks], self._first_number(self._pass))
            self._take_checksums(chunks)
            jobs = [self._job(JobKind.STORE, chunk, self._pass) for chunk in chunks]
            begun = await course.run(self._tier.store, jobs, timing)
            for chunk in chunks[:begun]:
                chunk.stored = self._pass
            if once or self._opened.space is None:  # a shared tier takes a key once
                break
        return timing

    async def _load(self, chunks: Sequence[_Chunk], course: Course, once: bool = False) -> Timing:
        timing = Timing()
        while chunks and not course.over(timing):
            self._rows.view[:] = WIPED
            jobs = [self._job(JobKind.LOAD, chunk, chunk.stored) for chunk in chunks]
            begun = await course.run(self._tier.load, jobs, timing)
            for chunk in chunks[:begun]:
                rows = self._rows.view[chunk.first : chunk.last]
                self.wrong += self._pattern.wrong(rows, self._first_number(chunk.stored) + chunk.first)
                self.checked += len(rows)
            if once:
                break
        return timing

    def _first_number(self, number: int) -> int:
        """Blocks of one pass have numbers of their own, so that bytes of an earlier pass are not taken for right."""
        return number * self.num_blocks

    def _take_checksums(self, chunks: Sequence[_Chunk]) -> None:
        for chunk in chunks:
            for row in range(chunk.first, chunk.last):
                self._rows.set_checksum(row, checksum(memoryview(self._rows.view[row])))

    def _job(self, kind: JobKind, chunk: _Chunk, number: int) -> TransferJob:
        rows = np.arange(chunk.first, chunk.last, dtype=np.int64)
        shared = self._opened.space is None
        slots = NO_IDS if shared else self._slots[rows]
        generations = NO_IDS if shared else rows + self._first_number(number) + 1
        keys = tuple(self._key(row, number if shared else 0) for row in rows.tolist())
        group = GroupTransfer(GroupIndex(0), keys, rows, slots, generations)
        cuts = self._cuts(slots) if kind is JobKind.STORE and number == 1 else ()
        return TransferJob(JobId(number), kind, (group,), None, self._opened.epoch, cuts)

    def _cuts(self, slots: IntArray) -> tuple[RegionCut, ...]:
        """The cuts of these slots' regions: every job of the first pass says them, whichever comes first."""
        space = self._opened.space
        if space is None:
            return ()
        regions = distinct(slots // space.slots_per_region).tolist()
        return tuple(RegionCut(region, space.slot_bytes[0], 1) for region in regions)

    @staticmethod
    def _key(row: int, number: int) -> OffloadKey:
        return make_key((number << 64 | row).to_bytes(KEY_BYTES, "little"), 0)


def _slots_in_turn(space: SlotSpace) -> IntArray:
    """Every slot of a space of one slot size, one of each root in turn, in the order of their places on it."""
    of_roots, first = [], 0
    for regions in space.regions_by_root:
        of_roots.append(range(first * space.slots_per_region, (first + regions) * space.slots_per_region))
        first += regions
    return int_array([slot for turn in zip_longest(*of_roots) for slot in turn if slot is not None])
