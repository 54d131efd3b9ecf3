"""The measurement of one tier.

Of the GPU and the CPU tier: the layout's own blocks between KV tensors and rows of a separate region. Of a tier below
them: blocks of one size from rows into its slots and back, in a temporary place.
"""

import time
from collections.abc import Iterable, Sequence
from itertools import chain, islice, zip_longest

import numpy as np
import torch

from kvtier.tier.checksum import checksum
from kvtier.tier.contract import LoadStore, Opened, Rows, SlotSpace
from kvtier.tools.bench.load_generator import CHUNK_BLOCKS, SINGLE_JOBS, WIPED, Move, Timing, block_key, drive
from kvtier.tools.bench.results import SCATTERED, Figure, TierFigures
from kvtier.tools.replay.content import BlockContent, Pages
from kvtier.tools.replay.engine import allocate_tensors
from kvtier.types.arrays import IntArray, int_array
from kvtier.types.geometry import Geometry, GroupLayout
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import GPUGroup, JobKind, RegionFormat, RowGroup, TransferJob
from kvtier.types.keys import GPU, GroupIndex, JobId

LANES = 4
"""Jobs of copies in flight at once."""
MEMCPY_PIECE_BYTES = 64 << 20


class Blocks:
    """KV tensors on a device with known content, and a row for each offloaded block of each group.

    Every tensor belongs to one group of the layout, as `kvtier.config.layout` makes them.
    """

    def __init__(self, geometry: Geometry, num_bytes: int, device: str, seed: int) -> None:
        """Makes as many blocks of each group as `num_bytes` of rows hold, at least one."""
        self.geometry = geometry
        self.per_group = max(1, num_bytes // geometry.row_bytes // geometry.num_groups)
        self.num_rows = self.per_group * geometry.num_groups
        self.tensors = allocate_tensors(geometry.layout, self.per_group * geometry.factor, device)
        self._groups = range(geometry.num_groups)
        self._seed = seed
        for group, layout in enumerate(geometry.layout.groups):
            BlockContent(layout, self.tensors).write(self._pages(group, np.arange(self.per_group)))

    def jobs(self, kind: JobKind, order: IntArray, per_job: int) -> list[TransferJob]:
        """Jobs over the blocks of each group in an order: block `order[i]` of the tensors belongs to row `i`."""
        return [
            TransferJob(
                JobId(first),
                kind,
                tuple(self._transfer(group, first, order[first : first + per_job]) for group in self._groups),
            )
            for first in range(0, len(order), per_job)
        ]

    def _transfer(self, group: int, first: int, blocks: IntArray) -> GPUGroup:
        rows = np.arange(first, first + len(blocks), dtype=np.int64) + group * self.per_group
        keys = tuple(block_key(self._seed, 0, row, group) for row in rows.tolist())
        return GPUGroup(
            GroupIndex(group), keys, GPURuns.whole(self._parts(blocks), self.geometry.factor), rows, rows + 1
        )

    def _parts(self, blocks: IntArray) -> IntArray:
        """The GPU blocks of offloaded blocks."""
        factor = self.geometry.factor
        return (blocks[:, None] * factor + np.arange(factor)).ravel()

    def _pages(self, group: int, blocks: IntArray) -> Pages:
        """The GPU blocks of offloaded blocks and what they hold."""
        parts = self._parts(blocks)
        return Pages([block_key(self._seed, 0, part, group) for part in parts.tolist()], parts)

    def wrong_rows(self, rows: Rows, order: IntArray) -> int:
        """Rows that do not hold the block that belongs there."""
        wrong = 0
        for group in self._groups:
            first, size = group * self.per_group, self.geometry.kv_bytes_per_offloaded_block(group)
            page_bytes = self.geometry.page_bytes(group)
            found = np.ascontiguousarray(rows.view[first : first + len(order), :size]).reshape(-1, page_bytes)
            content = BlockContent(GroupLayout.of_pages(page_bytes), [torch.from_numpy(found)])
            wrong += self._count_wrong(content, Pages(self._pages(group, order).keys, np.arange(len(found))))
        return wrong

    def wrong_tensors(self) -> int:
        """Blocks of the tensors that differ from what they held at first."""
        return sum(
            self._count_wrong(BlockContent(layout, self.tensors), self._pages(group, np.arange(self.per_group)))
            for group, layout in enumerate(self.geometry.layout.groups)
        )

    def _count_wrong(self, content: BlockContent, pages: Pages) -> int:
        return len({page.gpu_block // self.geometry.factor for page in content.check(pages)})

    def wipe_tensors(self) -> None:
        """Overwrite all tensors."""
        for tensor in self.tensors:
            tensor.view(torch.uint8).fill_(WIPED)
        self.synchronize()

    def synchronize(self) -> None:
        """Wait until the device has done what was queued."""
        if self.tensors[0].device.type == "cuda":
            torch.cuda.synchronize()


async def measure_copies(blocks: Blocks, rows: Rows, tier: LoadStore, seconds: float, found: TierFigures) -> None:
    """Copy everything in both directions for about `seconds` each, in order and then scattered, then single blocks.

    The GPU tier stores into tensors, the CPU tier stores into rows. Whole rounds only, at least one. Adds to `found`.
    Raises ResourceError for a block that was not moved.
    """
    geometry = blocks.geometry
    sizes = [geometry.kv_bytes_per_offloaded_block(group) for group in range(geometry.num_groups)]
    per_token = sum(size / geometry.tokens_per_offloaded_block(group) for group, size in enumerate(sizes))
    orders = {"": np.arange(blocks.per_group, dtype=np.int64)}
    if blocks.per_group > 1:
        orders[SCATTERED] = int_array(np.random.default_rng(blocks.per_group).permutation(blocks.per_group))
    into_rows, into_tensors = tier.store, tier.load
    names = ("store", "load")
    if tier.medium == GPU:
        into_rows, into_tensors = into_tensors, into_rows
        names = ("to_rows", "to_GPU")
    figures = []
    for note, order in orders.items():
        rows.view[:] = WIPED
        moved = await _time(blocks, into_rows, JobKind.STORE, order, seconds)
        found.wrong_blocks += blocks.wrong_rows(rows, order)
        figures.append(Figure(names[0] + note, sum(sizes), *moved, per_token))
        blocks.wipe_tensors()
        moved = await _time(blocks, into_tensors, JobKind.LOAD, order, seconds)
        blocks.synchronize()
        found.wrong_blocks += blocks.wrong_tensors()
        figures.append(Figure(names[1] + note, sum(sizes), *moved, per_token))
        found.checked_blocks += 2 * blocks.num_rows
    found.figures += figures[::2] + figures[1::2]


async def _time(blocks: Blocks, move: Move, kind: JobKind, order: IntArray, seconds: float) -> tuple[Timing, Timing]:
    """(many blocks in flight, one at a time)."""
    bulk, single = Timing(), Timing()
    per_job = max(1, min(CHUNK_BLOCKS, len(order) // LANES))
    jobs = blocks.jobs(kind, order, per_job)
    while bulk.seconds < seconds:
        await drive(move, jobs, bulk, LANES)
    await drive(move, blocks.jobs(kind, order, 1)[:SINGLE_JOBS], single, 1, seconds)
    return bulk, single


def measure_memcpy(rows: Rows, seconds: float) -> Timing:
    """Copies of one thread from ordinary memory into the rows for about `seconds`: the reference for other figures."""
    target = rows.view.reshape(-1)[: min(MEMCPY_PIECE_BYTES, rows.view.size)]
    source = np.full(len(target), WIPED, dtype=np.uint8)
    timing = Timing()
    while timing.seconds < seconds:
        started, cpu_started = time.perf_counter(), time.process_time()
        np.copyto(target, source)
        timing.seconds += time.perf_counter() - started
        timing.cpu_seconds += time.process_time() - cpu_started
        timing.moved_bytes += len(target)
    return timing


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
