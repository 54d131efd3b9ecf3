"""From runs to bytes: which bytes of the KV tensors belong to which bytes of the region. Pure numpy, no I/O.

For page p of a group (GPU block b, sub-block s of the offloaded block in row r) and tensor reference i::

    GPU side     tensor address + b * tensor stride
    region side  r * row_bytes + offset(group, worker, s, i)

Pages come first and references second, so the region side is walked in order and neighbours on both sides merge.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from kvtier.errors import UsageError
from kvtier.types.arrays import NO_IDS, IntArray, distinct, int_array
from kvtier.types.checks import outside
from kvtier.types.geometry import Geometry
from kvtier.types.jobs import GPUGroup, TransferJob
from kvtier.types.values import job_value
from kvtier_gpu.kv_tensors import KVTensor

BLOCKS_OF = attrgetter("gpu_blocks")


@dataclass(frozen=True, slots=True, eq=False)
class GroupTable:
    """The constants of a group on one worker; arrays have one entry for each tensor reference.

    `addresses` and `strides` are the GPU side's, `lengths` the bytes of a page there, `offsets` where they lie inside
    a page of `page_bytes` on the region's side. `worker_offset` is where the worker's slice begins in a row.
    """

    group: int
    addresses: IntArray
    strides: IntArray
    lengths: IntArray
    offsets: IntArray
    page_bytes: int
    worker_offset: int
    num_blocks: int


def group_tables(geometry: Geometry, worker: int, tensors: Sequence[KVTensor]) -> tuple[GroupTable, ...]:
    """A table for each group of the layout, for one worker's KV tensors."""
    tables = []
    for group, layout in enumerate(geometry.layout.groups):
        used = [tensors[ref.tensor] for ref in layout.refs]
        start = geometry.offset(group, worker)
        tables.append(
            GroupTable(
                group,
                int_array([tensor.address for tensor in used]),
                int_array([tensor.stride_bytes for tensor in used]),
                int_array([ref.page_size_bytes for ref in layout.refs]),
                int_array([geometry.offset(group, worker, 0, ref) - start for ref in range(len(used))]),
                geometry.page_bytes(group),
                start,
                min(tensor.num_blocks for tensor in used),
            )
        )
    return tuple(tables)


@job_value
class GroupPages:
    """Pages of one group that a job moves: GPU block ids, and where each page begins in the region (bytes)."""

    table: GroupTable
    gpu_blocks: IntArray
    row_offsets: IntArray

    def slice(self, first: int, end: int) -> GroupPages:
        """The pages first .. end - 1, as far as there are so many."""
        return GroupPages(self.table, self.gpu_blocks[first:end], self.row_offsets[first:end])

    def in_rows(self, rows: IntArray, row_bytes: int) -> GroupPages:
        """The pages that lie in these rows, at least one, ascending."""
        lies_in = self.row_offsets // row_bytes
        chosen = rows[np.minimum(np.searchsorted(rows, lies_in), len(rows) - 1)] == lies_in
        return GroupPages(self.table, self.gpu_blocks[chosen], self.row_offsets[chosen])


@job_value
class CopyPlan:
    """Everything one job moves on one worker: the pages of each group, the rows they lie in (each once), the bytes.

    `row_bytes` is the distance from row to row.
    """

    groups: tuple[GroupPages, ...]
    rows: IntArray
    nbytes: int
    row_bytes: int

    def of(self, groups: Sequence[GroupPages]) -> CopyPlan:
        """These pages of it alone. The rows stay those of all."""
        nbytes = sum([len(pages.gpu_blocks) * pages.table.page_bytes for pages in groups])
        return CopyPlan(tuple(groups), self.rows, nbytes, self.row_bytes)


@dataclass(frozen=True, slots=True)
class RegionShape:
    """The shape of the region for planning: rows, bytes from row to row, GPU blocks for each offloaded block."""

    num_rows: int
    row_bytes: int
    factor: int


def plan_job(job: TransferJob, tables: Sequence[GroupTable], shape: RegionShape, *, to_gpu: bool) -> CopyPlan:
    """Resolve and check a whole job before any byte moves: after this, copies use raw addresses.

    Raises UsageError, a defect of the caller, for an unknown group, a job of a lower tier, a row, a GPU block
    or a sub-block out of range, a row named twice, or (towards the GPU) a GPU block named twice in a group.
    """
    groups, in_rows, nbytes = [], [NO_IDS], 0
    for transfer in job.gpu_groups:
        pages = _plan_group(transfer, tables, shape, to_gpu)
        groups.append(pages)
        in_rows.append(transfer.rows)
        nbytes += len(pages.gpu_blocks) * pages.table.page_bytes
    rows = np.concatenate(in_rows, dtype=np.int64)
    if len(set(rows.tolist())) != len(rows):
        raise UsageError(f"job {job.job_id} names a row twice")
    return CopyPlan(tuple(groups), rows, nbytes, shape.row_bytes)


def rows_of(part: Sequence[GroupPages], row_bytes: int) -> IntArray:
    """The rows that pages lie in, each once."""
    return distinct(np.concatenate([NO_IDS, *(pages.row_offsets // row_bytes for pages in part)]))


def _plan_group(transfer: GPUGroup, tables: Sequence[GroupTable], shape: RegionShape, to_gpu: bool) -> GroupPages:
    if not 0 <= transfer.group < len(tables):
        raise UsageError(f"group {transfer.group} of {len(tables)}")
    table, runs, rows = tables[transfer.group], transfer.runs, np.asarray(transfer.rows, np.int64)
    where = f"group {transfer.group}"
    if len(rows) != len(transfer.keys):
        raise UsageError(f"{where}: {len(transfer.keys)} keys but {len(rows)} rows")
    whole = runs.all_whole(len(rows), shape.factor)
    numbers = [(rows, shape.num_rows, "row"), (runs.gpu_blocks, table.num_blocks, "GPU block")]
    if not whole:
        numbers += [
            (runs.blocks, len(rows), "offloaded block"),
            (runs.counts, shape.factor + 1, "sub-blocks of a run"),
            (runs.firsts, shape.factor, "first sub-block"),
            (runs.firsts + runs.counts, shape.factor + 1, "end of a run"),
        ]
    for values, end, what in numbers:
        if (wrong := outside(values, end)) is not None:
            raise UsageError(f"{where}: {what} {wrong} is outside 0..{end - 1}")
    ids, starts = runs.gpu_blocks, rows * shape.row_bytes + table.worker_offset
    if to_gpu and len(set(ids.tolist())) != len(ids):
        raise UsageError(f"{where}: a GPU block is to be written twice")
    if whole:
        pages = np.arange(shape.factor, dtype=np.int64) * table.page_bytes
        return GroupPages(table, ids, (starts[:, None] + pages).ravel())
    blocks, subs, _ = runs.pages()
    return GroupPages(table, ids, starts[blocks] + subs * table.page_bytes)


def split(plan: CopyPlan, max_bytes: int) -> list[tuple[GroupPages, ...]]:
    """Split a plan into parts of about `max_bytes` bytes, at least one page each; every page is in exactly one part."""
    if plan.nbytes <= max_bytes:
        whole = tuple(compress(plan.groups, map(len, map(BLOCKS_OF, plan.groups))))
        return [whole] if whole else []
    parts: list[list[GroupPages]] = []
    room = 0
    for pages in plan.groups:
        first, page_bytes = 0, pages.table.page_bytes
        while first < len(pages.gpu_blocks):
            if room < page_bytes:
                parts.append([])
                room = max(max_bytes, page_bytes)
            taken = pages.slice(first, first + room // page_bytes)
            parts[-1].append(taken)
            first += len(taken.gpu_blocks)
            room -= len(taken.gpu_blocks) * page_bytes
    return [tuple(part) for part in parts]


@job_value
class Extents:
    """Pieces to copy: `lengths[i]` bytes at GPU address `gpu[i]` and at offset `region[i]` of the region."""

    gpu: IntArray
    region: IntArray
    lengths: IntArray

    def select(self, chosen: npt.NDArray[np.bool_] | IntArray) -> Extents:
        return Extents(self.gpu[chosen], self.region[chosen], self.lengths[chosen])


def extents(pages: GroupPages, row_bytes: int = 0) -> Extents:
    """The bytes of pages, page by page and reference by reference, merged as `merge` does."""
    table = pages.table
    gpu = (pages.gpu_blocks[:, None] * table.strides + table.addresses).ravel()
    region = (pages.row_offsets[:, None] + table.offsets).ravel()
    return merge(Extents(gpu, region, np.tile(table.lengths, len(pages.gpu_blocks))), row_bytes)


def merge(found: Extents, row_bytes: int = 0) -> Extents:
    """Join each extent to its predecessor where the two follow each other on both sides.

    With `row_bytes` no extent reaches from one row into the next.
    """
    if len(found.gpu) < 2:
        return found
    lengths = found.lengths[:-1]
    follows = (found.gpu[:-1] + lengths == found.gpu[1:]) & (found.region[:-1] + lengths == found.region[1:])
    if row_bytes:
        follows &= found.region[1:] % row_bytes != 0
    heads = np.flatnonzero(np.concatenate(([True], ~follows)))
    return Extents(found.gpu[heads], found.region[heads], np.add.reduceat(found.lengths, heads))


@job_value
class GatherBatch:
    """Pieces of one length, to be copied by one gather and one scatter."""

    gpu: IntArray
    region: IntArray
    length: int


def batches(found: Extents, piece_bytes: int, min_pieces: int) -> Iterator[GatherBatch]:
    """The extents as batches of equal pieces of at most about `piece_bytes`; smaller ones (but not under 1 KiB) where
    that brings a batch to `min_pieces`.

    The last piece of an extent ends where the extent ends and may overlap the one before it: the same bytes go to
    the same place twice, which is harmless and spares a remainder.
    """
    for length in distinct(found.lengths).tolist():
        same = found.select(found.lengths == length)
        total = length * len(same.gpu)
        count = -(-length // max(1024, min(piece_bytes, total // min_pieces)))
        piece = -(-length // count)
        starts = np.minimum(np.arange(count, dtype=np.int64) * piece, length - piece)
        yield GatherBatch((same.gpu[:, None] + starts).ravel(), (same.region[:, None] + starts).ravel(), piece)
