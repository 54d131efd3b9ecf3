"""A verified tier below an engine's own CPU tier, for an engine that is notified of what ended."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier.aio.weak_call import weak_call
from kvtier.control.jobs import Arrival
from kvtier.engines.engine_memory.memory import EngineMemory
from kvtier.engines.engine_memory.options import EngineMemoryOptions
from kvtier.engines.engine_memory.tier import EngineMemoryTier
from kvtier.engines.engine_memory.transfers import EngineTransfer
from kvtier.types.arrays import int_array
from kvtier.types.checks import check_timeout
from kvtier.types.jobs import DropReason, JobKind, dropped
from kvtier.types.keys import OffloadKey
from kvtier.types.namespace import Namespace

LOOK_SECONDS = 0.5
"""So often the tier's thread looks for what has passed its time, where nothing arrives."""

Changes = list[tuple[bool, list[OffloadKey]]]
"""(removed, keys) of what became reachable or ceased to be, in order."""


@dataclass(slots=True, eq=False)
class _Search:
    keys: Sequence[OffloadKey]
    deadline: float
    tell: Callable[[list[bool]], None]
    found: Sequence[bool | None] = field(default_factory=list)


class NotifyingTier(EngineMemoryTier):
    """Calls from any number of threads, which return at once; each is answered once, by a call of its `tell`.

    An answer comes from the thread that asked or from the tier's, one at a time and without a lock of the tier, so
    `tell` may call the tier again; it does not raise, and waits for nothing.
    """

    def __init__(
        self, options: EngineMemoryOptions, namespace: Namespace, memory: EngineMemory, name: str, log: logging.Logger
    ) -> None:
        super().__init__(options, namespace, memory, name, log)
        self._changed: Callable[[Changes], None] = _ignore
        self._job_ids = itertools.count(1)
        self._tells: dict[int, Callable[[EngineTransfer], None]] = {}
        self._searches: list[_Search] = []
        self._telling = threading.Lock()
        self._ends_waiting = False

    def start(self, changed: Callable[[Changes], None] | None = None) -> None:
        """Before any other call. `changed` is called as `tell` is, with what became reachable and what ceased to be;
        in this call with what was recovered."""
        if changed is not None:
            self._changed = changed
        self._tell()
        self.thread.call_soon(self._tick)

    def find(self, keys: Sequence[OffloadKey], seconds: float, tell: Callable[[list[bool]], None]) -> None:
        """Look up each key of a prompt, given in prefix order. What a shared tier does not answer for in time is not
        here."""
        self._check(keys)
        check_timeout(seconds)
        search = _Search(keys, time.monotonic() + seconds, tell)
        with self._lock:
            self._searches.append(search)
            self._decide(lambda: self._look(search))
        self._tell()

    def transfer(
        self, kind: JobKind, keys: Sequence[OffloadKey], places: Sequence[int], tell: Callable[[EngineTransfer], None]
    ) -> None:
        """Begin to store or load blocks, given in prefix order. The memory they name is this tier's until `tell`.

        Raises UsageError for a place outside the memory.
        """
        self._check(keys)
        transfer = EngineTransfer(next(self._job_ids), kind, keys, int_array(places), "", time.monotonic())
        if self._shut:
            transfer.complete(range(len(keys)), dropped(DropReason.CLOSING))
            tell(transfer)
            return
        self._tells[transfer.job_id] = tell
        try:
            self.submit(transfer)
        except BaseException:
            del self._tells[transfer.job_id]
            raise
        self._tell()

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """These blocks, given in prefix order, were used although they were not loaded."""
        self._check(keys)
        self._decide(lambda: self.plane.touch(keys))

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Drop blocks that are wanted no more. See `EngineMemoryPlane.remove`."""
        self._check(keys)
        self._decide(lambda: self.plane.remove(keys, time.monotonic()))
        self._tell()

    # -- telling -------------------------------------------------------------------------------------------------

    def _deliver(self, batch: Sequence[Arrival]) -> None:
        super()._deliver(batch)
        self._tell()

    def _tick(self) -> None:
        """In the loop: leases end, and what was lost is late, also where nothing arrives."""
        if not self._shut:
            self._tell()
            asyncio.get_running_loop().call_later(LOOK_SECONDS, weak_call(self._tick))

    def _tell(self) -> None:
        """Tell what has ended. Where another thread is telling, it does that as well."""
        self._ends_waiting = True
        while self._ends_waiting and self._telling.acquire(blocking=False):
            try:
                self._ends_waiting = False
                self._tell_all()
            finally:
                self._telling.release()

    def _tell_all(self) -> None:
        ended = self.finished()
        with self._lock:
            changes = self.plane.take_changes()
            answered = self._answered() if self._searches else []
        if changes:
            self._changed(changes)
        for search in answered:
            search.tell([bool(there) for there in search.found])
        for transfer in ended:
            self._tells.pop(transfer.job_id)(transfer)

    def _answered(self) -> list[_Search]:
        """The searches that are over. Call with the lock held."""
        now = time.monotonic()
        self._decide(self._look_again)
        over = [each for each in self._searches if None not in each.found or now >= each.deadline or self._shut]
        self._searches = [each for each in self._searches if each not in over]
        return over

    def _look_again(self) -> None:
        for search in self._searches:
            if None in search.found:
                self._look(search)

    def _look(self, search: _Search) -> None:
        search.found = [False] * len(search.keys)  # after `close`, and of a plane that fails
        if self._shut:
            return
        search.found = self.plane.find(search.keys, time.monotonic())

    def close(self) -> None:
        """Close as `EngineMemoryTier` does; every call has been answered when it returns."""
        super().close()
        self._tell()


def _ignore(changes: Changes) -> None:
    """Nothing listens yet."""
