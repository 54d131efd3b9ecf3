"""The contract of a copy engine, which calls back once when the last byte of a plan has landed, and of a way to make
many copies by one call: the driver's call, and the kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvtier.types.arrays import IntArray
from kvtier_gpu.copy_plan import CopyPlan, Extents


class Direction(StrEnum):
    """TO_ROWS: from GPU blocks to rows of the region. TO_GPU: the other way."""

    TO_ROWS = "to_rows"
    TO_GPU = "to_gpu"


Bytes = npt.NDArray[np.uint8]


def sides(found: Extents, region: Bytes, direction: Direction) -> tuple[IntArray, IntArray]:
    """The addresses (to, from) of extents, given the region as one run of bytes."""
    rows = found.region + region.ctypes.data
    return (rows, found.gpu) if direction is Direction.TO_ROWS else (found.gpu, rows)


@dataclass(frozen=True, slots=True, eq=False)
class CopyFailure:
    """Why bytes of a plan may not be where they belong.

    `rows` are the rows concerned; None: any row of the plan. `lasting`: the device takes no copy any more.
    """

    error: Exception
    rows: IntArray | None = None
    lasting: bool = False


def join_failures(failures: Sequence[CopyFailure]) -> CopyFailure | None:
    """The failures of the parts of a plan as one, with the first one's error; None if there is none."""
    if len(failures) < 2:
        return failures[0] if failures else None
    rows = [failure.rows for failure in failures if failure.rows is not None]
    known = len(rows) == len(failures)
    lasting = any(failure.lasting for failure in failures)
    return CopyFailure(failures[0].error, np.concatenate(rows) if known else None, lasting)


Done = Callable[[CopyFailure | None], None]
"""Called once for each submitted plan, from any thread, after every copy of it has ended."""


class CopyEngine(ABC):
    """Moves the bytes of plans. Constructors acquire nothing; plans are already checked against every bound.

    `mode` is the device and means of copying, for people; it is there once the engine is started.
    """

    mode: str

    @abstractmethod
    def start(self) -> tuple[str, ...]:
        """Acquire threads, streams and pinned memory; blocks, so never call it on the event loop's thread.

        Returns notes for people. Raises ResourceError and leaves nothing behind.
        """

    @abstractmethod
    def fence(self) -> None:
        """Copies that are submitted from now on begin after the work that the calling thread's stream was given so far.

        Until the first fence that is the work of the stream that was current when the engine was made, at submission.
        From any thread; never raises because of the device.
        """

    @abstractmethod
    def submit(self, plan: CopyPlan, direction: Direction, done: Done, urgent: bool = False) -> None:
        """Begin a copy and return soon; a short one may have ended then. `done(None)` means every byte has landed; with
        a failure some may have.

        An urgent copy to the GPU waits for no other one, if the engine was made with a lane for those.
        """

    @abstractmethod
    def stop(self, timeout_seconds: float) -> bool:
        """Finish what was submitted and release every buffer; blocks like `start`. False: still copying."""


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
