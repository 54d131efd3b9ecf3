"""A verified tier below an engine's own CPU tier, for an engine whose threads wait for a call."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence

from kvtier.engines.engine_memory.memory import EngineMemory
from kvtier.engines.engine_memory.options import EngineMemoryOptions
from kvtier.engines.engine_memory.tier import EngineMemoryTier
from kvtier.engines.engine_memory.transfers import EngineTransfer
from kvtier.types.arrays import int_array
from kvtier.types.checks import check_timeout
from kvtier.types.jobs import BlockOutcome, DropReason, JobKind, dropped
from kvtier.types.keys import OffloadKey
from kvtier.types.namespace import Namespace

LOOK_AGAIN_SECONDS = 0.5
"""A call looks at the health of the tier's thread so often, where nothing arrives."""


class BlockingTier(EngineMemoryTier):
    """Calls from any number of threads, each of which waits for its own call and no longer than it says.

    Whatever a disk does: when a call has returned, nothing touches the memory that it named any more. A call that ends
    before its jobs says nothing of the tier's health, `job_timeout_seconds` is for that; but a tier of which nothing at
    all came back during two calls of more than a second is left alone. What had not begun by then is not begun.
    `finished` is of no use here: the calls return what ended.
    """

    def __init__(
        self, options: EngineMemoryOptions, namespace: Namespace, memory: EngineMemory, name: str, log: logging.Logger
    ) -> None:
        super().__init__(options, namespace, memory, name, log)
        self._job_ids = itertools.count(1)

    def find(self, keys: Sequence[OffloadKey], seconds: float) -> list[bool]:
        """Whether each key of a prompt, given in prefix order, is here. A shared tier is asked for what is not known;
        what it does not answer for in time is not here."""
        self._check(keys)
        check_timeout(seconds)
        found: list[bool | None] = [None] * len(keys)

        def asked() -> bool:
            found[:] = self._find(keys)
            return None not in found

        self._wait(asked, time.monotonic() + seconds)
        return [bool(there) for there in found]

    def _find(self, keys: Sequence[OffloadKey]) -> Sequence[bool | None]:
        with self._lock:
            if self._shut:
                return [False] * len(keys)
            self._receive()
            return self._decide(lambda: self.plane.find(keys, time.monotonic()))

    def store(self, keys: Sequence[OffloadKey], places: Sequence[int], seconds: float) -> list[BlockOutcome]:
        """Store blocks, given in prefix order. One outcome for each: PRESENT where it is here already."""
        return self._transfer(JobKind.STORE, keys, places, seconds)

    def load(self, keys: Sequence[OffloadKey], places: Sequence[int], seconds: float) -> list[BlockOutcome]:
        """Load blocks into their places. One outcome for each; after any but LOADED its place may have been written."""
        return self._transfer(JobKind.LOAD, keys, places, seconds)

    def _transfer(
        self, kind: JobKind, keys: Sequence[OffloadKey], places: Sequence[int], seconds: float
    ) -> list[BlockOutcome]:
        now = time.monotonic()
        self._check(keys)
        check_timeout(seconds)
        transfer = EngineTransfer(next(self._job_ids), kind, keys, int_array(places), "", now)
        if self._shut:
            return [dropped(DropReason.CLOSING)] * len(keys)
        self.submit(transfer)
        if not self._wait(lambda: self._ended(transfer), now + seconds):
            self._decide(lambda: self.plane.end(transfer, time.monotonic()))
            self._ended(transfer)
        return transfer.outcomes

    def _ended(self, transfer: EngineTransfer) -> bool:
        self.finished()
        return transfer.ended

    def _wait(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait until a condition holds, which may change with every delivery; False if the time is over first."""
        with self._arrivals() as arrived:
            while not condition():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                arrived.wait(min(left, LOOK_AGAIN_SECONDS))
                arrived.clear()
        return True
