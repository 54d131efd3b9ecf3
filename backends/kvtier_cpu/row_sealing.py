"""Sealing a row after its fill: zeros in its padding, and the checksum of its bytes.

The zeros replace what an earlier block left there, so that nothing of it reaches a disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.aio.loop_budget import ByteBudget
from kvtier.tier.checksum import SHORT_BYTES, checksum
from kvtier.types.arrays import IntArray
from kvtier_cpu.region.shared_region import SharedRegion

T = TypeVar("T")

PIECE_BYTES = 4 << 20
"""Bytes that one call clears and hashes: below a millisecond, so that several jobs share the threads fairly."""


class RowHashing:
    """Calls that hash rows, where that costs least: on the event loop for short rows, on the tier's threads for long.

    A thread would answer later than hashing a short row takes.
    """

    def __init__(self, pool: DaemonPool) -> None:
        self._pool = pool
        self._budget = ByteBudget()

    async def each(
        self, call: Callable[[SharedRegion, int, IntArray], T], region: SharedRegion, group: int, rows: IntArray
    ) -> list[T]:
        """The results of `seal_rows` or `intact_rows` for these rows of a group, in pieces of about PIECE_BYTES."""
        nbytes = region.geometry.aligned_bytes(group)
        step = max(1, PIECE_BYTES // nbytes)
        pieces = [rows[start : start + step] for start in range(0, len(rows), step)]
        if nbytes > SHORT_BYTES:
            return await asyncio.gather(*[self._pool.run(call, region, group, piece) for piece in pieces])
        done = []
        for piece in pieces:
            await self._budget.reserve(len(piece) * nbytes)
            done.append(call(region, group, piece))
        return done


def seal_rows(region: SharedRegion, group: int, rows: IntArray) -> None:
    """Zero what a block leaves unused up to its aligned length, then record each row's checksum.

    No lower tier reads beyond the aligned length.
    """
    nbytes, gaps = region.geometry.aligned_bytes(group), region.geometry.gaps(group)
    for row, block in zip(rows.tolist(), region.blocks(rows, nbytes), strict=True):
        for first, end in gaps:
            block[first:end] = bytes(end - first)
        region.set_checksum(row, checksum(block, nbytes <= SHORT_BYTES))


def intact_rows(region: SharedRegion, group: int, rows: IntArray) -> list[bool]:
    """For each row: True if its bytes still match its checksum."""
    nbytes = region.geometry.aligned_bytes(group)
    blocks = zip(rows.tolist(), region.blocks(rows, nbytes), strict=True)
    return [checksum(block, nbytes <= SHORT_BYTES) == region.checksum(row) for row, block in blocks]
