"""The tier stack in an asyncio program: loads and stores GPU blocks wherever their bytes are.

One event loop drives the control plane and the tiers. A stack process (`kvtier.service.pool`) is one of these too, with
the GPU blocks of its engines in other processes.
"""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
import weakref
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Self

from kvtier.aio.process_guard import ProcessGuard
from kvtier.aio.shielded_wait import shielded_wait
from kvtier.control.flow.load_or_compute import answers
from kvtier.control.jobs import Arrival, Delivery, PresenceAnswers
from kvtier.errors import IntegrityError, UsageError
from kvtier.stack import shutdown
from kvtier.stack.assembly import StackParts, assemble
from kvtier.stack.engine_calls import EngineCalls
from kvtier.stack.guard import answers_of, guard_step
from kvtier.stack.jobs import GRACE_SECONDS, BlockGroup, OverdueJobs, check_job, new_job, whole_groups
from kvtier.stack.joining import reset_tiers
from kvtier.stack.lookups import AnswerWaits, Lookups
from kvtier.stack.open_stack import OpenStack
from kvtier.stack.request import ServesRequests, StackRequest
from kvtier.stack.shutdown import CloseReport
from kvtier.stack.watching.operator_log import OperatorLog, TierWatch
from kvtier.stack.watching.stats import StackStats, collect
from kvtier.tier.contract import Clock, LookupResult
from kvtier.tier.shared_epoch import fresh_epoch
from kvtier.types.checks import check_hint, check_keys, check_timeout, check_types, check_whole
from kvtier.types.events import OffloadingEvent
from kvtier.types.geometry import Geometry
from kvtier.types.hints import HintResult, KVHint
from kvtier.types.jobs import GPUGroup, JobKind, JobResult, TransferJob
from kvtier.types.keys import JobId, OffloadKey

if TYPE_CHECKING:
    from kvtier.stack.signals import ClosingSignals

logger = logging.getLogger(__name__)


class TierStack(ServesRequests):
    """Loads and stores GPU blocks through all tiers. Use it as `async with TierStack(parts) as stack`.

    A store returns when the CPU tier has the blocks; lower tiers follow behind. A load reports each block by itself:
    LOADED blocks hold exactly the bytes that were stored under their key. Cancelling either ends what has not begun
    and waits for the copies in flight, so GPU blocks are the caller's own again when the call has returned or raised.
    In a child forked from the process that opened it every call raises UsageError, but `close`, which does nothing.
    """

    def __init__(self, parts: StackParts) -> None:
        self.close_report: CloseReport | None = None
        self._parts = parts
        self._settings = parts.settings
        self._owner = ProcessGuard()
        self._assembled: OpenStack | None = None
        self._clock: Clock = time.monotonic
        self._jobs: dict[JobId, TransferJob] = {}
        self._next_job = 1
        self._waiting: dict[JobId, asyncio.Future[JobResult]] = {}
        self._overdue = OverdueJobs()
        self._lookups = Lookups()
        self._answer_waits = AnswerWaits()
        self._progress = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._reset_failed = False
        self._closing = False
        self._drain_until = 0.0
        self._ending: asyncio.Task[None] | None = None
        self._signals: ClosingSignals | None = None
        self._loop_end: AsyncGenerator[None, None] | None = None

    def __del__(self) -> None:
        if self._assembled is not None and self.close_report is None and not self._owner.is_forked_child:
            warnings.warn(f"unclosed {shutdown.UNCLOSED.format(self)}", ResourceWarning, stacklevel=1, source=self)

    # -- life ----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Open every tier. Raises ResourceError or ConfigError with nothing left behind."""
        self._owner.check()
        if self._assembled is not None or self._closing:
            raise UsageError("a stack is opened once")
        self._loop = asyncio.get_running_loop()
        self._clock = self._loop.time
        self._owner.claim()
        self._loop_end = _close_at_loop_end(weakref.ref(self))
        await self._open_tiers()
        await anext(self._loop_end)

    async def _open_tiers(self) -> None:
        self._log = OperatorLog(logging.getLogger(self._parts.operator_log), self._clock)
        self._watch = TierWatch(self._log, self._clock)
        assembled = await assemble(self._parts, self._clock, self._deliver)
        try:
            await self._open_stats_socket(assembled)
            self._assembled = assembled
            control = assembled.plane.control
            self._log.opened(control.cpu_spec)
            waits = assembled.joining is not None
            reason = "what its blocks belong to is not known yet" if waits else "its root is damaged"
            self._watch.look(control.lowers, reason, logging.INFO if waits else logging.WARNING)
        except BaseException:
            await shutdown.end_tiers(assembled, self._settings.tier_close_seconds)
            raise

    async def _open_stats_socket(self, assembled: OpenStack) -> None:
        """Serve the figures if a path is given. The socket does not keep a stack alive that its program forgot."""
        if self._parts.stats_socket:
            from kvtier.stack.watching.stats_socket import StatsSocket

            stack = weakref.ref(self)
            served = StatsSocket(self._parts.stats_socket, lambda: one.stats() if (one := stack()) else None)
            assembled.stats_socket = served
            await served.open()

    async def close(self) -> None:
        """Drain lower tiers until the closing deadline, drop the rest, close every tier. Idempotent.

        What was dropped is in `close_report` and in the log. When cancelled it drains no longer, but still closes every
        tier before the cancellation goes on. In a forked child it does nothing.
        """
        try:
            self._closing = self._closing or self._assembled is not None
            await self._close(self._settings.close_timeout_seconds)
        finally:
            if self._loop_end is not None:
                await self._loop_end.aclose()

    async def _close(self, drain_seconds: float) -> None:
        if self._assembled is None or self._owner.is_forked_child:
            return
        if self._ending is None or (self._ending.done() and self.close_report is None):  # an exception ended that
            self._closing = True
            self._drain_until = self._clock() + drain_seconds
            self._ending = self._loop.create_task(self._end(self._assembled), name="kvtier close")
        try:
            await shielded_wait(self._ending, self._stop_draining)
        finally:
            if self._signals is not None:
                self._signals.restore()

    def _stop_draining(self) -> None:
        self._drain_until = self._clock()
        self._progress.set()

    def close_on(self, *numbers: int) -> None:
        """Close the stack when one of these signals arrives, such as SIGTERM; then the signal takes its former course.

        That is the default action, or the handler that was there before, which is put back first; also when the stack
        closes for another reason. A second signal does not wait for the closing. Raises UsageError for a signal that
        cannot be handled, and unless the stack's loop runs in the main thread, where Python handles signals.
        """
        self._opened()
        if self._signals is None:
            from kvtier.stack.signals import ClosingSignals

            self._signals = ClosingSignals(self._loop, self.close)
        self._signals.install(numbers)

    async def _close_late(self) -> None:
        """Close without draining and warn, unless it is closed already or belongs to another process."""
        if self.close_report is None and not self._owner.is_forked_child:
            forgotten = not self._closing
            await self._close(0.0)
            if forgotten:
                text = f"{self!r} was closed by the end of its loop; close it before"
                warnings.warn(text, ResourceWarning, stacklevel=1)

    async def _end(self, assembled: OpenStack) -> None:
        began = self._clock()
        try:
            self._end_stores()
            while self._clock() < self._drain_until and not self._is_drained():
                await self._wait_progress(self._drain_until)
        finally:
            self._lookups.cancel()
            abandoned = self._abandon(assembled)
            await shutdown.end_tiers(assembled, self._settings.tier_close_seconds)
            self.close_report = shutdown.report(assembled, abandoned)
            self._log.closed(self.close_report, began)
            if self._timer is not None:
                self._timer.cancel()
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(UsageError("the stack was closed before the job ended"))

    @guard_step
    def _end_stores(self) -> None:
        assert self._assembled is not None
        self._assembled.plane.close(self._clock())
        self._advance()

    @guard_step
    def _is_drained(self) -> bool:
        """Write back what is dirty as far as limits allow. True once nothing is in flight."""
        assert self._assembled is not None
        plane = self._assembled.plane
        if plane.dirty_rows or not plane.idle:
            plane.drain(self._clock())
            self._advance()
        return plane.idle

    @guard_step
    def _abandon(self, assembled: OpenStack) -> shutdown.Abandoned:
        """Give up what is dirty: draining is over."""
        return shutdown.abandon(assembled)

    # -- moving blocks -------------------------------------------------------------------------------------------

    async def store(
        self,
        keys: Sequence[OffloadKey] = (),
        *,
        gpu_blocks: Sequence[int] = (),
        groups: Sequence[BlockGroup] = (),
        timeout_seconds: float | None = None,
    ) -> JobResult:
        """Store whole blocks: `keys` of one group and their `gpu_blocks`, or `groups` of (keys, GPU blocks).

        Each key takes `block_size_factor` consecutive entries of its GPU blocks. The result has one tuple of outcomes
        for each group that has keys. Raises UsageError for blocks that contradict the layout, never for a failure of a
        tier.
        """
        whole = whole_groups(keys, gpu_blocks, groups, self.geometry)
        return await self.run(self.job(JobKind.STORE, whole, timeout_seconds))

    async def load(
        self,
        keys: Sequence[OffloadKey] = (),
        request: StackRequest | None = None,
        *,
        gpu_blocks: Sequence[int] = (),
        groups: Sequence[BlockGroup] = (),
        timeout_seconds: float | None = None,
    ) -> JobResult:
        """Load whole blocks, named as for `store`, into GPU blocks.

        They pass through a bounded window of rows if the prefix is longer than the CPU tier.
        """
        whole = whole_groups(keys, gpu_blocks, groups, self.geometry)
        return await self.run(self.job(JobKind.LOAD, whole, timeout_seconds), request)

    def job(self, kind: JobKind, groups: Sequence[GPUGroup], timeout_seconds: float | None = None) -> TransferJob:
        """A job with a fresh id and a deadline from now; the stack's own default when no timeout is given."""
        self._opened()
        job = new_job(self._next_job, kind, groups, timeout_seconds, self._settings, self._clock())
        self._next_job += 1
        return job

    async def run(self, job: TransferJob, request: StackRequest | None = None) -> JobResult:
        """Run a prepared job of `job`, which may name parts of blocks.

        A load that names a request ends the request's leases once it holds the rows itself.
        """
        self._register(self._opened(), job, request)
        future = self._waiting[job.job_id] = self._loop.create_future()
        overdue = None
        try:
            if job.deadline is not None:
                overdue = self._loop.call_at(job.deadline + GRACE_SECONDS, self._on_overdue, job.job_id)
            self._submit(job, request)
            return await shielded_wait(future, partial(self._cancel, job.job_id))
        finally:
            if overdue is not None:
                overdue.cancel()
            if self._jobs.get(job.job_id) is job:
                del self._jobs[job.job_id], self._waiting[job.job_id]

    def _register(self, assembled: OpenStack, job: TransferJob, request: StackRequest | None) -> None:
        """Check a job; `_submit` it next."""
        check_job(job, assembled.geometry)
        if request is not None and type(request) is not StackRequest:
            check_types("a job's request", (request, StackRequest))
        if job.job_id in self._jobs:
            raise UsageError(f"job {job.job_id} is in flight already")
        self._jobs[job.job_id] = job
        self._overdue.forget(job.job_id)  # an earlier job had this id
        for copier in assembled.fenced:
            copier.fence()

    @guard_step
    def _submit(self, job: TransferJob, request: StackRequest | None) -> None:
        assert self._assembled is not None
        self._assembled.plane.submit(job, self._clock(), None if request is None else request.id)
        self._carry_out()

    @guard_step
    def cancel(self, job_id: JobId) -> None:
        """End a job early; its result still comes, after the copies in flight."""
        check_whole("a job's id", job_id)
        self._opened().plane.cancel(job_id, self._clock())
        self._carry_out()

    @guard_step
    def _on_overdue(self, job_id: JobId) -> None:
        """The job ought to have ended. Look again later if it still has not."""
        if job_id in self._jobs:
            self._carry_out()
            self._look_for_overdue(self._clock() - GRACE_SECONDS)
            self._loop.call_later(GRACE_SECONDS, self._on_overdue, job_id)

    def _look_for_overdue(self, deadline: float) -> None:
        """Raise IntegrityError for jobs whose deadline was before and that wait for no copy: nothing else would end
        them. Part of a step."""
        assert self._assembled is not None
        overdue = {
            number for number, job in self._jobs.items() if job.deadline is not None and job.deadline <= deadline
        }
        if self._overdue.are_lost(overdue, self._assembled.dispatcher.copies()) and not self._failed:
            raise IntegrityError("a job did not end by its deadline")

    @guard_step
    def _cancel(self, job_id: JobId) -> None:
        """Also while the stack closes, which `cancel` refuses."""
        assert self._assembled is not None
        self._assembled.plane.cancel(job_id, self._clock())
        self._advance()

    # -- lookups, hints, figures, resets -------------------------------------------------------------------------

    @property
    def geometry(self) -> Geometry:
        """The layout in rows of the stack's alignment."""
        return self._opened().geometry

    @guard_step
    def locate(self, keys: Sequence[OffloadKey]) -> list[str | None]:
        """For each key the name of the highest tier that holds it, or None. Synchronous, from memory."""
        assembled = self._opened()
        check_keys(keys, assembled.geometry.num_groups)
        return assembled.plane.locate(keys, self._clock())

    @guard_step
    def hint(self, hint: KVHint) -> HintResult:
        """Follow what the application says of blocks: `Retain`, `Pin`, `Prefetch`, `Demote` or `Release`.

        Returns at once: how many blocks it is followed for, and why others are left as they are, which is no error.
        Raises UsageError for a hint that is none, or whose values are of wrong types.
        """
        assembled = self._opened()
        check_hint(hint, assembled.geometry.num_groups)
        result = assembled.plane.hint(hint, self._clock())
        self._carry_out()
        return result

    @property
    def engine(self) -> EngineCalls:
        """The calls for engine adapters alone."""
        return EngineCalls(self)

    def stats(self) -> StackStats:
        """Figures of every tier since the stack opened; also after it closed."""
        self._owner.check()
        if self._assembled is None:
            raise UsageError("the stack was never opened")
        return collect(self._assembled, self._clock(), self._errors + self._watch.errors)

    @guard_step
    def take_events(self) -> list[OffloadingEvent]:
        """Take the blocks that became reachable or ceased to be since the last call, in order."""
        return self._opened().plane.take_events()

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the state machine's sums agree. For tests and for suspicions."""
        self._owner.check()
        if self._assembled is not None:
            self._assembled.plane.check_integrity()

    async def lookup(self, keys: Sequence[OffloadKey]) -> Sequence[LookupResult]:
        """Presence of each key. Waits for shared tiers' answers until the lookup deadline; RETRY then becomes MISS.

        So does what a tier would load later than the engine computes it (`StackRequest.worth_loading`).
        """
        deadline = self._clock() + self._settings.lookup_timeout_seconds
        self._opened()
        results = self._look(keys)
        self._progress.set()
        asked = frozenset(keys) if LookupResult.RETRY in results else frozenset()
        while LookupResult.RETRY in results and self._clock() < deadline:
            await self._answer_waits.wait(asked, deadline)
            results = self._look(keys)
        return answers(results, self._worth_loading(keys) if self._settings.chooses else len(keys))

    @guard_step
    def _look(self, keys: Sequence[OffloadKey]) -> Sequence[LookupResult]:
        """Presence from memory; what is unknown is asked for."""
        assert self._assembled is not None
        results = self._assembled.plane.lookup(keys, self._clock())
        self._carry_out(pumps=False)
        return results

    @guard_step
    def _worth_loading(self, keys: Sequence[OffloadKey]) -> int:
        assert self._assembled is not None
        return self._assembled.plane.choice.worth_loading(keys, self._clock())

    async def drain(self, timeout_seconds: float, backlog: int = 0) -> bool:
        """Wait until at most `backlog` blocks are on their way to lower tiers; False when the time ran out."""
        check_timeout(timeout_seconds)
        check_whole("a backlog", backlog)
        assembled = self._opened()
        deadline = self._clock() + timeout_seconds
        while assembled.plane.backlog > backlog:
            if self._clock() >= deadline:
                return False
            if self._flush() > backlog:  # a policy may have refused all that was queued
                await self._wait_progress(deadline)
        return True

    @guard_step
    def _flush(self) -> int:
        """Send what waits for lower tiers; returns the backlog."""
        assert self._assembled is not None
        plane = self._assembled.plane
        plane.flush(self._clock())
        self._carry_out(pumps=False)
        return plane.backlog

    async def reset(self) -> None:
        """New weights: everything stored before is unreachable in every tier when this returns, also after a crash.

        Raises ResourceError if a tier could not make the reset durable; in memory it holds all the same. For tiers that
        are held back it is made durable when they join.
        """
        durable = self._begin_reset()
        self._send_reset()  # after: no tier answers for the new epoch what it knows of the old one
        await durable

    def _begin_reset(self) -> asyncio.Future[None]:
        """New weights, in memory. What is returned is done once that is durable."""
        assembled = self._opened()
        if self._reset_failed:  # repeated for the same weights, it must not count: others may have come to that number
            assembled.plane.control.epoch = fresh_epoch(assembled.plane.control.epoch) - 1
            self._reset_failed = False
        epoch, began = self._reset_plane(), self._clock()
        control, joining = assembled.plane.control, assembled.joining
        if joining is not None and control.joining:
            return joining.reset(control.resets)
        down = [lower.position for lower in control.lowers if lower.spec.held_back]
        tiers = [queue.tier for position, queue in enumerate(assembled.dispatcher.queues) if position not in down]
        durable = reset_tiers(tiers, epoch)
        durable.add_done_callback(self._on_reset_end)
        durable.add_done_callback(partial(self._log.reset, epoch, began))
        return durable

    def _on_reset_end(self, ended: asyncio.Future[None]) -> None:
        self._reset_failed = self._reset_failed or ended.cancelled() or ended.exception() is not None

    @guard_step
    def _reset_plane(self) -> int:
        assert self._assembled is not None
        return self._assembled.plane.reset(self._clock())

    @guard_step
    def _send_reset(self) -> None:
        self._advance()

    # -- driving the control plane -------------------------------------------------------------------------------

    @guard_step
    def _deliver(self, batch: Sequence[Arrival]) -> None:
        assert self._assembled is not None
        plane = self._assembled.plane
        now = self._clock()
        answered: Sequence[OffloadKey] | None = ()
        for delivery in batch:
            plane.deliver(delivery, now)
            if type(delivery) is PresenceAnswers:
                answered = None if answered is None else (*answered, *delivery.query.keys)
            elif type(delivery) is not Delivery:
                answered = None
        self._carry_out()
        if answered is None or answered:
            self._answer_waits.wake(answered)
        if self._watch.due:
            self._watch.look(plane.control.lowers)

    def _advance(self) -> None:
        """Send what the plane decided, and wake the calls that wait for it."""
        self._carry_out(pumps=False)
        self._progress.set()
        self._answer_waits.wake(None)

    def _carry_out(self, pumps: bool = True) -> None:
        """Send what the plane decided, complete the jobs that ended, set the timer for the next deadline."""
        assert self._assembled is not None
        plane = self._assembled.plane
        if pumps:
            plane.pump(self._clock())
        decided = plane.collect()
        if decided.jobs:
            self._assembled.dispatcher.submit(decided.jobs)
        for query in decided.queries:
            self._lookups.begin(self._assembled.dispatcher.queues[query.position].tier, query, self._deliver)
        for result in decided.results:
            self._on_result(result)
        deadline = plane.next_deadline(self._clock())
        timer = self._timer
        if timer is not None and (deadline is None or deadline < timer.when()):
            timer.cancel()
            timer = self._timer = None
        if timer is None and deadline is not None:
            self._timer = self._loop.call_at(deadline, self._on_timer)
        if pumps:  # else two calls that wait for progress would wake each other without end
            self._progress.set()

    def _on_result(self, result: JobResult) -> None:
        """A job has ended. Part of a step."""
        if self._jobs.pop(result.job_id, None) is not None:
            future = self._waiting.pop(result.job_id)
            if not future.done():  # by the end of the stack
                future.set_result(result)

    @guard_step
    def _on_timer(self) -> None:
        self._timer = None
        self._carry_out()

    async def _wait_progress(self, deadline: float) -> None:
        self._progress.clear()
        try:
            async with asyncio.timeout_at(deadline):
                await self._progress.wait()
        except TimeoutError:
            return

    def _give_up(self, error: BaseException) -> None:
        assembled = self._assembled
        assert assembled is not None
        failed, dispatcher = assembled.plane, assembled.dispatcher
        assembled.plane = answers_of(failed, self._jobs, lambda: dispatcher.stopped and not dispatcher.copies())
        logger.critical("the control plane has failed: every request ends as a miss from now on", exc_info=error)
        dispatcher.stop()
        self._advance()
        failed.give_up()


async def _close_at_loop_end(reference: weakref.ref[TierStack]) -> AsyncGenerator[None, None]:
    """Close a stack that was left open when its loop ends: a loop closes its async generators last, after its tasks.

    The program's own calls are cancelled by then, so nothing is drained.
    """
    try:
        yield
    finally:
        stack = reference()
        if stack is not None:
            await stack._close_late()
