"""Measuring the GPU and the CPU tier: the layout's own blocks between KV tensors and rows of a separate region."""

import time

import numpy as np
import torch

from kvtier.tier.contract import LoadStore, Rows
from kvtier.tools.bench.load_generator import CHUNK_BLOCKS, SINGLE_JOBS, WIPED, Move, Timing, block_key, drive
from kvtier.tools.bench.results import SCATTERED, Figure, TierFigures
from kvtier.tools.replay.content import BlockContent, Pages
from kvtier.tools.replay.engine import allocate_tensors
from kvtier.types.arrays import IntArray, int_array
from kvtier.types.geometry import Geometry, GroupLayout
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import GPUGroup, JobKind, TransferJob
from kvtier.types.keys import GPU, GroupIndex, JobId

LANES = 4
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
