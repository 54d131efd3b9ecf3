"""A check at opening of a way to make many copies at once: whether it brings the right bytes."""

from __future__ import annotations

import mmap

import numpy as np
import torch

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.types.arrays import int_array
from kvtier_gpu.copy_plan import Extents
from kvtier_gpu.engines.contract import Direction, ManyCopies
from kvtier_gpu.engines.device import CudaDevice
from kvtier_gpu.engines.pinned_region import PinnedRegion, RowSlices

CHECK_SECONDS = 10.0
"""How long opening waits for the check."""
CHECKED_PIECES, CHECKED_PIECE_BYTES = 4, 64


def find_refusal(device: CudaDevice, copies: ManyCopies) -> str | None:
    """Why it cannot be used; None if it brought the right bytes both ways.

    It runs on a thread of its own, over memory of its own. A call that hangs is left there with that memory, which its
    copies may still reach.
    """
    pool = DaemonPool("kvtier-gpu-trial", 1)
    try:
        check = pool.submit(_check, device, copies)
        pool.shutdown()  # the thread ends with its call
        return check.result(CHECK_SECONDS)
    except TimeoutError:
        return f"it did not end within {CHECK_SECONDS:g} s"
    except (OSError, RuntimeError) as refusal:  # no thread, no memory on the device
        return str(refusal)


def _check(device: CudaDevice, copies: ManyCopies) -> str | None:
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
                    copies.issue(pieces, region, direction, stream.cuda_stream)
                    stream.synchronize()
                    if copies.last_error:
                        return f"CUDA error {copies.last_error}"
                    if not (np.array_equal(region, reversed_content) and np.array_equal(on_device.cpu(), content)):
                        return "it brought wrong bytes"
        finally:
            stream.synchronize()  # a call that was refused may have begun copies
            pinned.unpin()
    return None
