"""A lane of copies: to one stream, in one direction, between the KV tensors of groups and a region."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvtier.types.arrays import IntArray, distinct
from kvtier_gpu.copy_plan import Extents
from kvtier_gpu.engines.batch_copy import BatchCopy
from kvtier_gpu.engines.contract import Bytes, Direction
from kvtier_gpu.engines.device import CudaDevice, DeviceStream
from kvtier_gpu.engines.group_tensors import GroupTensors
from kvtier_gpu.engines.pinned_region import RowSlices


@dataclass(frozen=True, slots=True, eq=False)
class CopySides:
    """The two sides of copies: the KV tensors of groups on a device, and the worker's slices of a region's rows.

    `pages_per_row` pages of a group follow each other in a row. `batch` is the driver's call for many copies, where it
    may be used.
    """

    device: CudaDevice
    groups: tuple[GroupTensors, ...]
    region: Bytes
    rows: RowSlices
    pages_per_row: int
    batch: BatchCopy | None


@dataclass(frozen=True, slots=True, eq=False)
class CopyLane:
    """A stream and a direction. The calling thread has entered the stream, which is not the legacy default stream."""

    sides: CopySides
    stream: DeviceStream
    direction: Direction

    def enqueue(self, operation: Callable[[], None]) -> None:
        """Issue torch operations. Raises what the device refuses."""
        self.sides.device.enqueue(self.stream, operation)

    def call(self, found: Extents) -> list[IntArray]:
        """Issue copies by the driver's call. `found.gpu` are addresses. Returns the rows of each call it refused."""
        sides = self.sides
        assert sides.batch is not None
        refused = sides.batch.issue(found, sides.region, self.direction, self.stream.cuda_stream)
        return [distinct(places // sides.rows.row_bytes) for places in refused]
