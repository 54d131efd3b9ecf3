"""A verified tier below an engine's own CPU tier, for an engine that polls, and for one whose threads wait for a call.

the engine's threads, one at a time               the tier's thread: an event loop
lookup, submit -> control plane
submit, end_step: send what was decided   -->     dispatcher -> staging rows -> the backend
finished: record what ended  <- inbox     <--     job ended or late; a shared tier's answers
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.aio.loop_thread import LoopThread
from kvtier.aio.weak_call import weak_call
from kvtier.control.jobs import Arrival, PresenceQuery, TierJob
from kvtier.control.tiers.lower_tier import LowerTier
from kvtier.engines.engine_memory.memory import EngineMemory
from kvtier.engines.engine_memory.options import EngineMemoryOptions
from kvtier.engines.engine_memory.plane import LOADS, STORES, EngineMemoryPlane, PlaneLimits
from kvtier.engines.engine_memory.staging import CopyPermits, Frames, StagedTier, StagingRows
from kvtier.engines.engine_memory.transfers import EngineTransfer
from kvtier.errors import ConfigError, ResourceError, UsageError
from kvtier.stack.assembly import StackSettings, open_tier, resolve_alignment, tier_spec
from kvtier.stack.dispatcher import Dispatcher, TierQueue
from kvtier.stack.distinct_folders import check_folders
from kvtier.stack.guard import Answers, Guarded, guard_step
from kvtier.stack.lookups import Lookups
from kvtier.stack.shutdown import CloseReport, close_each
from kvtier.stack.watching.operator_log import OperatorLog, TierWatch
from kvtier.stack.watching.stats import StackStats, lower_stats
from kvtier.stack.watching.stats_socket import StatsSocket
from kvtier.tier.contract import LookupResult, Resettable, StatesEpoch, TierContext
from kvtier.tier.registry import discover
from kvtier.tier.shared_epoch import fresh_epoch
from kvtier.types.arrays import int_array
from kvtier.types.checks import check_keys, check_text, check_timeout, check_types
from kvtier.types.geometry import Geometry, KVLayout, TensorRef
from kvtier.types.jobs import BlockOutcome, DropReason, JobKind, dropped
from kvtier.types.keys import OffloadKey
from kvtier.types.namespace import Namespace

T = TypeVar("T")

GRACE_SECONDS = 1.0
PART_BLOCKS = 128
PINNED_SHARE = 2
"""One part in this many of the engine's blocks may be kept by stores that take long."""


class EngineMemoryTier(Guarded):
    """A tier that is bounded, verified and recovered after a restart, below the memory of an engine.

    Safe to call from several threads; a lock is held for decisions, never for I/O. Only the constructor, `drain`,
    `reset` and `close` wait for anything, each with a deadline. A block that cannot be loaded in time, or is not what
    was stored, fails, and is a miss for its request from then on.
    """

    plane: EngineMemoryPlane

    def __init__(
        self, options: EngineMemoryOptions, namespace: Namespace, memory: EngineMemory, name: str, log: logging.Logger
    ) -> None:
        """Open the tier. The groups of the namespace's layout are those of the memory.

        Raises ConfigError for wrong options, ResourceError or GeometryError for a machine that does not suffice;
        nothing is left behind then. The memory is the caller's to release in that case.
        """
        self._options = options
        self._memory = memory
        self._num_groups = len(memory.block_bytes)
        self._name = name
        self._log = log
        self._operator = OperatorLog(log, time.monotonic)
        self._watch = TierWatch(self._operator, time.monotonic)
        self._given_up = 0
        self._lock = threading.RLock()
        self._shut = False
        self._inbox: deque[Arrival] = deque()
        self._jobs: dict[int, EngineTransfer] = {}
        self._lookups = Lookups()
        self._waiting: list[threading.Event] = []
        self._socket: StatsSocket | None = None
        self._copy_threads = DaemonPool("kvtier-engine-memory-copy", options.copy_threads)
        self._staged = StagedTier(discover().get(options.type)(options), memory, self._copy_threads)
        self.thread = LoopThread("kvtier-engine-memory", "tier", at_exit=weak_call(self._release))
        try:
            self.thread.open()
            self.thread.run(lambda: self._open(namespace))
        except BaseException:
            self._end_threads()
            raise

    async def _open(self, namespace: Namespace) -> None:
        settings = StackSettings()
        await check_folders([("", self._staged.options)], settings.open_timeout_seconds)
        alignment = await resolve_alignment([self._staged.backend], settings)
        geometry = memory_geometry(namespace.layout, self._memory, alignment)
        frames = Frames(geometry)
        queue_frames = self._options.inflight_bytes // 2 // frames.num_bytes
        if not queue_frames:
            raise ConfigError(
                f"is {self._options.inflight_bytes} bytes, but a block needs {frames.num_bytes} for each direction: "
                f"write at least {2 * frames.num_bytes}",
                "inflight_bytes",
            )
        staging = StagingRows(2 * queue_frames, frames)
        new_epoch = fresh_epoch() if isinstance(self._staged.backend, StatesEpoch) else None
        context = TierContext(self._name, geometry, namespace, time.monotonic, rows=staging, new_epoch=new_epoch)
        self._opened = await open_tier(self._staged, context, settings)
        try:
            self.plane = self._control(geometry, frames, queue_frames)
        except BaseException:
            await self._staged.close()
            raise
        first = self._opened.look_up_before_store
        most = queue_frames * frames.num_bytes
        self._queues = [TierQueue(self._staged, most, look_up_first=first) for _ in range(2)]
        self._dispatcher = Dispatcher(self._queues, frames.job_bytes, time.monotonic, self._deliver)
        if self._options.stats_socket:
            self._socket = StatsSocket(self._options.stats_socket, _stats_of(self))
            await self._socket.open()
        self._watch.look([self.plane.lower])
        self._log.info(
            "%s: blocks of %s bytes, staged through %d frames of %d bytes",
            self._name,
            ", ".join(map(str, dict.fromkeys(self._memory.block_bytes))),
            2 * queue_frames,
            frames.num_bytes,
        )

    def _control(self, geometry: Geometry, frames: Frames, queue_frames: int) -> EngineMemoryPlane:
        opened, settings = self._opened, StackSettings()
        spec = tier_spec(self._staged.backend, opened, geometry, settings.lookup_timeout_seconds)
        spec = replace(spec, name=self._name, by_root=False)
        # Several jobs fit side by side, so that copies and I/O overlap.
        limits = PlaneLimits(
            part_blocks=PART_BLOCKS,
            pinned_max=max(1, self._memory.num_blocks // PINNED_SHARE),
            lease_seconds=self._options.lease_seconds,
            part_frames=max(1, min(PART_BLOCKS, queue_frames // 4)),
            frame_blocks=frames.blocks,
        )
        return EngineMemoryPlane(LowerTier(1, spec, queue_frames), self._staged.permits, limits, opened.epoch)

    # -- requests and jobs ---------------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, request_id: str) -> LookupResult:
        """Look up a key as `EngineMemoryPlane` does; MISS after `close`."""
        self._check((key,))
        check_text("a request's id", request_id)
        with self._lock:
            if self._shut:
                return LookupResult.MISS
            return self._step(lambda: self.plane.lookup(key, request_id, time.monotonic()))

    def lease(self, keys: Sequence[OffloadKey]) -> None:
        """Keep blocks that are here until `release`, or for `lease_seconds`; those that are not stay misses."""
        self._check(keys)
        self._decide(lambda: self.plane.lease(keys, time.monotonic()))

    def release(self, keys: Sequence[OffloadKey]) -> None:
        """End a lease of each of these keys. Keys without a lease are ignored."""
        self._check(keys)
        self._decide(lambda: self.plane.release(keys))

    def submit(self, transfer: EngineTransfer) -> None:
        """Begin to store or load blocks. The memory they name is this tier's until `finished` returns the job.

        Raises UsageError for a job that is in flight, and for a place outside the memory.
        """
        check_types("a job", (transfer, EngineTransfer))
        check_types("a job", (transfer.kind, JobKind), (transfer.places, np.ndarray))
        if transfer.places.ndim != 1:
            raise UsageError("the places of a job are given one after another")
        self._check(transfer.keys)
        check_text("a request's id", transfer.request_id)
        self._memory.check(transfer.keys, transfer.places.tolist())
        with self._lock:
            if transfer.job_id in self._jobs:
                raise UsageError(f"job {transfer.job_id} is in flight")
            self._jobs[transfer.job_id] = transfer
            self._decide(lambda: self.plane.submit(transfer, time.monotonic()))

    def _check(self, keys: object) -> None:
        """Raise UsageError unless these are keys of blocks that the memory has."""
        check_keys(keys, self._num_groups)

    def end_step(self) -> None:
        """The step's loads were submitted: its hits need not be kept any longer."""
        self._decide(lambda: self.plane.end_step())  # noqa: PLW0108 - after a failure it is another plane

    def _decide(self, call: Callable[[], T]) -> T:
        """A step of the plane, and what follows from it."""
        with self._lock:
            return self._step(call, True)

    @guard_step
    def _step(self, call: Callable[[], T], sends: bool = False) -> T:
        """Call the plane, which `call` reads when it is called. Call with the lock held."""
        answer = call()
        if sends:
            jobs, queries = self.plane.take_jobs(), self.plane.take_queries()
            if self._shut:
                self.plane.give_up(time.monotonic())
            elif (jobs or queries) and self.thread.alive:  # else `_receive` gives up what is in flight
                self.thread.call_soon(self._start, jobs, queries)
        return answer

    def _start(self, jobs: Sequence[TierJob], queries: Sequence[PresenceQuery]) -> None:
        """In the loop: begin what was decided."""
        self._dispatcher.submit(jobs)
        for query in queries:
            self._lookups.begin(self._staged.backend, query, self._deliver)

    def _deliver(self, batch: Sequence[Arrival]) -> None:
        """In the loop's thread: extending a deque is atomic, and the engine's threads empty it."""
        self._inbox.extend(batch)
        for event in tuple(self._waiting):
            event.set()

    @contextmanager
    def _arrivals(self) -> Iterator[threading.Event]:
        """An event that is set by every delivery from here on."""
        arrived = threading.Event()
        self._waiting.append(arrived)
        try:
            yield arrived
        finally:
            self._waiting.remove(arrived)

    def finished(self) -> list[EngineTransfer]:
        """The engine's jobs that ended since the last call, each once."""
        with self._lock:
            self._receive()
            ended = self._step(lambda: self.plane.take_ended())  # noqa: PLW0108 - as in `end_step`
            for transfer in ended:
                self._jobs.pop(transfer.job_id, None)
            return ended

    @guard_step
    def _receive(self) -> None:
        """Record what arrived. Call with the lock held."""
        if self._shut:
            return
        now = time.monotonic()
        while self._inbox:
            self.plane.deliver(self._inbox.popleft(), now)
        if self.plane.busy and not self.thread.alive:
            self._log.error("%s: the thread that moves blocks has ended", self._name)
            self.plane.give_up(now)
        self.plane.relieve(now)
        if self._watch.due:
            self._watch.look([self.plane.lower])

    def _give_up(self, error: BaseException) -> None:
        failed = self.plane
        self.plane = answers_of(failed, self._jobs, self._staged.permits)
        self._log.critical(
            "%s has failed: every job ends, and nothing is found here any more", self._name, exc_info=error
        )
        with suppress(RuntimeError):  # the loop has ended
            self.thread.call_soon(self._dispatcher.stop)
        if failed.lower.owned is not None:
            failed.lower.index.changes.append((True, list(failed.lower.owned.directory)))

    # -- ending --------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Return when nothing touches the engine's memory any more: jobs that have not ended in time have failed."""
        deadline = time.monotonic() + self._options.drain_timeout_seconds
        with self._arrivals() as arrived:
            while self._busy() and (left := deadline - time.monotonic()) > 0:
                arrived.wait(left)
                arrived.clear()
        with self._lock:
            given_up = self._step(lambda: self.plane.give_up(time.monotonic()))
        self._given_up += given_up
        if given_up:
            self._log.warning("%s: %d blocks in flight were given up", self._name, given_up)

    def _busy(self) -> bool:
        with self._lock:
            self._receive()
            return self.plane.busy

    def reset(self, timeout_seconds: float = 30.0) -> None:
        """Nothing stored before is found when this returns, also after a crash. What is in flight ends as cancelled.

        Raises ResourceError if the tier could not make that durable in time; in memory it holds all the same.
        """
        check_timeout(timeout_seconds)
        with self._lock:
            epoch = self._step(lambda: self.plane.reset(time.monotonic()))
        backend = self._staged.backend
        if self._shut or not isinstance(backend, Resettable):
            return
        try:
            self.thread.run(lambda: self._reset(backend, epoch), timeout_seconds)
        except OSError as error:  # TimeoutError too
            raise ResourceError(f"{self._name}: the reset was not made durable: {error!r}") from error

    async def _reset(self, backend: Resettable, epoch: int) -> None:
        resetting = asyncio.ensure_future(backend.reset(epoch))
        resetting.add_done_callback(partial(self._operator.reset, epoch, time.monotonic()))
        await resetting

    def close(self) -> None:
        """Drain within the deadline, release the engine's memory, then close the tier. Idempotent.

        Where a disk is stuck, memory of kvtier stays in use, never the engine's. In a forked child it does nothing.
        """
        if not self._shut and not self.thread.is_forked_child:
            began = time.monotonic()
            try:
                self.drain()
            finally:
                self._release()
            report = CloseReport(self._given_up, len(self._queues[LOADS].running) + len(self._queues[STORES].running))
            self._operator.closed(report, began)

    def _release(self) -> None:
        """`close` without draining; for a tier that is left open when the interpreter ends."""
        with self._lock:
            if self._shut:
                return
            self._shut = True
            for permit in list(self._staged.permits.values()):
                permit.shut()
            self._memory.release()
        seconds = self._options.close_timeout_seconds + GRACE_SECONDS
        try:
            if self.thread.alive:
                self.thread.run(lambda: self._close(seconds), 2 * seconds)
        except TimeoutError:
            self._log.warning("%s did not close within %g s and is left behind", self._name, 2 * seconds)
        finally:
            self._end_threads()

    async def _close(self, seconds: float) -> None:
        try:
            self._dispatcher.stop()
        finally:
            self._lookups.cancel()
            if self._socket is not None:
                await self._socket.close()
            await close_each([self._staged], seconds)
            await self._copy_threads.close(GRACE_SECONDS)  # what has ended is delivered meanwhile

    def _end_threads(self) -> None:
        self.thread.close(GRACE_SECONDS)
        self._copy_threads.shutdown()

    def stats(self) -> StackStats:
        """Figures since the tier was opened; also after closing."""
        queues = {JobKind.STORE: self._queues[STORES], JobKind.LOAD: self._queues[LOADS]}
        figures = lower_stats(self.plane.lower, queues, time.monotonic())
        errors = self._errors + self._dispatcher.errors + self._watch.errors
        return StackStats({self._name: figures}, self.plane.backlog, errors=errors)


def answers_of(failed: EngineMemoryPlane, jobs: Mapping[int, EngineTransfer], permits: CopyPermits) -> Any:
    """The answers in the place of a plane that has failed: nothing is found, and no copy touches the engine's memory.

    `jobs` are the engine's jobs that were not returned to it. Blocks that had ended keep their outcomes.
    """

    def give_up(now: float) -> int:
        for permit in list(permits.values()):
            permit.shut()
        return 0

    def take_ended() -> list[EngineTransfer]:
        give_up(0.0)
        for transfer in jobs.values():
            for part in transfer.parts:
                part.permit.shut()
            transfer.complete(range(len(transfer.keys)), dropped(DropReason.TIER_DOWN))
            transfer.ended = True
        return list(jobs.values())

    def reset(now: float) -> int:
        """Give the epoch that makes what is on the disk unreachable all the same."""
        failed.next_epoch()
        return failed.epoch

    return Answers(
        {
            "lookup": lambda key, request_id, now: LookupResult.MISS,
            "find": lambda keys, now: [False] * len(keys),
            "take_jobs": list,
            "take_queries": list,
            "take_ended": take_ended,
            "take_changes": failed.take_changes,
            "give_up": give_up,
            "reset": reset,
            "lower": failed.lower,
            "busy": False,
            "backlog": 0,
        }
    )


def _stats_of(tier: EngineMemoryTier) -> Callable[[], StackStats | None]:
    """The tier's figures, without keeping a tier alive that its program forgot."""
    found = weakref.ref(tier)
    return lambda: one.stats() if (one := found()) else None


def memory_geometry(layout: KVLayout, memory: EngineMemory, alignment: int) -> Geometry:
    """The engine's blocks as they are in its memory, padding included.

    Raises ConfigError unless the memory has as many groups as the layout.
    """
    if len(layout.groups) != len(memory.block_bytes):
        raise ConfigError(f"the layout has {len(layout.groups)} groups, the memory {len(memory.block_bytes)}")
    groups = [
        replace(group, refs=(TensorRef(0, size),), block_size=layout.tokens_per_offloaded_block(g), padding_bytes=0)
        for g, (group, size) in enumerate(zip(layout.groups, memory.block_bytes, strict=True))
    ]
    return Geometry(KVLayout(groups), alignment)


LOOK_AGAIN_SECONDS = 0.5
"""A call looks at the health of the tier's thread so often, where nothing arrives."""


class BlockingCalls(ABC):
    """Stores and loads for threads of an engine, each of which waits for its own blocks."""

    def store(self, keys: Sequence[OffloadKey], places: Sequence[int], seconds: float) -> list[BlockOutcome]:
        """Store blocks, given in prefix order. One outcome for each: PRESENT where it is here already."""
        return self._transfer(JobKind.STORE, keys, places, seconds)

    def load(self, keys: Sequence[OffloadKey], places: Sequence[int], seconds: float) -> list[BlockOutcome]:
        """Load blocks into their places. One outcome for each; after any but LOADED its place may have been written."""
        return self._transfer(JobKind.LOAD, keys, places, seconds)

    @abstractmethod
    def _transfer(
        self, kind: JobKind, keys: Sequence[OffloadKey], places: Sequence[int], seconds: float
    ) -> list[BlockOutcome]:
        """The outcomes of a job, no later than in `seconds`; nothing touches the memory that it names then."""


class BlockingTier(EngineMemoryTier, BlockingCalls):
    """Calls from any number of threads, each of which waits for its own call and no longer than its `seconds`.

    Whatever a disk does: when a call has returned, nothing touches the memory that it named any more. A call that ends
    before its jobs does not change the tier's health, `job_timeout_seconds` is for that; but a tier of which nothing
    at all came back during two calls of more than a second is left alone. What had not begun by then is not begun.
    `finished` is of no use here: the calls return what ended.
    """

    def __init__(
        self, options: EngineMemoryOptions, namespace: Namespace, memory: EngineMemory, name: str, log: logging.Logger
    ) -> None:
        super().__init__(options, namespace, memory, name, log)
        self._job_ids = itertools.count(1)

    def find(self, keys: Sequence[OffloadKey], seconds: float) -> list[bool]:
        """Look up each key of a prompt, given in prefix order, in a shared tier where that is not known; what it does
        not answer for in time is not here."""
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
