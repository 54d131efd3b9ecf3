"""Making a row whole: nothing of an earlier tenant in its padding, and a checksum that travels with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from kvtier.checksum import SHORT_BYTES, checksum
from kvtier.geometry import Geometry
from kvtier.jobs import IntArray
from kvtier_cpu.region import SharedRegion
from kvtier_cpu.threads import DaemonPool
from kvtier_cpu.turns import HashTurns

T = TypeVar("T")

PIECE_BYTES = 4 << 20
"""Bytes one call clears and hashes: below a millisecond, so that several jobs share the threads fairly."""


@dataclass(frozen=True, slots=True)
class Piece(Generic[T]):
    """Some rows of one group, `row_bytes` hashed of each, and what is to be done with them."""

    row_bytes: int
    rows: int
    call: Callable[[], T]


def pieces(
    call: Callable[[SharedRegion, Geometry, int, IntArray], T],
    region: SharedRegion,
    geometry: Geometry,
    group: int,
    rows: IntArray,
) -> list[Piece[T]]:
    """Cut a call for rows (`seal_rows`, `intact_rows`) into pieces of about PIECE_BYTES, at least one row each."""
    row_bytes = geometry.aligned_bytes(group)
    step = max(1, PIECE_BYTES // row_bytes)
    parts = (rows[start : start + step] for start in range(0, len(rows), step))
    return [Piece(row_bytes, len(part), partial(call, region, geometry, group, part)) for part in parts]


class Hashing:
    """Does pieces where that costs least: short rows on the event loop, all others on the tier's threads."""

    def __init__(self, pool: DaemonPool) -> None:
        self._pool = pool
        self._turns = HashTurns()

    async def do(self, work: Sequence[Piece[T]]) -> list[T]:
        """What the pieces return, in their order."""
        if any(piece.row_bytes > SHORT_BYTES for piece in work):
            return await asyncio.gather(*(self._pool.run(piece.call) for piece in work))
        done = []
        for piece in work:
            await self._turns.room(piece.rows * piece.row_bytes)
            done.append(piece.call())
        return done


def seal_rows(region: SharedRegion, geometry: Geometry, group: int, rows: IntArray) -> None:
    """Zero what a block of this group leaves unused up to its aligned length, then record each row's checksum.

    What lies beyond the aligned length no lower tier ever reads for this group.
    """
    used, aligned = geometry.kv_bytes_per_offloaded_block(group), geometry.aligned_bytes(group)
    zeros = bytes(aligned - used)
    for row, block in zip(rows.tolist(), region.blocks(rows, aligned), strict=True):
        if zeros:
            block[used:] = zeros
        region.set_checksum(row, checksum(block, keep_gil=aligned <= SHORT_BYTES))


def intact_rows(region: SharedRegion, geometry: Geometry, group: int, rows: IntArray) -> npt.NDArray[np.bool_]:
    """For each row: True if its bytes still match its checksum."""
    aligned = geometry.aligned_bytes(group)
    found = [checksum(block, keep_gil=aligned <= SHORT_BYTES) for block in region.blocks(rows, aligned)]
    return np.array(list(map(bytes.__eq__, found, map(region.checksum, rows.tolist()))), dtype=np.bool_)
