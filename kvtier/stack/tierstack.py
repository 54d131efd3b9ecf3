"""The tier stack in an asyncio program: itself a LoadStore for GPU blocks that do not care where their bytes live."""

from __future__ import annotations

import asyncio
import warnings
import weakref
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import ClassVar, Self

from kvtier.control.plane import ControlPlane, Question
from kvtier.control.reservations import Reservation
from kvtier.errors import UsageError
from kvtier.events import OffloadingEvent
from kvtier.geometry import Geometry
from kvtier.jobs import GroupTransfer, JobKind, JobResult, TransferJob
from kvtier.keys import JobId, Medium, OffloadKey, RequestId
from kvtier.loadstore import LoadStore, LookupResult, Opened, Ownership, Resettable, TierContext
from kvtier.options import TierOptions
from kvtier.stack import closing
from kvtier.stack.assembly import Assembled, StackParts, ask, assemble
from kvtier.stack.checking import check_job
from kvtier.stack.closing import CloseReport
from kvtier.stack.dispatcher import Delivery, Told
from kvtier.stack.forking import OwnerProcess
from kvtier.stack.signals import ClosingSignals
from kvtier.stack.stats import StackStats, collect


class TierStack(LoadStore):
    """Loads and stores GPU blocks through all tiers. Use it as `async with TierStack(parts) as stack`.

    A store returns when the CPU tier has the blocks; lower tiers follow behind. A load reports each block by itself:
    LOADED blocks hold exactly the bytes that were stored under their key. Cancelling either ends what has not begun
    and waits for the copies under way, so GPU blocks are the caller's own again when the call has returned or raised.
    In a child forked from the process that opened it every call raises UsageError, but `close`, which does nothing.
    """

    medium: ClassVar[Medium] = Medium("STACK")
    ownership: ClassVar[Ownership] = Ownership.SHARED
    Options: ClassVar[type[TierOptions]] = TierOptions

    def __init__(self, parts: StackParts) -> None:
        self.options = TierOptions(type="stack")
        self.close_report: CloseReport | None = None
        self._parts = parts
        self._assembled: Assembled | None = None
        self._waiting: dict[JobId, asyncio.Future[JobResult]] = {}
        self._progress: asyncio.Event = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._questions: set[asyncio.Task[None]] = set()
        self._next_job = 1
        self._closing = False
        self._ending: asyncio.Task[None] | None = None
        self._drain_until = 0.0
        self._owner = OwnerProcess()
        self._signals: ClosingSignals | None = None
        self._loop_end: AsyncGenerator[None, None] | None = None

    def __del__(self) -> None:
        if self._assembled is not None and self.close_report is None and not self._owner.elsewhere:
            warnings.warn(f"unclosed {closing.UNCLOSED.format(self)}", ResourceWarning, stacklevel=1, source=self)

    # -- life ----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self, context: TierContext | None = None) -> Opened:
        """Open every tier. Raises ResourceError or ConfigError with nothing left behind. `context` is not needed."""
        self._owner.check()
        if self._assembled is not None or self._closing:
            raise UsageError("a stack is opened once")
        self._loop = asyncio.get_running_loop()
        self._owner.claim()
        self._assembled = await assemble(self._parts, self._loop.time, self._delivered)
        self._loop_end = _close_at_loop_end(weakref.ref(self))
        await anext(self._loop_end)
        return Opened(sum(opened.capacity_bytes for opened in self._assembled.opened))

    async def close(self) -> None:
        """Drain lower tiers until the closing deadline, drop the rest, close every tier. Idempotent.

        What was dropped is in `close_report` and in the log. When cancelled it drains no longer, but still closes every
        tier before the cancellation goes on. In a forked child it does nothing.
        """
        try:
            await self._close(self._parts.settings.close_seconds)
        finally:
            if self._loop_end is not None:
                await self._loop_end.aclose()

    async def _close(self, drain_seconds: float) -> None:
        if self._assembled is None or self._owner.elsewhere:
            return
        if self._ending is None:
            self._closing = True
            self._drain_until = self._loop.time() + drain_seconds
            self._ending = self._loop.create_task(self._end(self._assembled), name="kvtier close")
        cancelled: asyncio.CancelledError | None = None
        while not self._ending.done():
            try:
                await asyncio.wait((self._ending,))
            except asyncio.CancelledError as error:
                cancelled = error
                self._drain_until = self._loop.time()
                self._progress.set()
        if self._signals is not None:
            self._signals.restore()
        if cancelled is not None:
            raise cancelled
        self._ending.result()

    def close_on(self, *numbers: int) -> None:
        """Close the stack when one of these signals arrives, such as SIGTERM; then the signal takes its former course.

        That is the default action, or the handler that was there before, which is put back first; also when the stack
        closes for another reason. A second signal does not wait for the closing. Raises UsageError for a signal that
        cannot be handled, and unless the stack's loop runs in the main thread, where Python handles signals.
        """
        self._open_plane()
        if self._signals is None:
            self._signals = ClosingSignals(self._loop, self.close)
        self._signals.install(numbers)

    async def _close_late(self) -> None:
        """Close without draining, and complain, unless it is being done or is no business of this process."""
        if self._ending is None and not self._owner.elsewhere:
            await self._close(0.0)
            warnings.warn(f"{self!r} was closed by the end of its loop; close it before", ResourceWarning, stacklevel=1)

    async def _end(self, assembled: Assembled) -> None:
        plane = assembled.plane
        plane.close(self._loop.time())
        self._turn()
        while self._loop.time() < self._drain_until and (not plane.idle or plane.owed):
            plane.drain(self._loop.time())
            self._turn()
            if plane.idle:
                break
            await self._wait_progress(self._drain_until)
        for task in list(self._questions):
            task.cancel()
        abandoned = closing.abandon(assembled)
        await closing.end_tiers(assembled, self._parts.settings.tier_close_seconds)
        self.close_report = closing.report(assembled, abandoned)
        if self._timer is not None:
            self._timer.cancel()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(UsageError("the stack was closed before the job ended"))

    # -- moving blocks -------------------------------------------------------------------------------------------

    def job(self, kind: JobKind, groups: Sequence[GroupTransfer], timeout_seconds: float | None = None) -> TransferJob:
        """A job with a fresh id and a deadline from now; the stack's own default when no timeout is given."""
        self._open_plane()
        settings = self._parts.settings
        if timeout_seconds is None:
            timeout_seconds = settings.load_seconds if kind is JobKind.LOAD else settings.store_seconds
        job_id = JobId(self._next_job)
        self._next_job += 1
        return TransferJob(job_id, kind, tuple(groups), self._loop.time() + timeout_seconds)

    async def store(self, job: TransferJob) -> JobResult:
        """Store GPU blocks. Raises UsageError for a job that contradicts the layout, never for bad luck."""
        return await self._run(job, JobKind.STORE)

    async def load(self, job: TransferJob, request_id: RequestId | None = None) -> JobResult:
        """Load into GPU blocks, through a bounded window of rows if the prefix is longer than the CPU tier.

        A load that names a request ends the request's leases once it holds the rows itself.
        """
        return await self._run(job, JobKind.LOAD, request_id)

    async def _run(self, job: TransferJob, kind: JobKind, request_id: RequestId | None = None) -> JobResult:
        plane = self._open_plane()
        check_job(job, kind, self.geometry)
        future: asyncio.Future[JobResult] = self._loop.create_future()
        plane.submit(job, self._loop.time(), request_id)
        self._waiting[job.job_id] = future
        self._turn()
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            plane.cancel(job.job_id, self._loop.time())
            self._turn()
            while not future.done():
                try:
                    await asyncio.wait((future,))
                except asyncio.CancelledError:
                    # Buffers are still in use: the first cancellation is passed on when they are not.
                    continue
            future.exception()  # seen here, if the stack was closed meanwhile; the cancellation goes first
            raise
        finally:
            self._waiting.pop(job.job_id, None)

    async def lookup(self, keys: Sequence[OffloadKey]) -> Sequence[LookupResult]:
        """Presence of each key. Waits for shared tiers' answers until the lookup deadline; RETRY then becomes MISS."""
        plane = self._open_plane()
        deadline = self._loop.time() + self._parts.settings.lookup_seconds
        results = plane.lookup(keys, self._loop.time())
        self._turn()
        while LookupResult.RETRY in results and self._loop.time() < deadline:
            await self._wait_progress(deadline)
            results = plane.lookup(keys, self._loop.time())
            self._send()
        return [LookupResult.MISS if result is LookupResult.RETRY else result for result in results]

    # -- knowing and steering ------------------------------------------------------------------------------------

    @property
    def geometry(self) -> Geometry:
        """The layout in rows of the stack's alignment."""
        self._open_plane()
        assert self._assembled is not None
        return self._assembled.geometry

    def locate(self, keys: Sequence[OffloadKey]) -> list[str | None]:
        """For each key the name of the highest tier that holds it, or None. Synchronous, from memory."""
        return self._open_plane().locate(keys, self._loop.time())

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """One request used these keys, given in prefix order; call it for the hits of a request after its stores."""
        self._open_plane().touch(keys)

    def reserve(self, request_id: RequestId, keys: Sequence[OffloadKey]) -> Reservation:
        """Bring keys into rows and lease them to a request; see `kvtier.control.reservations`."""
        reservation = self._open_plane().reserve(request_id, keys, self._loop.time())
        self._turn()
        return reservation

    def end_request(self, request_id: RequestId) -> None:
        """The request's leases end."""
        plane = self._open_plane()
        plane.end_request(request_id, self._loop.time())
        plane.pump(self._loop.time())
        self._turn()

    async def settle(self, timeout_seconds: float, backlog: int = 0) -> bool:
        """Wait until at most `backlog` blocks are on their way to lower tiers; False when the time ran out."""
        plane = self._open_plane()
        deadline = self._loop.time() + timeout_seconds
        while plane.backlog > backlog:
            if self._loop.time() >= deadline:
                return False
            await self._wait_progress(deadline)
        return True

    async def reset(self) -> None:
        """New weights: everything stored before is unreachable in every tier when this returns, also after a crash.

        Raises ResourceError if a tier could not make the reset durable; in memory it holds all the same.
        """
        epoch = self._open_plane().reset(self._loop.time())
        assert self._assembled is not None
        # before anything else is sent, so that no tier answers for the new epoch what it knows of the old one
        resets = asyncio.gather(
            *(lane.tier.reset(epoch) for lane in self._assembled.lanes if isinstance(lane.tier, Resettable))
        )
        self._turn()
        await resets

    def stats(self) -> StackStats:
        """Figures of every tier since the stack opened; also after it closed."""
        self._owner.check()
        if self._assembled is None:
            raise UsageError("the stack was never opened")
        return collect(self._assembled, self._loop.time())

    def take_events(self) -> list[OffloadingEvent]:
        """What became reachable or ceased to be since the last call, in order."""
        return self._open_plane().take_events()

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the state machine's sums agree. For tests and for the suspicious."""
        self._owner.check()
        if self._assembled is not None:
            self._assembled.plane.check_integrity()

    # -- the turning of the wheel --------------------------------------------------------------------------------

    def _open_plane(self) -> ControlPlane:
        self._owner.check()
        if self._assembled is None:
            raise UsageError("the stack is not open")
        if self._closing:
            raise UsageError("the stack is closed")
        return self._assembled.plane

    def _delivered(self, batch: list[Delivery]) -> None:
        assert self._assembled is not None
        plane = self._assembled.plane
        now = self._loop.time()
        for delivery in batch:
            if delivery.told is Told.FINISHED and delivery.result is not None:
                plane.finish(delivery.result, now)
            elif delivery.told is Told.LATE:
                plane.late(delivery.job_id, now)
            else:
                plane.ended(delivery.job_id, now)
        plane.pump(now)
        self._turn()

    def _turn(self) -> None:
        """Send what the plane decided, and let everybody who waits look again."""
        self._send()
        self._progress.set()

    def _send(self) -> None:
        """Send what the plane decided, resolve what has ended, set the alarm for the next deadline."""
        assert self._assembled is not None
        plane = self._assembled.plane
        jobs = plane.take_jobs()
        if jobs:
            self._assembled.dispatcher.submit(jobs)
        for question in plane.take_questions():
            task = self._loop.create_task(self._ask(question))
            self._questions.add(task)
            task.add_done_callback(self._questions.discard)
        for result in plane.take_finished():
            future = self._waiting.get(result.job_id)
            if future is not None and not future.done():
                future.set_result(result)
        self._set_alarm(plane.next_deadline(self._loop.time()))

    def _set_alarm(self, deadline: float | None) -> None:
        if self._timer is not None:
            if deadline is not None and self._timer.when() <= deadline and not self._timer.cancelled():
                return
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            self._timer = self._loop.call_at(deadline, self._alarm)

    def _alarm(self) -> None:
        self._timer = None
        if self._assembled is not None:
            self._assembled.plane.pump(self._loop.time())
            self._turn()

    async def _ask(self, question: Question) -> None:
        assert self._assembled is not None
        answers = await ask(self._assembled, question)
        if answers is not None:
            self._assembled.plane.answer(question, answers, self._loop.time())
            self._turn()

    async def _wait_progress(self, deadline: float) -> None:
        self._progress.clear()
        try:
            async with asyncio.timeout_at(deadline):
                await self._progress.wait()
        except TimeoutError:
            return


async def _close_at_loop_end(reference: weakref.ref[TierStack]) -> AsyncGenerator[None, None]:
    """Close a stack that was left open when its loop ends: a loop closes its async generators last, after its tasks.

    What the program had under way is cancelled by then, so nothing is drained.
    """
    try:
        yield
    finally:
        stack = reference()
        if stack is not None:
            await stack._close_late()
