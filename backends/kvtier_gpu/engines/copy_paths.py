"""The ways in which the pages of a group can be copied, and which of them is taken where none was measured."""

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


BATCH_LOAD_BYTES = 28 << 10
"""What vLLM found on an H100: loads of shorter fragments are faster by way of a kernel than by the driver's call."""
SINGLE_BYTES = 256 << 10
"""From this length on the pass through staging costs more than an operation for each page."""


def path_by_rule(table: GroupTable, direction: Direction, *, batch: bool) -> CopyPath:
    """The path for a group by the length of its shortest fragment. `batch`: the driver's call may be used."""
    fragment_bytes = int(table.lengths.min())
    if not batch:
        return CopyPath.SINGLE if fragment_bytes >= SINGLE_BYTES else CopyPath.GATHER
    short_load = direction is Direction.TO_GPU and fragment_bytes < BATCH_LOAD_BYTES
    return CopyPath.GATHER if short_load else CopyPath.BATCH
