"""Many copies by one call of the CUDA driver, `cuMemcpyBatchAsync`.

The function is asked for in the version of CUDA 12.8, in which it first came. Drivers of CUDA 13 keep that version,
with an argument that newer ones lack. It takes the arrays of thousands of copies in one call without the GIL, where
NVIDIA's Python bindings take lists and make an object of each entry.
"""

from __future__ import annotations

import ctypes
import mmap
from enum import IntEnum

import numpy as np
import torch

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.types.arrays import IntArray, int_array
from kvtier_gpu.copy_plan import Extents
from kvtier_gpu.engines.contract import Bytes, Direction, sides
from kvtier_gpu.engines.device import CudaDevice
from kvtier_gpu.engines.pinned_region import PinnedRegion, RowSlices

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


class BatchCopy:
    """The driver's function, ready to be called from any thread.

    `last_error` is the driver's answer to the last call that it refused, 0 if it has refused none.
    """

    def __init__(self, address: int) -> None:
        self.last_error = 0
        self._call = BatchFunction(address)
        # A row is not written while it is copied to the GPU, so the driver may read ahead. GPU memory is the engine's.
        orders = {Direction.TO_ROWS: SourceOrder.STREAM, Direction.TO_GPU: SourceOrder.ANY}
        self._attributes = {direction: MemcpyAttributes(source_order=order) for direction, order in orders.items()}
        # The index of the first copy with the attributes: 0. An entry for each copy, because peers have seen drivers
        # crash for which one was suspected not to be enough.
        self._firsts = (ctypes.c_size_t * DESCRIPTORS_MAX)()

    def issue(self, found: Extents, region: Bytes, direction: Direction, stream: int) -> list[IntArray]:
        """Issue copies to a stream, which must not be the legacy default stream. `found.gpu` are addresses.

        The order of the copies is not defined, so none may depend on another. Returns the places in the region of each
        call that the driver refused. Some of those copies may be on their way all the same.
        """
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


CHECK_SECONDS = 10.0
"""How long opening waits for the check."""
CHECKED_PIECES, CHECKED_PIECE_BYTES = 4, 64


def find_refusal(device: CudaDevice, batch: BatchCopy) -> str | None:
    """Why the driver's call cannot be used; None if it brought the right bytes both ways.

    It runs on a thread of its own, over memory of its own. A call that hangs is left there with that memory, which its
    copies may still reach.
    """
    pool = DaemonPool("kvtier-gpu-trial", 1)
    try:
        check = pool.submit(_check, device, batch)
        pool.shutdown()  # the thread ends with its call
        return check.result(CHECK_SECONDS)
    except TimeoutError:
        return f"it did not end within {CHECK_SECONDS:g} s"
    except (OSError, RuntimeError) as refusal:  # no thread, no memory on the device
        return str(refusal)


def _check(device: CudaDevice, batch: BatchCopy) -> str | None:
    """On a thread whose current device may be another one. Raises RuntimeError for what the device refuses."""
    nbytes = CHECKED_PIECES * CHECKED_PIECE_BYTES
    region, rows = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)[:nbytes], RowSlices(nbytes, [(0, nbytes)])
    with device.entered(device.current_stream()):
        stream, pinned = device.new_stream(urgent=False), PinnedRegion(device.runtime(), region, rows)
        if error := pinned.pin():
            return f"memory could not be pinned (CUDA error {error})"
        try:
            with device.entered(stream):
                on_device = device.empty(nbytes)
                order = np.arange(CHECKED_PIECES) * CHECKED_PIECE_BYTES
                pieces = Extents(
                    order[::-1] + on_device.data_ptr(),
                    int_array(order),
                    np.full(CHECKED_PIECES, CHECKED_PIECE_BYTES, dtype=np.int64),
                )
                content = (np.arange(nbytes, dtype=np.uint32) * 2654435761 >> 17).astype(np.uint8)
                reversed_content = content.reshape(CHECKED_PIECES, CHECKED_PIECE_BYTES)[::-1].reshape(-1)
                for direction in Direction:
                    to_rows = direction is Direction.TO_ROWS
                    region[:] = 0 if to_rows else reversed_content
                    on_device.copy_(torch.from_numpy(content if to_rows else np.zeros_like(content)))
                    batch.issue(pieces, region, direction, stream.cuda_stream)
                    stream.synchronize()
                    if batch.last_error:
                        return f"CUDA error {batch.last_error}"
                    if not (np.array_equal(region, reversed_content) and np.array_equal(on_device.cpu(), content)):
                        return "it brought wrong bytes"
        finally:
            stream.synchronize()  # a call that was refused may have begun copies
            pinned.unpin()
    return None
