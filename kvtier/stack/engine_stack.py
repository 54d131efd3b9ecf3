"""The tier stack for a synchronous engine: decisions on the engine's thread, I/O in a thread of the stack's own.

    the engine's thread                                       the stack's thread: an event loop
    lookup, reserve, submit  -> control plane
    step: send what was decided -> outbox -- LoopWaker -->    dispatcher -> tiers
          record what ended     <- inbox  <-- deliveries --   job ended or late; a shared tier's answers

Only the engine's thread touches the control plane, and only the loop's thread touches the dispatcher and the tiers.
The two queues between them are deques, whose appends and pops are atomic. `step` empties the inbox and fills the
outbox, once per engine step; no call but `open`, `close`, `reset` and `wait` waits for anything.
"""

from __future__ import annotations

import asyncio
import threading
import time
import warnings
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any, Self, TypeVar

from kvtier.aio.loop_thread import LoopThread
from kvtier.aio.loop_waker import LoopWaker
from kvtier.aio.weak_call import weak_call
from kvtier.control.deliveries import Delivery, PresenceAnswers, PresenceQuery
from kvtier.control.plane import ControlPlane
from kvtier.control.state import CPU_TIER, Emission
from kvtier.errors import IntegrityError, ResourceError, UsageError
from kvtier.stack import shutdown
from kvtier.stack.assembled import Assembled
from kvtier.stack.assembly import StackParts, assemble
from kvtier.stack.core import BlockGroup, StackCore
from kvtier.stack.shutdown import CloseReport
from kvtier.tier_api.contract import LookupResult
from kvtier.types.jobs import JobKind, JobResult, TransferJob
from kvtier.types.keys import JobId, OffloadKey, RequestId
from kvtier.types.requests import RequestInfo

T = TypeVar("T")

CLOSE_GRACE_SECONDS = 10.0


class EngineStack(StackCore):
    """Use it as `with EngineStack(parts) as stack`, and call `step` once per engine step from one thread.

    In a child forked from the process that opened it every call raises UsageError, but `close`, which does nothing.
    """

    def __init__(self, parts: StackParts) -> None:
        super().__init__(parts)
        self._thread: LoopThread | None = None
        self._inbox: deque[Delivery | PresenceAnswers] = deque()
        self._outbox: deque[tuple[Sequence[Emission], Sequence[PresenceQuery]]] = deque()
        self._waker = LoopWaker(self._start_sent)
        self._arrived = threading.Event()

    # -- life ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def open(self) -> None:
        """Start the stack's thread and open every tier. Raises as `TierStack.open` does, with nothing left behind."""
        self._owner.check()
        if self._thread is not None or self._closing:
            raise UsageError("a stack is opened once")
        self._owner.claim()
        self._thread = LoopThread("kvtier-stack", "stack", at_exit=weak_call(self._close_at_exit))
        try:
            self._assembled = self._run(self._assemble())
        except BaseException:
            self._end_thread()
            raise

    async def _assemble(self) -> Assembled:
        self._waker.attach()
        return await assemble(self._parts, time.monotonic, self._deliver)

    def close(self) -> CloseReport:
        """Drain lower tiers until the closing deadline, drop the rest, close every tier. Idempotent.

        Jobs that have not ended are cancelled or dropped; their GPU blocks are the engine's own again when this
        returns, unless the report counts unfinished jobs. In a forked child it does nothing.
        """
        return self._close(self._settings.close_seconds)

    def _close(self, drain_seconds: float) -> CloseReport:
        if self._owner.elsewhere:
            return CloseReport(0, 0)
        if self._closing or self._assembled is None:
            self._closing = True
            return self.close_report or CloseReport(0, 0)
        self._closing = True
        assembled = self._assembled
        self._drain_until = self._clock() + drain_seconds
        try:
            self._receive(assembled.plane)
            for _ in self._draining(assembled.plane):
                self.wait(self._drain_until - self._clock())
                self._receive(assembled.plane)
        finally:
            abandoned = shutdown.abandon(assembled)
            each = self._settings.tier_close_seconds
            try:
                self._run(shutdown.end_tiers(assembled, each), each * len(assembled.to_close) + CLOSE_GRACE_SECONDS)
            finally:
                self._receive(assembled.plane)
                self.close_report = shutdown.report(assembled, abandoned)
                self._end_thread()
        return self.close_report

    def _close_at_exit(self) -> None:
        """Close a stack that was left open when the interpreter ends, without draining.

        A thread that is moving bytes while the interpreter goes away can take the process down with an abort.
        """
        if self.close_report is None:
            self._close(0.0)
            warnings.warn(
                f"{self!r} was closed by the end of the program; close it before", ResourceWarning, stacklevel=1
            )

    def _end_thread(self) -> None:
        """End what is left in the loop, then the loop and its thread.

        What hangs is left behind, such as a tier that has not opened in time; the thread ends after it.
        """
        assert self._thread is not None
        self._thread.call_soon(self._waker.detach)
        self._thread.close(CLOSE_GRACE_SECONDS)

    def _run(self, work: Coroutine[Any, Any, T], timeout_seconds: float | None = None) -> T:
        """Run a coroutine in the loop, after what was sent before, and wait for it."""
        assert self._thread is not None
        self._thread.call_soon(self._start_sent)
        return self._thread.run(work, timeout_seconds)

    # -- moving blocks -------------------------------------------------------------------------------------------

    def submit_store(
        self,
        keys: Sequence[OffloadKey] = (),
        *,
        gpu_blocks: Sequence[int] = (),
        groups: Sequence[BlockGroup] = (),
        timeout_seconds: float | None = None,
        info: RequestInfo | None = None,
    ) -> JobId:
        """Begin to store whole blocks, named as for `TierStack.store`; the result comes out of a later `step`."""
        job = self._job_of(JobKind.STORE, keys, gpu_blocks, groups, timeout_seconds)
        self._begin(job, None, info)
        return job.job_id

    def submit_load(
        self,
        keys: Sequence[OffloadKey] = (),
        request_id: RequestId | None = None,
        *,
        gpu_blocks: Sequence[int] = (),
        groups: Sequence[BlockGroup] = (),
        timeout_seconds: float | None = None,
        info: RequestInfo | None = None,
    ) -> JobId:
        """Begin to load whole blocks, named as for `TierStack.load`; the result comes out of a later `step`."""
        job = self._job_of(JobKind.LOAD, keys, gpu_blocks, groups, timeout_seconds)
        self._begin(job, request_id, info)
        return job.job_id

    def submit(self, job: TransferJob, request_id: RequestId | None = None, *, info: RequestInfo | None = None) -> None:
        """Begin a prepared job, which may name parts of blocks; its result comes out of a later `step`.

        A load ends its request's leases. Raises UsageError for a job that contradicts the layout.
        """
        self._begin(job, request_id, info)

    def place(self, job: TransferJob, request_id: RequestId | None = None) -> TransferJob | None:
        """Begin a job whose copies the engine carries out itself, and say which rows: `slots` and `generations`.

        For stacks whose workers are `EngineCopies`. Blocks that cannot be copied at once are not copied at all: they
        end as cancelled (a store that found its rows taken, a load whose block is in no row). None if that is all of
        them. The job returned has an id of its own, for `EngineCopies.end`. Its group positions are the job's.
        """
        plane = self._begin(job, request_id, None)
        plane.pump(time.monotonic())
        copies = [emission.job for emission in self._send(plane) if emission.position == CPU_TIER]
        if sum(copy.num_blocks for copy in copies) < job.num_blocks:
            self.cancel(job.job_id)
            self._send(plane)
        if len(copies) > 1:
            raise IntegrityError(f"job {job.job_id} was begun in {len(copies)} parts")
        return copies[0] if copies else None

    def storable(self, keys: Sequence[OffloadKey]) -> tuple[list[OffloadKey], int]:
        """(the keys that are in no row and on their way into none, in their order; how many rows can be had now)."""
        cpu = self._opened().plane.control.cpu
        return [key for key in dict.fromkeys(keys) if key not in cpu.directory], cpu.available

    def lookup(self, keys: Sequence[OffloadKey], *, info: RequestInfo | None = None) -> list[LookupResult]:
        """Presence of each key from memory; RETRY where a shared tier has yet to answer."""
        return self._opened().plane.lookup(keys, time.monotonic(), info)

    def step(self) -> list[JobResult]:
        """Once per engine step: record what ended, send what was decided, return the engine's jobs that ended."""
        return self._receive(self._opened().plane)

    def wait(self, timeout_seconds: float) -> bool:
        """For an engine with nothing else to do: wait until `step` has work, or the time is over.

        `step` has work when something arrived, or by time alone. True unless the time was over first.
        """
        self._owner.check()
        self._arrived.clear()
        if self._inbox:
            return True
        now = time.monotonic()
        due = self._assembled.plane.next_deadline(now) if self._assembled is not None else None
        if due is None or due - now > timeout_seconds:
            return self._arrived.wait(max(0.0, timeout_seconds))
        self._arrived.wait(due - now)
        return True

    @property
    def has_pending_work(self) -> bool:
        """True while an engine that idles should go on stepping: jobs are in flight or waiting."""
        return not self._opened().plane.idle

    def reset(self, timeout_seconds: float = 30.0) -> None:
        """New weights: everything stored before is unreachable in every tier when this returns, also after a crash.

        Raises ResourceError if a tier could not make that durable in time; in memory it holds all the same.
        """
        plane = self._opened().plane
        epoch = plane.reset(time.monotonic())
        self._send(plane)

        async def reset_tiers() -> None:
            await asyncio.gather(*self._resets(epoch))

        try:
            self._run(reset_tiers(), timeout_seconds)
        except TimeoutError as error:
            raise ResourceError(f"the reset was not made durable within {timeout_seconds} s") from error

    # -- between the two threads ---------------------------------------------------------------------------------

    def _receive(self, plane: ControlPlane) -> list[JobResult]:
        """Record what arrived, send what was decided; returns the engine's jobs that ended."""
        now = time.monotonic()
        while self._inbox:
            plane.deliver(self._inbox.popleft(), now)
        plane.pump(now)
        self._send(plane)
        return plane.take_finished()

    def _send(self, plane: ControlPlane) -> Sequence[Emission]:
        """Send what was decided to the loop; returns the jobs."""
        jobs, queries = plane.take_jobs(), plane.take_queries()
        if jobs or queries:
            self._outbox.append((jobs, queries))
            self._waker.wake()
        return jobs

    def _advance(self, plane: ControlPlane) -> None:
        self._send(plane)

    def _decided(self, plane: ControlPlane) -> None:
        """The next step sends it."""

    def _start_sent(self) -> None:
        """In the loop's thread: begin what was sent, in its order."""
        while self._outbox:
            self._start(*self._outbox.popleft())

    def _deliver(self, batch: Sequence[Delivery | PresenceAnswers]) -> None:
        """In the loop's thread: a deque append is atomic, and the engine's thread drains it."""
        self._inbox.extend(batch)
        self._arrived.set()
