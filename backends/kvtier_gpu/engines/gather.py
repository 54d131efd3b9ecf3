"""Gathering small pages on the device, so that a row's slice crosses the bus as one piece.

Plain torch operations, on any device; the CUDA engine adds streams and events.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvtier.types.arrays import IntArray
from kvtier.types.geometry import Geometry
from kvtier_gpu.copy_plan import Extents, GroupPages, GroupTable, merge
from kvtier_gpu.engines.contract import Direction
from kvtier_gpu.kv_tensors import KVTensor

DIRECT_PAGE_BYTES = 256 << 10
"""Groups whose smallest tensor page is at least this long are copied page by page, without the pass through staging."""
STAGING_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, eq=False)
class GroupTensors:
    """A group's pages on the device: `pages[i]` is reference i's, (num_blocks, page / width) integers of `width` bytes.

    `width` is the widest integer that divides every address, stride, length and offset of the group.
    """

    table: GroupTable
    pages: tuple[torch.Tensor, ...]
    width: int

    @property
    def direct(self) -> bool:
        return int(self.table.lengths.min()) >= DIRECT_PAGE_BYTES


def group_tensors(
    geometry: Geometry, tables: Sequence[GroupTable], tensors: Sequence[KVTensor]
) -> tuple[GroupTensors, ...]:
    """Each group's pages as device tensors, views of the engine's memory."""
    result = []
    for table, layout in zip(tables, geometry.layout.groups, strict=True):
        storages = [tensors[ref.tensor].tensor.untyped_storage().data_ptr() for ref in layout.refs]
        width = math.gcd(8, table.page_bytes, *storages)
        for numbers in (table.addresses, table.strides, table.lengths, table.offsets):
            width = math.gcd(width, *numbers.tolist())
        pages = tuple(tensors[ref.tensor].pages(ref.page_size_bytes, width) for ref in layout.refs)
        result.append(GroupTensors(table, pages, width))
    return tuple(result)


def staging_bytes(groups: Sequence[GroupTensors]) -> int:
    """Bytes of staging each direction needs: none if every group is direct, else room for at least one page."""
    pages = [group.table.page_bytes for group in groups if not group.direct]
    return -(-max(STAGING_BYTES, *pages) // 8) * 8 if pages else 0


class GatherCopier:
    """Issues the copies of pages in order. `region` is flat uint8 in host memory, `staging` flat uint8 on the device.

    The pages of one call must fit in `staging`, unless their group is direct. Everything is issued to the current
    stream, so the next call can use the staging again without a wait in between.
    """

    def __init__(self, groups: Sequence[GroupTensors], region: torch.Tensor, staging: torch.Tensor) -> None:
        self._groups = tuple(groups)
        self._region = region
        self._staging = staging

    def copy(self, pages: GroupPages, direction: Direction) -> None:
        """Issue the copies of some pages of one group."""
        group = self._groups[pages.table.group]
        ids = torch.from_numpy(np.ascontiguousarray(pages.gpu_blocks))
        starts = pages.row_offsets
        if group.direct:
            self._copy_direct(group, ids, starts, direction)
            return
        if direction is Direction.TO_GPU:
            self._cross(group.table.page_bytes, starts, direction)
        on_device = ids.to(self._staging.device, non_blocking=True)
        for on_gpu, staged in zip(group.pages, self._columns(group, len(ids)), strict=True):
            if direction is Direction.TO_ROWS:
                staged.copy_(on_gpu.index_select(0, on_device))
            else:
                on_gpu.index_copy_(0, on_device, staged)
        if direction is Direction.TO_ROWS:
            self._cross(group.table.page_bytes, starts, direction)

    def _columns(self, group: GroupTensors, count: int) -> list[torch.Tensor]:
        """The staging of `count` pages, one (count, page / width) view for each tensor reference."""
        width, page_bytes = group.width, group.table.page_bytes
        staged = self._staging[: count * page_bytes].view(group.pages[0].dtype).view(count, page_bytes // width)
        places = zip(group.table.offsets.tolist(), group.table.lengths.tolist(), strict=True)
        return [staged[:, offset // width : (offset + length) // width] for offset, length in places]

    def _cross(self, page_bytes: int, starts: IntArray, direction: Direction) -> None:
        """Copy staged pages to or from the region, pages that follow each other in a row as one piece."""
        staged = np.arange(len(starts), dtype=np.int64) * page_bytes
        pieces = merge(Extents(staged, starts, np.full(len(starts), page_bytes, dtype=np.int64)))
        for at, row, length in zip(pieces.gpu.tolist(), pieces.region.tolist(), pieces.lengths.tolist(), strict=True):
            _move(self._staging[at : at + length], self._region[row : row + length], direction)

    def _copy_direct(self, group: GroupTensors, ids: torch.Tensor, starts: IntArray, direction: Direction) -> None:
        for pages, offset in zip(group.pages, group.table.offsets.tolist(), strict=True):
            as_bytes = pages.view(torch.uint8)
            for block, start in zip(ids.tolist(), starts.tolist(), strict=True):
                first = start + offset
                _move(as_bytes[block], self._region[first : first + as_bytes.shape[1]], direction)


def _move(on_device: torch.Tensor, in_region: torch.Tensor, direction: Direction) -> None:
    """Issue one copy across the bus."""
    to, source = (in_region, on_device) if direction is Direction.TO_ROWS else (on_device, in_region)
    to.copy_(source, non_blocking=True)
