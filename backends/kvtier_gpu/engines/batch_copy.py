"""Many copies by one call of the CUDA driver, `cuMemcpyBatchAsync`.

The function is asked for in the version of CUDA 12.8, in which it first came. Drivers of CUDA 13 keep that version,
with an argument that newer ones lack. It takes the arrays of thousands of copies in one call without the GIL, where
NVIDIA's Python bindings take lists and make an object of each entry.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum

from kvtier.types.arrays import IntArray, int_array
from kvtier_gpu.copy_plan import Extents
from kvtier_gpu.engines.contract import Bytes, Direction, ManyCopies, sides

DESCRIPTORS_MAX = 4096
"""Copies in one call. AMD's counterpart faults above 8192, and a driver of CUDA 13.0 with 51,828 of them."""


class SourceOrder(IntEnum):
    """The time at which the driver may read a source: in the order of the stream, or at any time between the call and
    its end."""

    STREAM = 1
    ANY = 3


class MemLocation(ctypes.Structure):
    """`CUmemLocation`: where memory without a place of its own is. All zero: none is given."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class MemcpyAttributes(ctypes.Structure):
    """`CUmemcpyAttributes`."""

    _fields_ = [
        ("source_order", ctypes.c_int),
        ("source_location", MemLocation),
        ("target_location", MemLocation),
        ("flags", ctypes.c_uint),
    ]


_POINTER = ctypes.c_void_p
BatchFunction = ctypes.CFUNCTYPE(
    ctypes.c_int,  # CUresult
    _POINTER,  # dsts
    _POINTER,  # srcs
    _POINTER,  # sizes
    ctypes.c_size_t,  # count
    _POINTER,  # attrs
    _POINTER,  # attrsIdxs
    ctypes.c_size_t,  # numAttrs
    _POINTER,  # failIdx
    _POINTER,  # hStream
)
"""The signature of the function in CUDA 12.8."""


class BatchCopy(ManyCopies):
    """The driver's function, by its address."""

    name = "cuMemcpyBatchAsync"

    def __init__(self, address: int) -> None:
        self._call = BatchFunction(address)
        # A row is not written while it is copied to the GPU, so the driver may read ahead. GPU memory is the engine's.
        orders = {Direction.TO_ROWS: SourceOrder.STREAM, Direction.TO_GPU: SourceOrder.ANY}
        self._attributes = {direction: MemcpyAttributes(source_order=order) for direction, order in orders.items()}
        # The index of the first copy with the attributes: 0. An entry for each copy, because peers have seen drivers
        # crash for which one was suspected not to be enough.
        self._firsts = (ctypes.c_size_t * DESCRIPTORS_MAX)()

    def issue(self, found: Extents, region: Bytes, direction: Direction, stream: int) -> list[IntArray]:
        targets, sources = map(int_array, sides(found, region, direction))
        lengths, attributes = int_array(found.lengths), ctypes.byref(self._attributes[direction])
        refused = []
        for first in range(0, len(lengths), DESCRIPTORS_MAX):
            to, source, length = (array[first : first + DESCRIPTORS_MAX] for array in (targets, sources, lengths))
            failed_index = ctypes.c_size_t(0)
            error = self._call(
                to.ctypes.data,
                source.ctypes.data,
                length.ctypes.data,
                len(length),
                attributes,
                self._firsts,
                1,
                ctypes.byref(failed_index),
                stream,
            )
            if error:
                self.last_error = int(error)
                refused.append(found.region[first : first + DESCRIPTORS_MAX])
        return refused
