"""Regions of a few pages for tests."""

from __future__ import annotations

import mmap

from kvtier.types.geometry import Geometry, GroupLayout, KVLayout, TensorRef


def geometry(world_size: int = 2, factor: int = 2, *, replicated: bool = False) -> Geometry:
    """Two groups of different page sizes, one with two tensors; rows of whole pages."""
    groups = (GroupLayout((TensorRef(0, 1000), TensorRef(1, 504))), GroupLayout((TensorRef(2, 700),)))
    return Geometry(KVLayout(groups, world_size, factor, replicated), mmap.PAGESIZE)
