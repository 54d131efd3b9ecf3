"""The tier stack in an asyncio program: loads and stores GPU blocks wherever their bytes are."""

from __future__ import annotations

import asyncio
import warnings
import weakref
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Self

from kvtier.aio.shielded_wait import shielded_wait
from kvtier.control.flow.load_or_compute import answers
from kvtier.control.jobs import Arrival, Delivery, PresenceAnswers
from kvtier.errors import UsageError
from kvtier.stack import shutdown
from kvtier.stack.assembly import StackParts
from kvtier.stack.core import GRACE_SECONDS, BlockGroup, StackCore
from kvtier.stack.guard import guard_step
from kvtier.stack.open_stack import OpenStack
from kvtier.stack.request import StackRequest
from kvtier.tier.contract import LookupResult
from kvtier.types.checks import check_timeout, check_whole
from kvtier.types.jobs import JobKind, JobResult, TransferJob
from kvtier.types.keys import JobId, OffloadKey

if TYPE_CHECKING:
    from kvtier.stack.signals import ClosingSignals


class TierStack(StackCore):
    """Loads and stores GPU blocks through all tiers. Use it as `async with TierStack(parts) as stack`.

    A store returns when the CPU tier has the blocks; lower tiers follow behind. A load reports each block by itself:
    LOADED blocks hold exactly the bytes that were stored under their key. Cancelling either ends what has not begun
    and waits for the copies in flight, so GPU blocks are the caller's own again when the call has returned or raised.
    In a child forked from the process that opened it every call raises UsageError, but `close`, which does nothing.
    """

    def __init__(self, parts: StackParts) -> None:
        super().__init__(parts)
        self._waiting: dict[JobId, asyncio.Future[JobResult]] = {}
        self._progress: asyncio.Event = asyncio.Event()
        self._looking: dict[asyncio.Future[None], frozenset[OffloadKey]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None
        self._signals: ClosingSignals | None = None
        self._loop_end: AsyncGenerator[None, None] | None = None

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
        try:
            for _ in self._draining():
                await self._wait_progress(self._drain_until)
        finally:
            self._lookups.cancel()
            abandoned = self._abandon(assembled)
            await shutdown.end_tiers(assembled, self._settings.tier_close_seconds)
            self._report_closed(assembled, abandoned)
            if self._timer is not None:
                self._timer.cancel()
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(UsageError("the stack was closed before the job ended"))

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
        return await self.run(self._job_of(JobKind.STORE, keys, gpu_blocks, groups, timeout_seconds))

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
        return await self.run(self._job_of(JobKind.LOAD, keys, gpu_blocks, groups, timeout_seconds), request)

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

    @guard_step
    def _on_overdue(self, job_id: JobId) -> None:
        """The job ought to have ended. Look again later if it still has not."""
        if job_id in self._jobs:
            self._carry_out()
            self._look_for_overdue(self._clock())
            self._loop.call_later(GRACE_SECONDS, self._on_overdue, job_id)

    @guard_step
    def _cancel(self, job_id: JobId) -> None:
        """Also while the stack closes, which `cancel` refuses."""
        assert self._assembled is not None
        self._assembled.plane.cancel(job_id, self._clock())
        self._advance()

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
            await self._wait_answer(asked, deadline)
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
        make_durable = self._begin_reset()
        # before anything else is sent, so that no tier answers for the new epoch what it knows of the old one
        durable = make_durable()
        self._send_reset()
        await durable

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
            self._wake_lookups(answered)
        if self._watch.due:
            self._watch.look(plane.control.lowers)

    def _advance(self) -> None:
        """Send what the plane decided, and wake the calls that wait for it."""
        self._carry_out(pumps=False)
        self._progress.set()
        if self._looking:
            self._wake_lookups(None)

    def _carry_out(self, pumps: bool = True) -> None:
        """Send what the plane decided, complete the jobs that ended, set the timer for the next deadline."""
        assert self._assembled is not None
        plane = self._assembled.plane
        if pumps:
            plane.pump(self._clock())
        decided = plane.collect()
        if decided.jobs or decided.queries:
            self._start(decided.jobs, decided.queries)
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

    def _stop_dispatcher(self) -> None:
        assert self._assembled is not None
        self._assembled.dispatcher.stop()

    @guard_step
    def _on_timer(self) -> None:
        self._timer = None
        self._carry_out()

    def _wake_lookups(self, answered: Sequence[OffloadKey] | None) -> None:
        """Have the lookups look again that wait for one of these keys; all of them if None."""
        for future, keys in self._looking.items():
            if not future.done() and (answered is None or not keys.isdisjoint(answered)):
                future.set_result(None)

    async def _wait_answer(self, keys: frozenset[OffloadKey], deadline: float) -> None:
        """Wait until a shared tier has answered for one of these keys, at most until the deadline."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._looking[future] = keys
        try:
            async with asyncio.timeout_at(deadline):
                await future
        except TimeoutError:
            return
        finally:
            del self._looking[future]

    async def _wait_progress(self, deadline: float) -> None:
        self._progress.clear()
        try:
            async with asyncio.timeout_at(deadline):
                await self._progress.wait()
        except TimeoutError:
            return


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
