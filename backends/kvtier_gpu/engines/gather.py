"""Copies made of torch operations: pages gathered on the device, or one operation for each page.

Gathered pages of a row's slice lie together in staging memory on the device, so they cross the bus as one piece.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from kvtier_gpu.copy_plan import Extents, GroupPages, merge
from kvtier_gpu.engines.contract import Direction
from kvtier_gpu.engines.copy_lane import CopyLane
from kvtier_gpu.engines.group_tensors import GroupTensors


class GatherCopier:
    """Issues the copies of gathered pages. `staging` is flat uint8 on the device, `region` the lane's as a tensor.

    The pages of one call must fit in `staging`. Everything is issued to one stream, so the next call can use the
    staging again without a wait in between.
    """

    def __init__(self, lane: CopyLane, region: torch.Tensor, staging: torch.Tensor) -> None:
        self._lane = lane
        self._region = region
        self._staging = staging

    def copy(self, pages: GroupPages) -> None:
        """Issue the copies of some pages of a group. Raises what the device refuses."""
        group = self._lane.sides.groups[pages.table.group]
        ids = torch.from_numpy(np.ascontiguousarray(pages.gpu_blocks))
        if self._lane.direction is Direction.TO_ROWS:
            self._lane.enqueue(partial(gather, group, ids, self._staging))
            self._cross(pages)
        else:
            self._cross(pages)
            self._lane.enqueue(partial(scatter, group, ids, self._staging))

    def _cross(self, pages: GroupPages) -> None:
        """Issue the copies between staging and the region; pages that follow each other in a row are one piece."""
        lane, page_bytes, starts = self._lane, pages.table.page_bytes, pages.row_offsets
        staged = np.arange(len(starts), dtype=np.int64) * page_bytes
        pieces = merge(
            Extents(staged, starts, np.full(len(starts), page_bytes, dtype=np.int64)), lane.sides.rows.row_bytes
        )
        addresses = replace(pieces, gpu=pieces.gpu + self._staging.data_ptr())
        if lane.sides.batch is None or lane.call(addresses):
            lane.enqueue(partial(move_each, self._staging, self._region, pieces, lane.direction))


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
