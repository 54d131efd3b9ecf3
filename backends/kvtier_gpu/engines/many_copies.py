"""The contract of a way to make many copies by one call: the driver's call, and the kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from kvtier.types.arrays import IntArray
from kvtier_gpu.copy_plan import Extents
from kvtier_gpu.engines.contract import Bytes, Direction


class ManyCopies(ABC):
    """Many copies between a device and pinned rows by one call, from any thread.

    `name` is for people. `last_error`: the driver's answer to the last call that it refused, 0 if it has refused none.
    """

    name: ClassVar[str]
    last_error: int = 0

    @abstractmethod
    def issue(self, found: Extents, region: Bytes, direction: Direction, stream: int) -> list[IntArray]:
        """Issue copies to a stream, which must not be the legacy default stream. `found.gpu` are addresses.

        The order of the copies is not defined, so none may depend on another. Returns the places in the region of each
        call that the driver refused. Some of those copies may be on their way all the same.
        """
