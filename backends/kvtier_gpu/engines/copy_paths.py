"""The ways in which the pages of a group can be copied, and the rule that takes one.

The rule is measured (docs/benchmarks.md, copy, one H200). Choosing by a trial when the tier opened was measured beside
it and is gone: one direction alone, over a few MiB, showed too little of both directions at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from kvtier_gpu.copy_plan import GroupTable
from kvtier_gpu.engines.contract import Direction


class CopyPath(StrEnum):
    """BATCH: all pieces of a job by one call of the driver. GATHER: pages are gathered on the device and cross the bus
    in pieces as long as a row's slice. SINGLE: an operation of torch for each page.
    """

    BATCH = "batch"
    GATHER = "gather"
    SINGLE = "single"


BATCH_LOAD_BYTES = 48 << 10
"""Loads of shorter fragments are faster by way of staging: 3 times at 16 KiB, 1.3 times at 32 KiB, not at 64 KiB."""
SINGLE_BYTES = 512 << 10
"""Without the driver's call, the pass through staging costs more than an operation for each page from here on."""


def choose_paths(
    tables: Sequence[GroupTable], wanted: CopyPath | None, *, batch: bool
) -> dict[Direction, tuple[CopyPath, ...]]:
    """The path of each group in each direction: `wanted` where it works, else by rule.

    `batch`: the driver's call works.
    """
    if wanted is not None and (batch or wanted is not CopyPath.BATCH):
        return dict.fromkeys(Direction, (wanted,) * len(tables))
    return {way: tuple(path_by_rule(table, way, batch=batch) for table in tables) for way in Direction}


def path_by_rule(table: GroupTable, direction: Direction, *, batch: bool) -> CopyPath:
    """The path for a group by the length of its shortest fragment. `batch`: the driver's call may be used."""
    fragment_bytes = int(table.lengths.min())
    if not batch:
        return CopyPath.SINGLE if fragment_bytes >= SINGLE_BYTES else CopyPath.GATHER
    short_load = direction is Direction.TO_GPU and fragment_bytes < BATCH_LOAD_BYTES
    return CopyPath.GATHER if short_load else CopyPath.BATCH
