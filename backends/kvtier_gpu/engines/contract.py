"""The contract of a copy engine: plans in, one call back when the last byte has landed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import StrEnum

from kvtier_gpu.plan import CopyPlan


class Direction(StrEnum):
    TO_ROWS = "to_rows"
    TO_GPU = "to_gpu"


Done = Callable[[Exception | None], None]
"""Called exactly once for each submitted plan, from any thread, after every copy under way has ended."""


class CopyEngine(ABC):
    """Moves the bytes of plans. Constructors acquire nothing; plans are already checked against every bound."""

    @abstractmethod
    def start(self) -> tuple[str, ...]:
        """Acquire threads, streams and pinned memory; blocks, so never call it on the event loop's thread.

        Returns remarks for people. Raises ResourceError and leaves nothing behind.
        """

    @property
    @abstractmethod
    def mode(self) -> str:
        """What serves, for people: device and means."""

    @abstractmethod
    def submit(self, plan: CopyPlan, direction: Direction, done: Done) -> None:
        """Begin a copy and return at once. `done(None)` means every byte has landed; with an error some may have."""

    @abstractmethod
    def stop(self, timeout_seconds: float) -> bool:
        """Finish what was submitted and let go of every buffer; blocks like `start`. False: still copying."""
