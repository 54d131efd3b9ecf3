"""The copies of plans between CUDA memory and the region: each group's pages by the path that suits them.

The rule for paths is measured (docs/benchmarks.md, copy, one H200), and not chosen by a trial at opening: one direction
alone, over a few MiB, shows too little of both at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

import numpy as np
import torch

from kvtier.types.arrays import IntArray, distinct
from kvtier.types.geometry import Geometry
from kvtier_gpu.copy_plan import CopyPlan, Extents, GroupPages, GroupTable, extents, merge, rows_of, split
from kvtier_gpu.engines.contract import Bytes, CopyFailure, Direction, ManyCopies
from kvtier_gpu.engines.device import CudaDevice, DeviceStream
from kvtier_gpu.engines.pinned_region import RowSlices
from kvtier_gpu.kv_tensors import KVTensor


@dataclass(frozen=True, slots=True, eq=False)
class GroupTensors:
    """A group's pages on the device: `pages[i]` is reference i's, (num_blocks, page / width) integers of `width` bytes.

    `width` is the widest integer that divides every address, stride, length and offset of the group.
    """

    table: GroupTable
    pages: tuple[torch.Tensor, ...]
    width: int


def tensors_of_group(table: GroupTable, tensors: Sequence[KVTensor]) -> GroupTensors:
    """A group's pages as device tensors, views of the engine's memory; one tensor for each reference of the table."""
    width = math.gcd(8, table.page_bytes, *(tensor.tensor.untyped_storage().data_ptr() for tensor in tensors))
    for numbers in (table.addresses, table.strides, table.lengths, table.offsets):
        width = math.gcd(width, *numbers.tolist())
    lengths = table.lengths.tolist()
    pages = tuple(tensor.pages(length, width) for tensor, length in zip(tensors, lengths, strict=True))
    return GroupTensors(table, pages, width)


def group_tensors(
    geometry: Geometry, tables: Sequence[GroupTable], tensors: Sequence[KVTensor]
) -> tuple[GroupTensors, ...]:
    """Each group's pages as device tensors."""
    groups = zip(tables, geometry.layout.groups, strict=True)
    return tuple(tensors_of_group(table, [tensors[ref.tensor] for ref in layout.refs]) for table, layout in groups)


class CopyPath(StrEnum):
    """KERNEL: all pieces of a job by a kernel of ours. BATCH: by one call of the driver. GATHER: pages are gathered on
    the device and cross the bus in pieces as long as a row's slice. SINGLE: an operation of torch for each page.
    """

    KERNEL = "kernel"
    BATCH = "batch"
    GATHER = "gather"
    SINGLE = "single"


MANY = (CopyPath.KERNEL, CopyPath.BATCH)
"""The paths that make many copies by one call."""
SHORT_LOAD_BYTES = 48 << 10
"""Loads of shorter fragments are faster by the kernel, 7 times at 16 KiB, as fast at 64 KiB; without it by way of
staging. Stores are not the kernel's: the bus is not what they wait for, and a model decodes more slowly beside it."""
SINGLE_BYTES = 512 << 10
"""Without the driver's call, the pass through staging costs more than an operation for each page from here on."""


def choose_paths(
    tables: Sequence[GroupTable], wanted: CopyPath | None, many: Container[CopyPath]
) -> dict[Direction, tuple[CopyPath, ...]]:
    """The path of each group in each direction: `wanted` where it works, else by rule.

    `many`: those of `MANY` that work.
    """
    if wanted is not None and (wanted in many or wanted not in MANY):
        return dict.fromkeys(Direction, (wanted,) * len(tables))
    return {way: tuple(path_by_rule(table, way, many) for table in tables) for way in Direction}


def path_by_rule(table: GroupTable, direction: Direction, many: Container[CopyPath]) -> CopyPath:
    """The path for a group by the length of its shortest fragment. `many`: those of `MANY` that work."""
    fragment_bytes = int(table.lengths.min())
    is_short_load = direction is Direction.TO_GPU and fragment_bytes < SHORT_LOAD_BYTES
    if is_short_load and CopyPath.KERNEL in many:
        return CopyPath.KERNEL
    if CopyPath.BATCH not in many:
        return CopyPath.SINGLE if fragment_bytes >= SINGLE_BYTES else CopyPath.GATHER
    return CopyPath.GATHER if is_short_load else CopyPath.BATCH


@dataclass(frozen=True, slots=True, eq=False)
class CopySides:
    """The two sides of copies: the KV tensors of groups on a device, and the worker's slices of a region's rows.

    `many` are the ways to make many copies by one call that may be used.
    """

    device: CudaDevice
    groups: tuple[GroupTensors, ...]
    region: Bytes
    rows: RowSlices
    many: Mapping[CopyPath, ManyCopies]


def gather(group: GroupTensors, ids: torch.Tensor, staging: torch.Tensor) -> None:
    """Bring pages into staging, one after another."""
    on_device = ids.to(staging.device, non_blocking=True)
    for on_gpu, staged in zip(group.pages, _columns(group, staging, len(ids)), strict=True):
        staged.copy_(on_gpu.index_select(0, on_device))


def scatter(group: GroupTensors, ids: torch.Tensor, staging: torch.Tensor) -> None:
    """Bring pages from staging to their places."""
    on_device = ids.to(staging.device, non_blocking=True)
    for on_gpu, staged in zip(group.pages, _columns(group, staging, len(ids)), strict=True):
        on_gpu.index_copy_(0, on_device, staged)


def _columns(group: GroupTensors, staging: torch.Tensor, count: int) -> list[torch.Tensor]:
    """The staging of `count` pages, one (count, page / width) view for each tensor reference."""
    width, page_bytes = group.width, group.table.page_bytes
    staged = staging[: count * page_bytes].view(group.pages[0].dtype).view(count, page_bytes // width)
    places = zip(group.table.offsets.tolist(), group.table.lengths.tolist(), strict=True)
    return [staged[:, offset // width : (offset + length) // width] for offset, length in places]


def move_each(on_device: torch.Tensor, in_region: torch.Tensor, pieces: Extents, direction: Direction) -> None:
    """Copy pieces one by one between flat uint8 tensors; `pieces.gpu` are offsets on the device's side."""
    for at, row, length in zip(pieces.gpu.tolist(), pieces.region.tolist(), pieces.lengths.tolist(), strict=True):
        _move(on_device[at : at + length], in_region[row : row + length], direction)


def move_pages(group: GroupTensors, in_region: torch.Tensor, pages: GroupPages, direction: Direction) -> None:
    """Copy pages of a group one by one; the region is a flat uint8 tensor."""
    for tensor, offset in zip(group.pages, group.table.offsets.tolist(), strict=True):
        as_bytes = tensor.view(torch.uint8)
        for block, start in zip(pages.gpu_blocks.tolist(), pages.row_offsets.tolist(), strict=True):
            first = start + offset
            _move(as_bytes[block], in_region[first : first + as_bytes.shape[1]], direction)


def _move(on_device: torch.Tensor, in_region: torch.Tensor, direction: Direction) -> None:
    """Issue one copy across the bus."""
    to, source = (in_region, on_device) if direction is Direction.TO_ROWS else (on_device, in_region)
    to.copy_(source, non_blocking=True)


STAGING_BYTES = 16 << 20
URGENT_STAGING_BYTES = 4 << 20


class PlanCopier:
    """Issues copies in one direction to one stream, which the calling thread has entered and which is not the legacy
    default stream. `paths[g]` is the path of group g; those that gather share about so much staging, flat uint8 on the
    device. Everything is issued to one stream, so the staging is used again without a wait in between.

    What the driver refuses of many copies is copied once more, an operation of torch for each piece: a driver that
    refuses costs time and no blocks.
    """

    def __init__(
        self,
        sides: CopySides,
        stream: DeviceStream,
        direction: Direction,
        paths: Sequence[CopyPath],
        staging_bytes: int,
    ) -> None:
        self._sides = sides
        self._stream = stream
        self._direction = direction
        self._paths = tuple(paths)
        self._region = torch.from_numpy(sides.region)
        gathered = [sides.groups[group] for group, path in enumerate(paths) if path is CopyPath.GATHER]
        pages = [group.table.page_bytes for group in gathered]
        self._staging_bytes = -(-max(staging_bytes, *pages) // 8) * 8 if pages else 0
        self._staging = sides.device.empty(self._staging_bytes)

    @property
    def driver_error(self) -> tuple[str, int] | None:
        """The last refusal of the driver, of any lane: (of what, its answer); None if there was none."""
        refused = [one for one in self._sides.many.values() if one.last_error]
        return (refused[0].name, refused[0].last_error) if refused else None

    def _enqueue(self, operation: Callable[[], None]) -> None:
        """Issue torch operations. Raises what the device refuses."""
        self._sides.device.enqueue(self._stream, operation)

    def _call(self, found: Extents, path: CopyPath) -> list[IntArray]:
        """Issue copies by one of the calls for many. `found.gpu` are addresses. Returns the rows of each that was
        refused."""
        sides = self._sides
        refused = sides.many[path].issue(found, sides.region, self._direction, self._stream.cuda_stream)
        return [distinct(places // sides.rows.row_bytes) for places in refused]

    def issue(self, plan: CopyPlan) -> list[CopyFailure]:
        """Issue every copy of a plan, what can be issued of it. Returns why some were not, with their rows."""
        by_path: dict[CopyPath, list[GroupPages]] = {path: [] for path in CopyPath}
        for pages in plan.groups:
            by_path[self._paths[pages.table.group]].append(pages)
        others = by_path[CopyPath.GATHER] + by_path[CopyPath.SINGLE]
        parts = [(part, self._issue_pages) for part in split(plan.of(others), max(1, self._staging_bytes))]
        for path in filter(by_path.get, MANY):
            parts += [(part, self._issue_single) for part in self._issue_many(by_path[path], path)]
        failures = []
        for part, issue in parts:
            try:
                for pages in part:
                    issue(pages)
            except Exception as refusal:
                failures.append(CopyFailure(refusal.with_traceback(None), rows_of(part, plan.row_bytes)))
        return failures

    def _issue_many(self, groups: Sequence[GroupPages], path: CopyPath) -> list[tuple[GroupPages, ...]]:
        """Issue all copies of groups by one call. No piece reaches into another row: rows may be pinned apart.

        Returns the pages of each call that the driver refused.
        """
        row_bytes = self._sides.rows.row_bytes
        found = [extents(pages, row_bytes) for pages in groups]
        columns = zip(*((one.gpu, one.region, one.lengths) for one in found), strict=True)
        refused = self._call(Extents(*map(np.concatenate, columns)), path)
        return [tuple([pages.in_rows(rows, row_bytes) for pages in groups]) for rows in refused]

    def _issue_pages(self, pages: GroupPages) -> None:
        if self._paths[pages.table.group] is CopyPath.GATHER:
            self._issue_gathered(pages)
        else:
            self._issue_single(pages)

    def _issue_gathered(self, pages: GroupPages) -> None:
        """Issue the copies of some pages of a group, which fit in the staging. Raises what the device refuses."""
        group = self._sides.groups[pages.table.group]
        ids = torch.from_numpy(np.ascontiguousarray(pages.gpu_blocks))
        if self._direction is Direction.TO_ROWS:
            self._enqueue(partial(gather, group, ids, self._staging))
            self._issue_staged(pages)
        else:
            self._issue_staged(pages)
            self._enqueue(partial(scatter, group, ids, self._staging))

    def _issue_staged(self, pages: GroupPages) -> None:
        """Issue the copies between staging and the region; pages that follow each other in a row are one piece."""
        page_bytes, starts = pages.table.page_bytes, pages.row_offsets
        staged = np.arange(len(starts), dtype=np.int64) * page_bytes
        lengths = np.full(len(starts), page_bytes, dtype=np.int64)
        pieces = merge(Extents(staged, starts, lengths), self._sides.rows.row_bytes)
        addresses = replace(pieces, gpu=pieces.gpu + self._staging.data_ptr())
        if CopyPath.BATCH not in self._sides.many or self._call(addresses, CopyPath.BATCH):
            self._enqueue(partial(move_each, self._staging, self._region, pieces, self._direction))

    def _issue_single(self, pages: GroupPages) -> None:
        group = self._sides.groups[pages.table.group]
        self._enqueue(partial(move_pages, group, self._region, pages, self._direction))
