"""The contract of a copy engine: it takes plans and calls back once when the last byte of a plan has landed."""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import StrEnum

from kvtier_gpu.copy_plan import CopyPlan

_log = logging.getLogger(__name__)


class Direction(StrEnum):
    """TO_ROWS: from GPU blocks to rows of the region. TO_GPU: the other way."""

    TO_ROWS = "to_rows"
    TO_GPU = "to_gpu"


Done = Callable[[Exception | None], None]
"""Called for each submitted plan, from any thread, after every copy of it has ended; again if it raised."""

CALLS_MAX = 100
CALL_AGAIN_SECONDS = 0.02


def call_back(done: Done, error: Exception | None) -> None:
    """Say that a plan has ended. There may be no memory for it: then say it again, or its job would wait for ever."""
    calls = 0
    while calls < CALLS_MAX:
        try:
            done(error)
            return
        except Exception:
            calls += 1
            _log.exception("a copy has ended and that could not be said")
            time.sleep(CALL_AGAIN_SECONDS)


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
    def submit(self, plan: CopyPlan, direction: Direction, done: Done, urgent: bool = False) -> None:
        """Begin a copy and return at once. `done(None)` means every byte has landed; with an error some may have.

        An urgent copy to the GPU waits for no other one, if the engine was made with a lane for those.
        """

    @abstractmethod
    def stop(self, timeout_seconds: float) -> bool:
        """Finish what was submitted and release every buffer; blocks like `start`. False: still copying."""
