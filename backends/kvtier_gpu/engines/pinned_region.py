"""Pinning the region for CUDA, so that copies are asynchronous and run at the bus's speed."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

PIECE_BYTES = 1 << 30
PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every CUDA context of the process."""


class Runtime(Protocol):
    """The part of the CUDA runtime used here, as `torch.cuda.cudart()` offers it; 0 is success."""

    def cudaHostRegister(self, address: int, size: int, flags: int, /) -> int: ...
    def cudaHostUnregister(self, address: int, /) -> int: ...


class PinnedRegion:
    """The pinned pieces of a region, each a whole number of rows and about a gibibyte at most."""

    def __init__(self, runtime: Runtime, region: npt.NDArray[np.uint8], row_bytes: int) -> None:
        self._runtime = runtime
        self._address = region.ctypes.data
        self._size = region.size
        self._step = max(1, PIECE_BYTES // row_bytes) * row_bytes
        self._pinned: list[int] = []

    def pin(self) -> int:
        """Register every piece. Returns 0, or the CUDA error of the first refusal with nothing left registered."""
        for start in range(0, self._size, self._step):
            address = self._address + start
            error = int(self._runtime.cudaHostRegister(address, min(self._step, self._size - start), PORTABLE))
            if error:
                self.unpin()
                return error
            self._pinned.append(address)
        return 0

    def unpin(self) -> None:
        """Unregister what `pin` registered. Idempotent; no copy may be in flight."""
        while self._pinned:
            self._runtime.cudaHostUnregister(self._pinned.pop())
