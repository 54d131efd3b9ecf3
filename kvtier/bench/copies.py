"""Measuring the GPU and the CPU tier: the layout's own blocks between KV tensors and rows of a region of our own."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtier.bench.content import WIPED, Bytes
from kvtier.bench.figures import SCATTERED, Figure
from kvtier.bench.moving import CHUNK_BLOCKS, KEY_BYTES, SINGLE_JOBS, Course, Move, Timing
from kvtier.geometry import Geometry
from kvtier.jobs import GPURuns, GroupTransfer, IntArray, JobKind, TransferJob, int_array
from kvtier.keys import GroupIndex, JobId, make_key
from kvtier.loadstore import KVCaches, Rows

if TYPE_CHECKING:
    import torch

LANES = 4
MEMCPY_PIECE_BYTES = 64 << 20


class Blocks:
    """KV tensors of our own on a device with random content, and a row for each offloaded block of each group.

    Every tensor belongs to one group of the layout, as `kvtier.config.layout` makes them.
    """

    def __init__(self, geometry: Geometry, num_bytes: int, device: str, seed: int) -> None:
        """As many blocks of each group as `num_bytes` of rows hold, at least one."""
        import torch

        self.geometry = geometry
        self.per_group = max(1, num_bytes // geometry.row_bytes // geometry.num_groups)
        random = np.random.default_rng(seed)
        self.content: list[Bytes] = []
        self.tensors: list[torch.Tensor] = []
        for group in range(geometry.num_groups):
            shape = (self.per_group * geometry.factor, geometry.page_bytes(group))
            self.content.append(np.frombuffer(random.bytes(shape[0] * shape[1]), dtype=np.uint8).reshape(shape))
            self.tensors.append(torch.from_numpy(self.content[-1].copy()).view(torch.int8).to(device))

    @property
    def num_rows(self) -> int:
        """Rows that are needed for all blocks."""
        return self.per_group * self.geometry.num_groups

    @property
    def kv_caches(self) -> KVCaches:
        """The tensors as a stack wants them."""
        return KVCaches(self.tensors)

    def jobs(self, kind: JobKind, order: IntArray, per_job: int) -> list[TransferJob]:
        """Jobs over the blocks of each group in an order: block `order[i]` of the tensors belongs to row `i`."""
        return [
            TransferJob(
                JobId(first),
                kind,
                tuple(self._transfer(group, first, order[first : first + per_job]) for group in self._groups()),
            )
            for first in range(0, len(order), per_job)
        ]

    def _groups(self) -> range:
        return range(self.geometry.num_groups)

    def _transfer(self, group: int, first: int, blocks: IntArray) -> GroupTransfer:
        factor = self.geometry.factor
        rows = np.arange(first, first + len(blocks), dtype=np.int64) + group * self.per_group
        pages = (blocks[:, None] * factor + np.arange(factor)).ravel()
        keys = tuple(make_key(row.to_bytes(KEY_BYTES, "little"), group) for row in rows.tolist())
        return GroupTransfer(GroupIndex(group), keys, GPURuns.whole(pages, factor), rows, rows + 1)

    def wrong_rows(self, rows: Rows, order: IntArray) -> int:
        """Rows that do not hold the block that belongs there."""
        wrong = 0
        for group in self._groups():
            first, size = group * self.per_group, self.geometry.kv_bytes_per_offloaded_block(group)
            for at, block in enumerate(order.tolist()):
                wrong += not np.array_equal(rows.view[first + at, :size], self._block(group, block))
        return wrong

    def wrong_tensors(self) -> int:
        """Blocks of the tensors that differ from what they held at first."""
        import torch

        wrong = 0
        for group, tensor in enumerate(self.tensors):
            found = tensor.cpu().view(torch.uint8).numpy().reshape(self.per_group, -1)
            wrong += sum(not np.array_equal(found[block], self._block(group, block)) for block in range(self.per_group))
        return wrong

    def wipe_tensors(self) -> None:
        """Overwrite all tensors."""
        for tensor in self.tensors:
            tensor.fill_(np.uint8(WIPED).astype(np.int8).item())
        self.settle()

    def settle(self) -> None:
        """Wait for what the device still has to do for us."""
        if self.tensors[0].device.type == "cuda":
            import torch

            torch.cuda.synchronize()

    def _block(self, group: int, block: int) -> Bytes:
        factor = self.geometry.factor
        return self.content[group][block * factor : (block + 1) * factor].reshape(-1)


@dataclass(frozen=True, slots=True)
class Way:
    """Two calls of a tier that move the same blocks, into the rows and back to the tensors, and their names."""

    into_rows: Move
    into_tensors: Move
    names: tuple[str, str]


@dataclass(slots=True)
class Checked:
    """Blocks that were compared, and those that were wrong."""

    blocks: int = 0
    wrong: int = 0


async def measure_copies(blocks: Blocks, rows: Rows, way: Way, seconds: float, checked: Checked) -> list[Figure]:
    """Copy everything in both directions for about `seconds` each, in order and then scattered, then single blocks.

    Whole rounds only, at least one. Raises ResourceError for a block that came to a bad end.
    """
    geometry = blocks.geometry
    groups = range(geometry.num_groups)
    size = sum(geometry.kv_bytes_per_offloaded_block(group) for group in groups)
    per_token = sum(
        geometry.kv_bytes_per_offloaded_block(group) / geometry.tokens_per_offloaded_block(group) for group in groups
    )
    orders = {"": np.arange(blocks.per_group, dtype=np.int64)}
    if blocks.per_group > 1:
        orders[SCATTERED] = int_array(np.random.default_rng(blocks.per_group).permutation(blocks.per_group))
    figures = []
    for note, order in orders.items():
        rows.view[:] = WIPED
        moved = await _time(blocks, way.into_rows, JobKind.STORE, order, seconds)
        checked.wrong += blocks.wrong_rows(rows, order)
        figures.append(Figure(way.names[0] + note, size, *moved, per_token))
        blocks.wipe_tensors()
        moved = await _time(blocks, way.into_tensors, JobKind.LOAD, order, seconds)
        blocks.settle()
        checked.wrong += blocks.wrong_tensors()
        figures.append(Figure(way.names[1] + note, size, *moved, per_token))
        checked.blocks += 2 * blocks.num_rows
    return figures[::2] + figures[1::2]


async def _time(blocks: Blocks, move: Move, kind: JobKind, order: IntArray, seconds: float) -> tuple[Timing, Timing]:
    """(many blocks under way, one at a time)."""
    bulk, single = Timing(), Timing()
    per_job = max(1, min(CHUNK_BLOCKS, len(order) // LANES))
    jobs = blocks.jobs(kind, order, per_job)
    while bulk.seconds < seconds:
        await Course(math.inf, LANES).run(move, jobs, bulk)
    ones = blocks.jobs(kind, order, 1)[:SINGLE_JOBS]
    await Course(seconds, 1).run(move, ones, single)
    return bulk, single


def measure_memcpy(rows: Rows, seconds: float) -> Timing:
    """What one thread copies from ordinary memory into the rows for about `seconds`: a yardstick for all the others."""
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
