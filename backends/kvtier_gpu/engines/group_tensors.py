"""The pages of a KV cache group as tensors on the device."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvtier.types.geometry import Geometry
from kvtier_gpu.copy_plan import GroupTable
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
