"""Rows without a shared region: page-aligned memory of one process, as a tier below the CPU is given."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from kvtier.errors import UsageError
from kvtier.tier.checksum import CHECKSUM_BYTES
from kvtier.types.arrays import IntArray


class TestRows:
    """A `Rows` in private memory: base page-aligned, rows one after another, zeros at first.

    `row_bytes` that are a multiple of a tier's alignment make every row aligned to it, up to a page. Stamps and uses
    are kept as the real region keeps them, for one process.
    """

    __test__ = False  # for pytest: no test class, whatever the name says

    def __init__(self, num_rows: int, row_bytes: int, workers: int = 1) -> None:
        if num_rows < 1 or row_bytes < 1 or workers < 1:
            raise UsageError(f"rows need at least 1 row, byte and worker, got {num_rows}, {row_bytes} and {workers}")
        self._memory = mmap.mmap(-1, num_rows * row_bytes)
        self._view = np.frombuffer(self._memory, dtype=np.uint8).reshape(num_rows, row_bytes)
        self._checksums = [bytes(CHECKSUM_BYTES)] * num_rows
        self._stamps = np.zeros((workers, num_rows), dtype=np.int64)
        self._uses = np.zeros((workers, num_rows), dtype=np.int64)

    @property
    def num_rows(self) -> int:
        return int(self._view.shape[0])

    @property
    def row_bytes(self) -> int:
        return int(self._view.shape[1])

    @property
    def view(self) -> npt.NDArray[np.uint8]:
        return self._view

    def stamp(self, worker: int, rows: IntArray, generations: IntArray) -> None:
        """Worker `worker` says: its whole slice of these rows holds these generations."""
        self._stamps[worker, rows] = generations

    def stamped(self, rows: IntArray, generations: IntArray) -> npt.NDArray[np.bool_]:
        """For each row: True if every worker stamped it with that generation."""
        agreed: npt.NDArray[np.bool_] = (self._stamps[:, rows] == generations).all(axis=0)
        return agreed

    def end_use(self, worker: int, rows: IntArray) -> None:
        """Worker `worker` has ended one use of each of these rows."""
        np.add.at(self._uses[worker], rows, 1)

    def uses_ended(self, worker: int, rows: IntArray) -> IntArray:
        """The number of uses of each row that a worker has ended so far, shape (rows,)."""
        ended: IntArray = self._uses[worker, rows]
        return ended

    def checksum(self, row: int) -> bytes:
        """The 16-byte checksum that was set for a row; zeros before that."""
        return self._checksums[row]

    def set_checksum(self, row: int, digest: bytes) -> None:
        """Keep a row's checksum. Raises UsageError unless it has 16 bytes."""
        if len(digest) != CHECKSUM_BYTES:
            raise UsageError(f"a checksum has {CHECKSUM_BYTES} bytes, this one {len(digest)}")
        self._checksums[row] = bytes(digest)
