"""The tiers of a `kvtier serve` below an engine's own memory: its rows and disks, which engines of a host share.

the engine's threads           the tier's thread: a `ProcessStack`          the worker's threads
find, store, load: wait  -->   step: lookups, jobs, leases          -->     rows <-> the engine's memory, by a permit
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, TypeVar

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.aio.shielded_wait import shielded_wait
from kvtier.engines.engine_memory.memory import Bytes, EngineMemory
from kvtier.engines.engine_memory.options import ServiceOptions
from kvtier.engines.engine_memory.staging import CopyPermit
from kvtier.engines.engine_memory.tier import BlockingCalls, memory_geometry
from kvtier.engines.process_calls import ProcessRequest, check_wire_keys
from kvtier.engines.process_stack import ProcessStack
from kvtier.errors import ResourceError, UsageError
from kvtier.options import TierOptions
from kvtier.stack import StackStats
from kvtier.stack.assembly import StackParts, StackSettings
from kvtier.tier.contract import LoadStore, LookupResult, Opened, Rows, TierContext
from kvtier.types.checks import check_keys, check_timeout
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import (
    CANCELLED,
    LATE,
    LOADED,
    STORED,
    BlockOutcome,
    DropReason,
    GPUGroup,
    JobKind,
    JobResult,
    TransferJob,
    dropped,
)
from kvtier.types.keys import GPU, GroupIndex, JobId, Medium, OffloadKey, RequestId, key_group
from kvtier.types.namespace import Namespace

T = TypeVar("T")

IDLE_SECONDS = 0.5
GRACE_SECONDS = 1.0
PART_BYTES = 8 << 20
"""Bytes that a thread copies in one go."""
HERE = (LookupResult.HIT, LookupResult.HIT_PENDING)


@dataclass(frozen=True, slots=True)
class PermittedPlace:
    """The place of a block in the engine's memory, for one call of the engine."""

    group: int
    place: int
    permit: CopyPermit


class MemoryCopies(LoadStore):
    """The gpu tier of an engine whose blocks are in host memory: copies between their places and rows.

    A job's GPU blocks are numbers that `admit` gives to the places of a call. Once those are forgotten, or the call's
    permit is shut, nothing is copied.
    """

    medium: ClassVar[Medium] = GPU
    Options: ClassVar[type[TierOptions]] = TierOptions

    def __init__(self, memory: EngineMemory, threads: DaemonPool) -> None:
        super().__init__(TierOptions(type="gpu"))
        self._memory = memory
        self._threads = threads
        self._numbers = itertools.count()
        self._places: dict[int, PermittedPlace] = {}
        self._rows: Rows | None = None

    def admit(self, keys: Sequence[OffloadKey], places: Sequence[int], permit: CopyPermit) -> list[int]:
        """A number for each place. From any thread."""
        numbers = list(itertools.islice(self._numbers, len(keys)))
        admitted = [PermittedPlace(key_group(key), place, permit) for key, place in zip(keys, places, strict=True)]
        self._places.update(zip(numbers, admitted, strict=True))
        return numbers

    def forget(self, numbers: Sequence[int]) -> None:
        """End the use of these numbers. From any thread."""
        for number in numbers:
            del self._places[number]

    def shut(self) -> None:
        """Touch no place any more; waits for blocks that are being copied. From any thread."""
        for place in list(self._places.values()):
            place.permit.shut()

    async def open(self, context: TierContext) -> Opened:
        """Take the rows of a connection."""
        assert context.rows is not None
        self._rows, self._geometry = context.rows, context.geometry
        return Opened(0, mode="engine memory")

    async def load(self, job: TransferJob) -> JobResult:
        """Copy the engine's blocks into rows."""
        return await self._copy(job, LOADED)

    async def store(self, job: TransferJob) -> JobResult:
        """Copy rows into the places of the engine's blocks."""
        return await self._copy(job, STORED)

    async def _copy(self, job: TransferJob, success: BlockOutcome) -> JobResult:
        began, rows = time.monotonic(), self._rows
        if rows is None:
            return JobResult.uniform(job, dropped(DropReason.CLOSING))
        outcomes, moved = [], 0
        for group in job.gpu_groups:
            size = self._memory.block_bytes[group.group]
            copy = partial(self._copy_blocks, rows.view, group.group, into_rows=success is LOADED)
            pairs = list(zip(group.runs.gpu_blocks.tolist(), group.rows.tolist(), strict=True))
            step = max(1, PART_BYTES // size)
            parts = [self._threads.run(copy, pairs[at : at + step]) for at in range(0, len(pairs), step)]
            good = list(itertools.chain.from_iterable(await shielded_wait(asyncio.gather(*parts))))
            outcomes.append(tuple([success if each else CANCELLED for each in good]))
            moved += size * sum(good)
        return JobResult(job.job_id, tuple(outcomes), moved, time.monotonic() - began)

    def _copy_blocks(self, view: Bytes, group: int, pairs: list[tuple[int, int]], into_rows: bool) -> list[bool]:
        """True for each (number, row) that was copied. Blocks of a row begin at its beginning."""
        first = self._geometry.offset(group, 0)
        return [self._copy_block(number, group, view[row, first:], into_rows) for number, row in pairs]

    def _copy_block(self, number: int, group: int, row: Bytes, into_rows: bool) -> bool:
        place = self._places.get(number)
        if place is None:
            return False
        with place.permit as granted:
            if not granted:
                return False
            (self._memory.read if into_rows else self._memory.write)(group, place.place, row)
        return True

    async def close(self) -> None:
        """Let the rows go. No copy is in flight."""
        self._rows = None


WaitingLookup = tuple[Sequence[OffloadKey], Future[list[bool]]]


@dataclass(slots=True, eq=False)
class HeldBlocks:
    """Blocks that were found, and are kept until `until` or until all of `left` were released."""

    until: float
    left: set[OffloadKey]
    request: ProcessRequest


class ServiceTier(BlockingCalls):
    """Calls as those of a `BlockingTier`, over a service: each waits no longer than its `seconds`, whatever is wrong.

    When a call has returned nothing touches the memory that it named. While the service is gone nothing is found and
    nothing stored; the next one is connected to by itself. Blocks of engines of one namespace are found by all of them,
    and a reset is one for all.
    """

    def __init__(
        self, options: ServiceOptions, namespace: Namespace, memory: EngineMemory, name: str, log: logging.Logger
    ) -> None:
        """Connect to the socket of the options. Raises ResourceError if none answers, ConfigError if it does not serve
        this engine, GeometryError for blocks that fit into no row. The memory is the caller's to release then."""
        self._options = options
        self._memory = memory
        self._num_groups = len(memory.block_bytes)
        self._name = name
        self._log = log
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._shut = False
        self._calls: deque[Callable[[], None]] = deque()
        self._new_lookups: list[WaitingLookup] = []
        self._lookups: list[WaitingLookup] = []
        self._jobs: dict[JobId, tuple[Future[list[BlockOutcome]], list[int]]] = {}
        self._held: list[HeldBlocks] = []
        self._requests = itertools.count(1)
        self._last_stats = StackStats({}, 0)
        self._threads = DaemonPool("kvtier-engine-memory-copy", options.copy_threads)
        self._copies = MemoryCopies(memory, self._threads)
        layout = memory_geometry(namespace.layout, memory, 1).layout
        settings = StackSettings(close_timeout_seconds=options.close_timeout_seconds)
        parts = StackParts([self._copies], replace(namespace, layout=layout), [], engine_id=name, settings=settings)
        self._stack = ProcessStack(parts, lambda: options.service)
        try:
            self._stack.open()
        except BaseException:
            self._threads.shutdown()
            raise
        self._thread = threading.Thread(target=self._serve, name="kvtier-service", daemon=True)
        atexit.register(self.close)
        self._thread.start()

    # -- calls of the engine's threads ---------------------------------------------------------------------------

    def find(self, keys: Sequence[OffloadKey], seconds: float) -> list[bool]:
        """Look up each key of a prompt; what is not answered in time is not here."""
        self._check(keys, seconds)
        answer: Future[list[bool]] = Future()
        absent = [False] * len(keys)
        if not self._post(partial(self._queue_lookup, (list(keys), answer))):
            return absent
        return _wait(answer, seconds, absent)

    def lease(self, keys: Sequence[OffloadKey]) -> None:
        """Bring found blocks into rows, and keep them there until `release`, or for `lease_seconds`."""
        check_keys(keys, self._num_groups)
        if keys:
            self._post(partial(self._hold, list(keys)))

    def release(self, keys: Sequence[OffloadKey]) -> None:
        """End the leases of these keys."""
        check_keys(keys, self._num_groups)
        self._post(partial(self._release, frozenset(keys)))

    def _transfer(
        self, kind: JobKind, keys: Sequence[OffloadKey], places: Sequence[int], seconds: float
    ) -> list[BlockOutcome]:
        self._check(keys, seconds)
        self._memory.check(keys, places)
        answer: Future[list[BlockOutcome]] = Future()
        permit = CopyPermit()
        numbers = self._copies.admit(keys, places, permit)
        late = [LATE] * len(keys)
        try:
            if not self._post(partial(self._begin, kind, list(keys), numbers, seconds, answer)):
                return [dropped(DropReason.CLOSING)] * len(keys)
            return _wait(answer, seconds, late)
        finally:
            permit.shut()
            self._copies.forget(numbers)
            if answer.cancelled():
                self._post(partial(self._cancel, answer))

    def reset(self, timeout_seconds: float = 30.0) -> None:
        """Nothing that engines of this namespace have stored before is found when this returns, also after a crash.

        Raises ResourceError if a tier could not make that durable in time; in memory it holds all the same.
        """
        check_timeout(timeout_seconds)
        answer: Future[ResourceError | None] = Future()
        late = ResourceError(f"{self._name}: the reset was not made durable within {timeout_seconds:g} s")
        if self._post(partial(self._reset, timeout_seconds, answer)) and (
            fault := _wait(answer, timeout_seconds + GRACE_SECONDS, late)
        ):
            raise fault

    def stats(self) -> StackStats:
        """Figures of the service's tiers, for all its engines; the last ones if they do not come, or after closing."""
        answer: Future[StackStats] = Future()
        if self._post(lambda: _answer(answer, self._stack.stats())):
            self._last_stats = _wait(answer, 2 * GRACE_SECONDS, self._last_stats)
        return self._last_stats

    def close(self) -> None:
        """End what is in flight within the deadline, release the engine's memory, leave the service. Idempotent.

        In a forked child it does nothing.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._shut:
                return
            self._shut = True
            self._stack.wake()
        atexit.unregister(self.close)
        self._thread.join(self._options.close_timeout_seconds + GRACE_SECONDS)
        if self._thread.is_alive():
            self._log.warning("%s did not close in time and is left behind", self._name)
        self._copies.shut()
        self._memory.release()
        self._threads.shutdown()

    def _check(self, keys: Sequence[OffloadKey], seconds: float) -> None:
        check_keys(keys, self._num_groups)
        check_wire_keys(keys)
        check_timeout(seconds)

    def _post(self, call: Callable[[], None]) -> bool:
        """Have the tier's thread make a call. False once it is closed."""
        if os.getpid() != self._pid:
            raise UsageError(f"{self._name} belongs to process {self._pid}; this one was forked from it")
        with self._lock:
            if self._shut or not self._thread.is_alive():
                return False
            self._calls.append(call)
            self._stack.wake()
        return True

    # -- the tier's thread ---------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._shut:
                self._turn()
                self._stack.wait(self._seconds_idle())
        except Exception:
            self._log.critical("%s has failed: nothing is found or stored any more", self._name, exc_info=True)
        finally:
            self._end()

    def _turn(self) -> None:
        """Take one step: calls of the engine's threads, results, answers of lookups, leases that are over."""
        while self._calls:
            self._calls.popleft()()
        new, self._new_lookups = self._new_lookups, []
        for _ in range(1 + bool(new)):  # an answer to an earlier lookup holds until the second step after it
            for result in self._stack.step():
                self._on_result(result)
        waiting, self._lookups = self._lookups + new, []
        for keys, answer in waiting:
            self._look_up(keys, answer)
        now = time.monotonic()
        for held in [each for each in self._held if each.until <= now or not each.left]:
            self._held.remove(held)
            held.request.end()

    def _seconds_idle(self) -> float:
        if self._calls:
            return 0.0
        soonest = min((held.until for held in self._held), default=float("inf"))
        return max(0.0, min(IDLE_SECONDS, soonest - time.monotonic()))

    def _queue_lookup(self, lookup: WaitingLookup) -> None:
        self._new_lookups.append(lookup)

    def _look_up(self, keys: Sequence[OffloadKey], answer: Future[list[bool]]) -> None:
        if answer.cancelled():
            return
        found = self._stack.lookup(keys)
        if LookupResult.RETRY in found:
            self._lookups.append((keys, answer))
        else:
            _answer(answer, [each in HERE for each in found])

    def _hold(self, keys: list[OffloadKey]) -> None:
        request = self._stack.request(RequestId(f"held-{next(self._requests)}"), keys)
        request.reserve(keys)
        self._held.append(HeldBlocks(time.monotonic() + self._options.lease_seconds, set(keys), request))

    def _release(self, keys: frozenset[OffloadKey]) -> None:
        for held in self._held:
            held.left -= keys

    def _begin(
        self,
        kind: JobKind,
        keys: list[OffloadKey],
        numbers: list[int],
        seconds: float,
        answer: Future[list[BlockOutcome]],
    ) -> None:
        if answer.cancelled():
            return
        by_group: dict[int, list[int]] = {}
        for at, key in enumerate(keys):
            by_group.setdefault(key_group(key), []).append(at)
        groups = []
        for group, some in by_group.items():
            blocks = GPURuns.whole([numbers[at] for at in some])
            groups.append(GPUGroup(GroupIndex(group), tuple(keys[at] for at in some), blocks))
        try:
            job_id = self._stack.submit(self._stack.job(kind, groups, seconds))
        except UsageError as error:  # for the engine's thread
            answer.set_exception(error)
        else:
            self._jobs[job_id] = answer, list(itertools.chain.from_iterable(by_group.values()))

    def _on_result(self, result: JobResult) -> None:
        answer, order = self._jobs.pop(result.job_id)
        outcomes = dict(zip(order, itertools.chain.from_iterable(result.outcomes), strict=True))
        _answer(answer, [outcomes[at] for at in range(len(order))])

    def _cancel(self, answer: Future[list[BlockOutcome]]) -> None:
        """The engine does not wait for this job any more."""
        for job_id in [job_id for job_id, (waiting, _) in self._jobs.items() if waiting is answer]:
            self._stack.cancel(job_id)

    def _reset(self, seconds: float, answer: Future[ResourceError | None]) -> None:
        try:
            self._stack.reset(seconds)
        except ResourceError as error:
            _answer(answer, error)
        else:
            _answer(answer, None)

    def _end(self) -> None:
        """No call is answered any more; copies in flight end."""
        with self._lock:
            self._shut = True
        for answer, order in self._jobs.values():
            _answer(answer, [dropped(DropReason.CLOSING)] * len(order))
        for keys, found in self._lookups + self._new_lookups:
            _answer(found, [False] * len(keys))
        self._stack.close()


def _answer(answer: Future[T], value: T) -> None:
    """Answer a call, unless its thread has gone on."""
    if answer.set_running_or_notify_cancel():
        answer.set_result(value)


def _wait(answer: Future[T], seconds: float, otherwise: T) -> T:
    """The answer, or another one if it does not come in time."""
    try:
        return answer.result(seconds)
    except TimeoutError:
        answer.cancel()
        return otherwise
