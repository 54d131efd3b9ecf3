"""From runs to bytes: which bytes of the KV tensors belong to which bytes of the region. Pure numpy, no I/O.

For page p of a group (GPU block b, sub-block s of the offloaded block in row r) and tensor reference i::

    GPU side     surface address + b * surface stride
    region side  r * row_bytes + offset(group, worker, s, i)

Pages come first and references second, so the region side is walked in order and neighbours on both sides merge.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.errors import UsageError
from kvtier.geometry import Geometry
from kvtier.jobs import GPURuns, GroupTransfer, IntArray, TransferJob, distinct, int_array
from kvtier_gpu.surfaces import Surface


@dataclass(frozen=True, slots=True, eq=False)
class GroupTable:
    """What never changes about a group on one worker; arrays have one entry for each tensor reference.

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


def group_tables(geometry: Geometry, worker: int, surfaces: Sequence[Surface]) -> tuple[GroupTable, ...]:
    """One table for each group of the layout, for one worker's surfaces (one for each KV tensor)."""
    tables = []
    for group, layout in enumerate(geometry.layout.groups):
        used = [surfaces[ref.tensor] for ref in layout.refs]
        start = geometry.offset(group, worker)
        tables.append(
            GroupTable(
                group,
                int_array([surface.address for surface in used]),
                int_array([surface.stride_bytes for surface in used]),
                int_array([ref.page_size_bytes for ref in layout.refs]),
                int_array([geometry.offset(group, worker, 0, ref) - start for ref in range(len(used))]),
                geometry.page_bytes(group),
                start,
                min(surface.num_blocks for surface in used),
            )
        )
    return tuple(tables)


@dataclass(frozen=True, slots=True, eq=False)
class GroupPages:
    """The pages of one group that a job moves: GPU block ids, and where each page begins in the region (bytes)."""

    table: GroupTable
    gpu_blocks: IntArray
    row_offsets: IntArray

    @property
    def nbytes(self) -> int:
        return len(self.gpu_blocks) * self.table.page_bytes


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """Everything one job moves on one worker: the pages of each group and the rows they lie in (each row once)."""

    groups: tuple[GroupPages, ...]
    rows: IntArray

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self.groups)


@dataclass(frozen=True, slots=True)
class RegionShape:
    """The region as the planner sees it: rows, bytes from row to row, GPU blocks for each offloaded block."""

    num_rows: int
    row_bytes: int
    factor: int


def plan_job(job: TransferJob, tables: Sequence[GroupTable], shape: RegionShape, *, to_gpu: bool) -> CopyPlan:
    """Resolve and check a whole job before any byte moves.

    Raises UsageError, a defect of the caller, for an unknown group, staging that is not GPURuns, a row, a GPU block
    or a sub-block out of range, a row named twice, or (towards the GPU) a GPU block named twice in a group.
    """
    groups = tuple(_plan_group(transfer, tables, shape, to_gpu=to_gpu) for transfer in job.groups)
    rows = np.concatenate([int_array(transfer.slots) for transfer in job.groups]) if job.groups else int_array(())
    if len(distinct(rows)) != len(rows):
        raise UsageError(f"job {job.job_id} names a row twice")
    return CopyPlan(groups, rows)


def _plan_group(
    transfer: GroupTransfer, tables: Sequence[GroupTable], shape: RegionShape, *, to_gpu: bool
) -> GroupPages:
    if not 0 <= transfer.group < len(tables):
        raise UsageError(f"group {transfer.group} of {len(tables)}")
    table, runs, rows = tables[transfer.group], transfer.staging, int_array(transfer.slots)
    where = f"group {transfer.group}"
    if not isinstance(runs, GPURuns):
        raise UsageError(f"{where}: the GPU tier is told its blocks by GPURuns, not by {type(runs).__name__}")
    if len(rows) != len(transfer.keys):
        raise UsageError(f"{where}: {len(transfer.keys)} keys but {len(rows)} rows")
    _within(rows, shape.num_rows, f"{where}: row")
    _within(int_array(runs.blocks), len(rows), f"{where}: offloaded block")
    _within(int_array(runs.counts), shape.factor + 1, f"{where}: sub-blocks of a run")
    _within(int_array(runs.firsts), shape.factor, f"{where}: first sub-block")
    _within(int_array(runs.firsts + runs.counts), shape.factor + 1, f"{where}: end of a run")
    blocks, subs, ids = (int_array(part) for part in runs.pages())
    _within(ids, table.num_blocks, f"{where}: GPU block")
    if to_gpu and len(distinct(ids)) != len(ids):
        raise UsageError(f"{where}: a GPU block is to be written twice")
    return GroupPages(table, ids, rows[blocks] * shape.row_bytes + table.worker_offset + subs * table.page_bytes)


def _within(values: IntArray, end: int, what: str) -> None:
    wrong = (values < 0) | (values >= end)
    if wrong.any():
        raise UsageError(f"{what} {int(values[wrong][0])} is outside 0..{end - 1}")


@dataclass(frozen=True, slots=True)
class Span:
    """Pages `first .. last - 1` of one group's pages: a share of a job for one copy thread."""

    pages: GroupPages
    first: int
    last: int


def cut(plan: CopyPlan, max_bytes: int) -> list[tuple[Span, ...]]:
    """Cut a job into shares of about `max_bytes` bytes, at least one page each; every page is in exactly one share."""
    shares: list[tuple[Span, ...]] = []
    share: list[Span] = []
    room = max_bytes
    for pages in plan.groups:
        first, count = 0, len(pages.gpu_blocks)
        while first < count:
            taken = min(count - first, max(1 if not share else 0, room // pages.table.page_bytes))
            if taken:
                share.append(Span(pages, first, first + taken))
                first += taken
                room -= taken * pages.table.page_bytes
            if not taken or room <= 0:
                shares.append(tuple(share))
                share, room = [], max_bytes
    if share:
        shares.append(tuple(share))
    return shares


@dataclass(frozen=True, slots=True, eq=False)
class Extents:
    """Pieces to copy: `lengths[i]` bytes at GPU address `gpu[i]` and at offset `region[i]` of the region."""

    gpu: IntArray
    region: IntArray
    lengths: IntArray

    def select(self, chosen: npt.NDArray[np.bool_] | IntArray) -> Extents:
        return Extents(self.gpu[chosen], self.region[chosen], self.lengths[chosen])


def extents(span: Span) -> Extents:
    """The bytes of a span, page by page and reference by reference, neighbours on both sides merged."""
    table = span.pages.table
    ids = span.pages.gpu_blocks[span.first : span.last, None]
    starts = span.pages.row_offsets[span.first : span.last, None]
    gpu = (ids * table.strides + table.addresses).ravel()
    region = (starts + table.offsets).ravel()
    return merge(Extents(gpu, region, np.tile(table.lengths, len(ids))))


def merge(found: Extents) -> Extents:
    """Join each extent to its predecessor where the two follow each other on both sides."""
    if len(found.gpu) < 2:
        return found
    lengths = found.lengths[:-1]
    follows = (found.gpu[:-1] + lengths == found.gpu[1:]) & (found.region[:-1] + lengths == found.region[1:])
    heads = np.flatnonzero(np.concatenate(([True], ~follows)))
    return Extents(found.gpu[heads], found.region[heads], np.add.reduceat(found.lengths, heads))


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Pieces of one length, to be copied by one gather and one scatter."""

    gpu: IntArray
    region: IntArray
    length: int


def batches(found: Extents, piece_bytes: int, min_pieces: int) -> Iterator[Batch]:
    """The extents as batches of equal pieces of at most about `piece_bytes`, cut finer (but not under 1 KiB) where
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
        yield Batch((same.gpu[:, None] + starts).ravel(), (same.region[:, None] + starts).ravel(), piece)
