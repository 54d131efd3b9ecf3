"""Making a row whole: nothing of an earlier tenant in its padding, and a checksum that travels with it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvtier.checksum import checksum
from kvtier.geometry import Geometry
from kvtier.jobs import IntArray
from kvtier_cpu.region import SharedRegion

PIECE_BYTES = 4 << 20
"""Bytes one thread call clears and hashes: below a millisecond, so that several jobs share the threads fairly."""


def pieces(rows: IntArray, geometry: Geometry, group: int) -> Iterator[IntArray]:
    """Cut rows into runs of about PIECE_BYTES, at least one row each."""
    step = max(1, PIECE_BYTES // geometry.aligned_bytes(group))
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def seal_rows(region: SharedRegion, geometry: Geometry, group: int, rows: IntArray) -> None:
    """Zero what a block of this group leaves unused up to its aligned length, then record each row's checksum.

    What lies beyond the aligned length no lower tier ever reads for this group.
    """
    used, aligned = geometry.kv_bytes_per_offloaded_block(group), geometry.aligned_bytes(group)
    for row in rows.tolist():
        block = region.row(row)[:aligned]
        block[used:] = bytes(aligned - used)
        region.set_checksum(row, checksum(block))


def intact_rows(region: SharedRegion, geometry: Geometry, group: int, rows: IntArray) -> npt.NDArray[np.bool_]:
    """For each row: True if its bytes still match its checksum."""
    aligned = geometry.aligned_bytes(group)
    return np.array(
        [checksum(region.row(row)[:aligned]) == region.checksum(row) for row in rows.tolist()],
        dtype=np.bool_,
    )
