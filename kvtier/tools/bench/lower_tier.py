"""Measuring a tier below the CPU: blocks of one size from rows into its slots and back, in a temporary place."""

from collections.abc import Iterable, Sequence
from itertools import chain, islice, zip_longest

import torch

from kvtier.tier.checksum import checksum
from kvtier.tier.contract import LoadStore, Opened, Rows, SlotSpace
from kvtier.tools.bench.load_generator import CHUNK_BLOCKS, SINGLE_JOBS, WIPED, Timing, block_key, drive
from kvtier.tools.bench.results import Figure, TierFigures
from kvtier.tools.replay.content import BlockContent, Pages
from kvtier.types.arrays import int_array
from kvtier.types.geometry import GroupLayout
from kvtier.types.jobs import JobKind, RegionFormat, RowGroup, TransferJob
from kvtier.types.keys import GroupIndex, JobId


class LowerTierBench:
    """Stores into and loads from one open tier, each row of `rows` into a slot of its own, roots in turn.

    A job is over a range of rows. What was measured and compared is added to `found`.
    """

    def __init__(self, tier: LoadStore, opened: Opened, rows: Rows, seed: int, found: TierFigures) -> None:
        self._tier = tier
        self._opened = opened
        self._rows = rows
        self._seed = seed
        self._found = found
        self._slots = [] if opened.space is None else _slots_in_turn(opened.space)[: rows.num_rows]
        self._passes = 0
        self._stored: dict[int, int] = {}
        """For each row that the tier holds the pass that stored it."""

    async def measure(self, seconds: float, inflight_bytes: int, bytes_per_token: float) -> None:
        """Store and load everything for about `seconds` each way, then single blocks. Raises ResourceError for a
        block that was not moved."""
        size = self._rows.row_bytes
        num_blocks = self._rows.num_rows if self._opened.space is None else len(self._slots)
        per_job = max(1, min(CHUNK_BLOCKS, inflight_bytes // size // 4, num_blocks))
        jobs = [range(first, min(first + per_job, num_blocks)) for first in range(0, num_blocks, per_job)]
        lanes = max(1, inflight_bytes // size // per_job)
        stores, loads = await self._store(jobs, lanes, seconds), await self._load(jobs, lanes, seconds)
        singles = [range(row, row + 1) for row in islice(self._stored, SINGLE_JOBS)]
        one_stored = await self._store(singles, 1, seconds, once=True)
        one_loaded = await self._load(singles, 1, seconds, once=True)
        self._found.figures += [
            Figure("store", size, stores, one_stored, bytes_per_token),
            Figure("load", size, loads, one_loaded, bytes_per_token),
        ]

    async def _store(self, jobs: Sequence[range], lanes: int, seconds: float, once: bool = False) -> Timing:
        timing = Timing()
        while timing.seconds < seconds:
            self._passes += 1
            self._fill(chain(*jobs))
            transfers = [self._transfer(JobKind.STORE, rows, self._passes) for rows in jobs]
            begun = await drive(self._tier.store, transfers, timing, lanes, seconds)
            self._stored |= dict.fromkeys(chain(*jobs[:begun]), self._passes)
            if once or self._opened.space is None:  # a shared tier takes a key once
                break
        return timing

    async def _load(self, jobs: Sequence[range], lanes: int, seconds: float, once: bool = False) -> Timing:
        timing = Timing()
        jobs = [rows for rows in jobs if rows[0] in self._stored]
        while jobs and timing.seconds < seconds:
            self._rows.view[:] = WIPED
            transfers = [self._transfer(JobKind.LOAD, rows, self._stored[rows[0]]) for rows in jobs]
            begun = await drive(self._tier.load, transfers, timing, lanes, seconds)
            pages = self._pages({row: self._stored[row] for row in chain(*jobs[:begun])})
            self._found.wrong_blocks += len(self._content().check(pages))
            self._found.checked_blocks += len(pages.keys)
            if once:
                break
        return timing

    def _fill(self, rows: Iterable[int]) -> None:
        """Write what the next pass stores, with its checksums."""
        pages = self._pages(dict.fromkeys(rows, self._passes))
        self._content().write(pages)
        for row in pages.gpu_blocks.tolist():
            self._rows.set_checksum(row, checksum(memoryview(self._rows.view[row])))

    def _content(self) -> BlockContent:
        """Content of the rows. Made again for each use: a region that is referred to cannot be closed."""
        return BlockContent(GroupLayout.of_pages(self._rows.row_bytes), [torch.from_numpy(self._rows.view)])

    def _pages(self, passes: dict[int, int]) -> Pages:
        """Rows, each with what its pass stores there."""
        return Pages([block_key(self._seed, number, row) for row, number in passes.items()], int_array([*passes]))

    def _transfer(self, kind: JobKind, rows: range, number: int) -> TransferJob:
        keys = tuple(block_key(self._seed, number, row) for row in rows)
        placed = rows if self._slots else range(0)  # a shared tier places blocks itself
        slots = [self._slots[row] for row in placed]
        generations = [row + number * len(self._slots) + 1 for row in placed]
        group = RowGroup(GroupIndex(0), keys, rows, slots, generations)
        space = self._opened.space if kind is JobKind.STORE and number == 1 else None
        formats = () if space is None else _formats(space, slots)
        return TransferJob(JobId(number), kind, (group,), None, self._opened.epoch, formats)


def _formats(space: SlotSpace, slots: Sequence[int]) -> tuple[RegionFormat, ...]:
    """The formats of these slots' regions: every job of the first pass carries them, as any may run first."""
    regions = sorted({slot // space.slots_per_region for slot in slots})
    return tuple(RegionFormat(region, space.slot_bytes[0], 1) for region in regions)


def _slots_in_turn(space: SlotSpace) -> list[int]:
    """Every slot of a space of one slot size, one of each root in turn, in the order of their places on it."""
    of_roots, first = [], 0
    for regions in space.regions_by_root:
        of_roots.append(range(first * space.slots_per_region, (first + regions) * space.slots_per_region))
        first += regions
    return [slot for turn in zip_longest(*of_roots) for slot in turn if slot is not None]
