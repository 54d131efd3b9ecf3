"""Pinning for CUDA the part of the region that a worker copies, so that copies are asynchronous and run at the bus's
speed.

With several workers a row holds the slices of all of them side by side. Pinning the whole region in each worker would
take as many times as long as there are workers, and count as many times against the limit of locked memory. So only the
pages of the worker's own slices are pinned, unless that saves little or would take too many calls.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

PIECE_BYTES = 1 << 30
PAGE_BYTES = 4096
"""Pinning is by the page of the system: two pieces must not share one."""
PIECES_MAX = 1 << 16
"""More calls than that take longer than pinning everything."""
PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every CUDA context of the process."""


class Runtime(Protocol):
    """The part of the CUDA runtime used here, as `torch.cuda.cudart()` offers it; 0 is success."""

    def cudaHostRegister(self, address: int, size: int, flags: int, /) -> int: ...
    def cudaHostUnregister(self, address: int, /) -> int: ...


@dataclass(frozen=True, slots=True)
class RowSlices:
    """The bytes of each row of `row_bytes` that a worker copies: (first, end) for each group, which may overlap."""

    row_bytes: int
    slices: Sequence[tuple[int, int]]

    def pieces(self, num_bytes: int) -> Iterator[tuple[int, int]]:
        """(offset, bytes) of the pieces to pin in a region of so many bytes, ascending: whole pages, each once."""
        spans = self._spans()
        step = max(1, PIECE_BYTES // self.row_bytes) * self.row_bytes
        num_rows = num_bytes // self.row_bytes
        used = sum(end - first for first, end in spans)
        if self.row_bytes % PAGE_BYTES or 2 * used > self.row_bytes or num_rows * len(spans) > PIECES_MAX:
            yield from ((start, min(step, num_bytes - start)) for start in range(0, num_bytes, step))
            return
        for row in range(0, num_rows * self.row_bytes, self.row_bytes):
            yield from ((row + first, end - first) for first, end in spans)

    def _spans(self) -> list[tuple[int, int]]:
        """The slices in whole pages, ascending, those that touch as one."""
        spans: list[tuple[int, int]] = []
        for first, end in sorted(self.slices):
            first, end = first // PAGE_BYTES * PAGE_BYTES, -(-end // PAGE_BYTES) * PAGE_BYTES
            if spans and first <= spans[-1][1]:
                spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
            else:
                spans.append((first, end))
        return spans


class PinnedRegion:
    """The pinned pieces of a region, whose first byte begins a page."""

    def __init__(self, runtime: Runtime, region: npt.NDArray[np.uint8], rows: RowSlices) -> None:
        self._runtime = runtime
        self._address = region.ctypes.data
        self._size = region.size
        self._rows = rows
        self._pinned: list[int] = []

    def pin(self) -> int:
        """Register every piece. Returns 0, or the CUDA error of the first refusal with nothing left registered."""
        for start, size in self._rows.pieces(self._size):
            error = int(self._runtime.cudaHostRegister(self._address + start, size, PORTABLE))
            if error:
                self.unpin()
                return error
            self._pinned.append(self._address + start)
        return 0

    def unpin(self) -> None:
        """Unregister what `pin` registered. Idempotent; no copy may be in flight."""
        while self._pinned:
            self._runtime.cudaHostUnregister(self._pinned.pop())
