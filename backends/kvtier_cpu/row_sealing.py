"""Sealing a row after its fill: zeros in its padding, and the checksum of its bytes.

The zeros replace what an earlier block left there, so that nothing of it reaches a disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.aio.loop_budget import ByteBudget
from kvtier.tier_api.checksum import SHORT_BYTES, checksum
from kvtier.types.arrays import IntArray
from kvtier.types.geometry import Geometry
from kvtier_cpu.region.shared_region import SharedRegion

T = TypeVar("T")

PIECE_BYTES = 4 << 20
"""Bytes that one call clears and hashes: below a millisecond, so that several jobs share the threads fairly."""


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """The sizes of a group's blocks in a row: one GPU page over all workers, the block, and its aligned length."""

    page: int
    used: int
    aligned: int

    @staticmethod
    def of_groups(geometry: Geometry) -> tuple[BlockBytes, ...]:
        """The sizes of every group, computed once when the tier is opened."""
        return tuple(
            BlockBytes(
                geometry.kv_bytes_per_block(group),
                geometry.kv_bytes_per_offloaded_block(group),
                geometry.aligned_bytes(group),
            )
            for group in range(geometry.num_groups)
        )


class RowHashing:
    """Calls that hash rows, where that costs least: on the event loop for short rows, on the tier's threads for long.

    A thread would answer later than hashing a short row takes.
    """

    def __init__(self, pool: DaemonPool) -> None:
        self._pool = pool
        self._budget = ByteBudget()

    async def each(
        self,
        call: Callable[[SharedRegion, BlockBytes, IntArray], T],
        region: SharedRegion,
        size: BlockBytes,
        rows: IntArray,
    ) -> list[T]:
        """What `seal_rows` or `intact_rows` return for these rows, in pieces of about PIECE_BYTES."""
        step = max(1, PIECE_BYTES // size.aligned)
        pieces = [rows[start : start + step] for start in range(0, len(rows), step)]
        if size.aligned > SHORT_BYTES:
            return await asyncio.gather(*[self._pool.run(call, region, size, piece) for piece in pieces])
        done = []
        for piece in pieces:
            await self._budget.reserve(len(piece) * size.aligned)
            done.append(call(region, size, piece))
        return done


def seal_rows(region: SharedRegion, size: BlockBytes, rows: IntArray) -> None:
    """Zero what a block leaves unused up to its aligned length, then record each row's checksum.

    No lower tier reads beyond the aligned length.
    """
    zeros = bytes(size.aligned - size.used)
    keep_gil = size.aligned <= SHORT_BYTES
    for row, block in zip(rows.tolist(), region.blocks(rows, size.aligned), strict=True):
        if zeros:
            block[size.used :] = zeros
        region.set_checksum(row, checksum(block, keep_gil))


def intact_rows(region: SharedRegion, size: BlockBytes, rows: IntArray) -> list[bool]:
    """For each row: True if its bytes still match its checksum."""
    keep_gil = size.aligned <= SHORT_BYTES
    blocks = zip(rows.tolist(), region.blocks(rows, size.aligned), strict=True)
    return [checksum(block, keep_gil) == region.checksum(row) for row, block in blocks]
