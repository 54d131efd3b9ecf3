"""The tier stack for a synchronous engine: decisions on the engine's thread, I/O in a thread of the stack's own.

    the engine's thread                                       the stack's thread: an event loop
    lookup, reserve, submit  -> control plane
    step: send what was decided -> outbox -- LoopWaker -->    dispatcher -> tiers
          record what ended     <- inbox  <-- deliveries --   job ended or late; a shared tier's answers

Only the engine's thread touches the control plane, and only the loop's thread touches the dispatcher and the tiers.
But calls that tell policies of requests wait in a journal, and the loop's thread makes them take these in
(`kvtier.policy.reuse.journal`), so that the engine's does not have to when it asks them.
The two queues between them are deques, whose appends and pops are atomic. `step` empties the inbox and fills the
outbox, once per engine step; no call but `open`, `close`, `reset` and `wait` waits for anything.
"""

from __future__ import annotations

import asyncio
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Self, TypeVar

from kvtier.aio.loop_thread import Latch, LoopThread
from kvtier.aio.loop_waker import LoopWaker
from kvtier.aio.process_guard import ProcessGuard
from kvtier.aio.weak_call import weak_call
from kvtier.control.jobs import CPU_TIER, Arrival, PresenceQuery, TierJob
from kvtier.errors import IntegrityError, ResourceError, UsageError
from kvtier.stack import shutdown
from kvtier.stack.assembly import StackParts
from kvtier.stack.core import BlockGroup, EngineCalls, StackCore
from kvtier.stack.guard import guard_step
from kvtier.stack.open_stack import OpenStack
from kvtier.stack.request import StackRequest
from kvtier.stack.shutdown import CloseReport
from kvtier.tier.contract import LookupResult
from kvtier.types.checks import check_timeout, check_types
from kvtier.types.jobs import JobKind, JobResult, TransferJob
from kvtier.types.keys import JobId, OffloadKey

T = TypeVar("T")

CLOSE_GRACE_SECONDS = 10.0


class EngineStack(StackCore):
    """Use it as `with EngineStack(parts) as stack`, and call `step` once per engine step from one thread.

    In a child forked from the process that opened it every call raises UsageError, but `close`, which does nothing.
    """

    def __init__(self, parts: StackParts) -> None:
        super().__init__(parts)
        self._thread: LoopThread | None = None
        self._inbox: deque[Arrival] = deque()
        self._outbox: deque[tuple[Sequence[TierJob], Sequence[PresenceQuery]]] = deque()
        self._waker = LoopWaker(self._start_sent)
        # Its owner may take it again: a signal handler may close the stack in the middle of a step.
        self._taking_in = threading.RLock()
        self._arrived = Latch()
        self._results: dict[JobId, JobResult] = {}
        self._abandoned: shutdown.Abandoned | None = None
        self._tiers_ended = False

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
        settings, tiers = self._settings, len(self._parts.tiers) + len(self._parts.workers)
        seconds = (2 * settings.open_timeout_seconds + settings.tier_close_seconds) * tiers + settings.identity_seconds
        try:
            self._thread.open()
            self._run(self._assemble, seconds + CLOSE_GRACE_SECONDS)
        except BaseException:
            try:
                self._undo_open()
            finally:
                self._end_thread()
            raise

    async def _assemble(self) -> None:
        """In the loop: an interruption of the engine's thread loses nothing that was opened."""
        self._waker.attach()
        await self._open_tiers()
        assert self._assembled is not None
        self._assembled.plane.control.models.journal.lock = self._taking_in

    def _undo_open(self) -> None:
        """Close the tiers if all of them were open when the engine's thread was interrupted."""
        assembled = self._assembled
        if assembled is not None and self._thread is not None and self._thread.alive:
            self._closing = True
            each = self._settings.tier_close_seconds
            self._run(lambda: shutdown.end_tiers(assembled, each), each * assembled.num_closings + CLOSE_GRACE_SECONDS)
        self._assembled = None

    def close(self) -> CloseReport:
        """Drain lower tiers until the closing deadline, drop the rest, close every tier. Idempotent.

        Jobs that have not ended are cancelled or dropped; their GPU blocks are the engine's own again when this
        returns, unless the report counts unfinished jobs. Ctrl-C ends the draining and is raised once every tier is
        closed; after an interruption at another moment call `close` again. In a forked child it does nothing.
        """
        return self._close(self._settings.close_timeout_seconds)

    def _close(self, drain_seconds: float) -> CloseReport:
        assembled, report = self._assembled, self.close_report
        if self._owner.is_forked_child:
            return CloseReport(0, 0)
        if assembled is None or report is not None:
            self._closing = True
            if self._thread is not None and self._thread.alive:  # an interruption came in between
                self._end_thread()
            return report or CloseReport(0, 0)
        if not self._closing:
            self._drain_until = self._clock() + drain_seconds
            self._closing = True
        try:
            self._receive()
            for _ in self._draining():
                self.wait(self._drain_until - self._clock())
                self._receive()
        finally:
            self._end_tiers(assembled)
        return self.close_report or CloseReport(0, 0)

    def _end_tiers(self, assembled: OpenStack) -> None:
        """Give up what is dirty, close the tiers, report what that cost and end the thread."""
        each = self._settings.tier_close_seconds
        if self._abandoned is None:
            self._end_until = self._clock() + each * assembled.num_closings + CLOSE_GRACE_SECONDS
            self._abandoned = self._abandon(assembled)

        async def end() -> None:
            try:
                await shutdown.end_tiers(assembled, each)
            finally:
                self._tiers_ended = True

        try:
            self._run(end, max(0.0, self._end_until - self._clock()))
        finally:
            gone = self._thread is None or not self._thread.alive
            if self._tiers_ended or gone or self._clock() >= self._end_until:
                try:
                    self._receive()
                finally:
                    self._report_closed(assembled, self._abandoned)
                    self._end_thread()

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
        try:
            if self._thread.alive:
                self._thread.call_soon(self._waker.detach)
        finally:
            if self._thread.close(min(CLOSE_GRACE_SECONDS, self._settings.tier_close_seconds)):
                self._waker.detach()  # where the loop did not

    def _run(self, work: Callable[[], Coroutine[Any, Any, T]], timeout_seconds: float | None = None) -> T:
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
    ) -> JobId:
        """Begin to store whole blocks, named as for `TierStack.store`; the result comes out of a later `step`."""
        return self.submit(self._job_of(JobKind.STORE, keys, gpu_blocks, groups, timeout_seconds))

    def submit_load(
        self,
        keys: Sequence[OffloadKey] = (),
        request: StackRequest | None = None,
        *,
        gpu_blocks: Sequence[int] = (),
        groups: Sequence[BlockGroup] = (),
        timeout_seconds: float | None = None,
    ) -> JobId:
        """Begin to load whole blocks, named as for `TierStack.load`; the result comes out of a later `step`."""
        return self.submit(self._job_of(JobKind.LOAD, keys, gpu_blocks, groups, timeout_seconds), request)

    def submit(self, job: TransferJob, request: StackRequest | None = None) -> JobId:
        """Begin a prepared job, as `TierStack.run`; its result comes out of a later `step`. Returns the job's id.

        Raises UsageError for a job that contradicts the layout.
        """
        self._register(self._opened(), job, request)
        self._submit(job, request)
        return job.job_id

    @property
    def engine(self) -> PlacingCalls:
        """The calls for engine adapters alone."""
        return PlacingCalls(self)

    @guard_step
    def _begin_copies(self, job: TransferJob) -> list[TransferJob]:
        """The copies that begin now; the rest of the job is cancelled."""
        plane, now = self._opened().plane, time.monotonic()
        plane.pump(now)
        copies = [emission.job for emission in self._send() if emission.position == CPU_TIER]
        if sum(copy.num_blocks for copy in copies) < job.num_blocks:
            plane.cancel(job.job_id, now)
            self._send()
        return copies

    def lookup(self, keys: Sequence[OffloadKey], *, ask: bool = True) -> list[LookupResult]:
        """Presence of each key from memory; RETRY where a shared tier has yet to answer.

        With `ask=False` no tier is asked. An engine that looks the keys of a request up one by one asks for all that
        are unknown at once, in prefix order: a tier may find them with fewer requests.
        """
        if ask is not True and ask is not False:
            check_types("ask", (ask, bool))
        assembled = self._assembled
        if assembled is None or self._closing or self._owner.pid != ProcessGuard.here:
            assembled = self._opened()
        try:  # as `guard_step`, in less time: a scheduler looks up for each request
            return assembled.plane.lookup(keys, time.monotonic(), ask)
        except BaseException as error:
            self._fail(error)
            return assembled.plane.lookup(keys, time.monotonic(), ask)

    def step(self) -> list[JobResult]:
        """Once per engine step: record what ended, send what was decided, return the engine's jobs that ended."""
        self._opened()
        self._receive()
        results = list(self._results.values())
        self._results = {}  # interrupted before this, the next step returns them; no signal handler runs after it
        return results

    def wait(self, timeout_seconds: float) -> bool:
        """For an engine with nothing else to do: wait until `step` has work, or the time is over.

        `step` has work when something arrived, or by time alone. True unless the time was over first.
        """
        check_timeout(timeout_seconds)
        self._owner.check()
        self._arrived.clear()
        if self._inbox:
            return True
        now = time.monotonic()
        due = self._next_deadline(now)
        if due - now > timeout_seconds:
            return self._arrived.wait(max(0.0, timeout_seconds))
        self._arrived.wait(due - now)
        return True

    @guard_step
    def _next_deadline(self, now: float) -> float:
        """The time at which `step` has work by time alone."""
        due = self._assembled.plane.next_deadline(now) if self._assembled is not None else None
        return self._overdue_at if due is None else min(due, self._overdue_at)

    @property
    def has_pending_work(self) -> bool:
        """True while an engine that idles should go on stepping: jobs are in flight or wait, or something arrived."""
        plane = self._opened().plane  # first: it refuses a child of this stack's process
        return bool(self._results or self._inbox) or not plane.idle

    def reset(self, timeout_seconds: float = 30.0) -> None:
        """New weights: everything stored before is unreachable in every tier when this returns, also after a crash.

        Raises ResourceError if a tier could not make that durable in time; in memory it holds all the same. For tiers
        that are held back it is made durable when they join.
        """
        check_timeout(timeout_seconds)
        make_durable = self._begin_reset()
        self._send_reset()

        async def reset_tiers() -> None:
            await make_durable()

        try:
            self._run(reset_tiers, timeout_seconds)
        except TimeoutError as error:
            raise ResourceError(f"the reset was not made durable within {timeout_seconds} s") from error

    # -- between the two threads ---------------------------------------------------------------------------------

    @guard_step
    def _receive(self) -> None:
        """Record what arrived, send what was decided; the results of the engine's jobs that ended are for `step`."""
        assert self._assembled is not None
        plane, now = self._assembled.plane, time.monotonic()
        while self._inbox:
            plane.deliver(self._inbox.popleft(), now)
        plane.pump(now)
        self._send()
        if now >= self._overdue_at:
            self._look_for_overdue(now)
        if self._watch.due:
            self._watch.look(plane.control.lowers)

    def _send(self) -> Sequence[TierJob]:
        """Send what was decided to the loop; keep results for `step`, and return the jobs. Part of a step."""
        assert self._assembled is not None
        decided = self._assembled.plane.collect()
        if decided.jobs or decided.queries:
            self._outbox.append((decided.jobs, decided.queries))
            self._waker.wake()
        for result in decided.results:
            self._results[result.job_id] = result
            self._jobs.pop(result.job_id, None)
        return decided.jobs

    def _stop_dispatcher(self) -> None:
        assert self._thread is not None
        assert self._assembled is not None
        with suppress(RuntimeError):  # the loop has ended
            self._thread.call_soon(self._assembled.dispatcher.stop)

    def _advance(self) -> None:
        self._send()

    def _carry_out(self) -> None:
        """The next step sends it."""

    def _start_sent(self) -> None:
        """In the loop's thread: begin what was sent, in its order. Then policies take in the calls that wait."""
        while self._outbox:
            self._start(*self._outbox.popleft())
        self._take_in()

    def _take_in(self) -> None:
        """In the loop's thread: between two pieces the engine's thread has its turn. It never waits for that one."""
        assembled = self._assembled
        if assembled is None or self._failed or not self._taking_in.acquire(blocking=False):
            return
        try:
            more = assembled.plane.control.models.journal.take_in_some()
        finally:
            self._taking_in.release()
        if more:
            asyncio.get_running_loop().call_soon(self._take_in)

    def _deliver(self, batch: Sequence[Arrival]) -> None:
        """In the loop's thread: a deque append is atomic, and the engine's thread drains it."""
        self._inbox.extend(batch)
        self._arrived.set()


class PlacingCalls(EngineCalls):
    """`EngineStack.engine`: of a stack whose workers are `EngineCopies`, the engine carries out the copies itself."""

    _driver: EngineStack

    def place(self, job: TransferJob, request: StackRequest | None = None) -> TransferJob | None:
        """Begin a job whose copies the engine carries out itself; returns its rows: `slots` and `generations`.

        Blocks that cannot be copied at once are not copied at all: they end as cancelled (a store that found its rows
        taken, a load whose block is in no row). None if that is all of them. The job returned has an id of its own, for
        `EngineCopies.end`. Its group positions are the job's.
        """
        stack = self._driver
        stack._register(stack._opened(), job, request)
        stack._submit(job, request)
        copies = stack._begin_copies(job)
        if len(copies) > 1:
            raise IntegrityError(f"job {job.job_id} was begun in {len(copies)} parts")
        return copies[0] if copies else None
