"""The tier stack for a synchronous engine: decisions on the engine's thread, I/O in a thread of the stack's own.

The engine's thread alone touches the control plane. Jobs go to the loop and outcomes come back in two queues that
`step` drains, once per engine step; no call but `open`, `close`, `reset` and `wait` waits for anything.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from kvtier.control.board import CPU_TIER, Emission
from kvtier.control.plane import ControlPlane, Question
from kvtier.control.reservations import Reservation
from kvtier.errors import IntegrityError, ResourceError, UsageError
from kvtier.events import OffloadingEvent
from kvtier.geometry import Geometry
from kvtier.jobs import GroupTransfer, JobKind, JobResult, TransferJob
from kvtier.keys import JobId, OffloadKey, RequestId
from kvtier.loadstore import LookupResult, Resettable
from kvtier.stack import closing
from kvtier.stack.assembly import Assembled, StackParts, ask, assemble
from kvtier.stack.bell import Bell
from kvtier.stack.checking import check_job
from kvtier.stack.closing import CloseReport
from kvtier.stack.dispatcher import Delivery, Told
from kvtier.stack.forking import OwnerProcess
from kvtier.stack.stats import StackStats, collect

T = TypeVar("T")

OPEN_SECONDS = 300.0
CLOSE_GRACE_SECONDS = 10.0


class EngineStack:
    """Use it as `with EngineStack(parts) as stack`, and call `step` once per engine step from one thread.

    In a child forked from the process that opened it every call raises UsageError, but `close`, which does nothing.
    """

    def __init__(self, parts: StackParts) -> None:
        self.close_report: CloseReport | None = None
        self._parts = parts
        self._assembled: Assembled | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._inbox: deque[Delivery | tuple[Question, Sequence[LookupResult]]] = deque()
        self._outbox: deque[tuple[Sequence[Emission], Sequence[Question]]] = deque()
        self._bell = Bell(self._take_out)
        self._asking: set[asyncio.Task[None]] = set()
        self._arrived = threading.Event()
        self._next_job = 1
        self._closed = False
        self._owner = OwnerProcess()
        self._at_exit: Callable[[], None] = partial(_close_at_exit, weakref.ref(self))

    def __del__(self) -> None:
        if self._assembled is not None and self.close_report is None and not self._owner.elsewhere:
            warnings.warn(f"unclosed {closing.UNCLOSED.format(self)}", ResourceWarning, stacklevel=1, source=self)

    # -- life ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self) -> None:
        """Start the stack's thread and open every tier. Raises as `TierStack.open` does, with nothing left behind."""
        self._owner.check()
        if self._thread is not None or self._closed:
            raise UsageError("a stack is opened once")
        self._owner.claim()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvtier-stack", daemon=True)
        self._thread.start()
        try:
            self._assembled = self._await(self._assemble(), OPEN_SECONDS)
        except TimeoutError as error:
            self._stop_loop()
            raise ResourceError(f"the stack did not open within {OPEN_SECONDS:g} s") from error
        except BaseException:
            self._stop_loop()
            raise
        atexit.register(self._at_exit)

    async def _assemble(self) -> Assembled:
        self._bell.hang()
        return await assemble(self._parts, time.monotonic, self._delivered)

    def close(self) -> CloseReport:
        """Drain lower tiers until the closing deadline, drop the rest, close every tier. Idempotent.

        Jobs that have not ended are cancelled or dropped; their GPU blocks are the engine's own again when this
        returns, unless the report counts unfinished jobs. In a forked child it does nothing.
        """
        return self._close(self._parts.settings.close_seconds)

    def _close(self, drain_seconds: float) -> CloseReport:
        if self._owner.elsewhere:
            return CloseReport(0, 0)
        if self._closed or self._assembled is None:
            self._closed = True
            return self.close_report or CloseReport(0, 0)
        self._closed = True
        atexit.unregister(self._at_exit)
        assembled = self._assembled
        try:
            self._drain(assembled, drain_seconds)
        finally:
            abandoned = closing.abandon(assembled)
            each = self._parts.settings.tier_close_seconds
            seconds = each * len(assembled.to_close) + CLOSE_GRACE_SECONDS
            try:
                self._await(closing.end_tiers(assembled, each), seconds)
            finally:
                self._turn()
                self.close_report = closing.report(assembled, abandoned)
                self._stop_loop()
        return self.close_report

    def _drain(self, assembled: Assembled, seconds: float) -> None:
        plane = assembled.plane
        deadline = time.monotonic() + seconds
        plane.close(time.monotonic())
        self._turn()
        while time.monotonic() < deadline and (not plane.idle or plane.owed):
            plane.drain(time.monotonic())
            self._send()
            if plane.idle:
                break
            self.wait(deadline - time.monotonic())
            self._turn()

    def _stop_loop(self) -> None:
        """End what is left in the loop, then the loop and its thread; a thread that hangs is left behind."""
        assert self._loop is not None
        assert self._thread is not None
        with contextlib.suppress(TimeoutError):
            self._await(_cancel_tasks(), CLOSE_GRACE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_GRACE_SECONDS)
        if not self._thread.is_alive():
            self._bell.take_down()
            self._loop.close()

    def _await(self, work: Coroutine[Any, Any, T], timeout_seconds: float) -> T:
        """Run a coroutine in the loop, after what was sent before, and wait for it; whatever ends the waiting early
        cancels it."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._take_out)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_seconds)
        finally:
            future.cancel()

    # -- moving blocks -------------------------------------------------------------------------------------------

    def job(self, kind: JobKind, groups: Sequence[GroupTransfer], timeout_seconds: float | None = None) -> TransferJob:
        """A job with a fresh id and a deadline from now; the stack's own default when no timeout is given."""
        self._plane()
        settings = self._parts.settings
        if timeout_seconds is None:
            timeout_seconds = settings.load_seconds if kind is JobKind.LOAD else settings.store_seconds
        job_id = JobId(self._next_job)
        self._next_job += 1
        return TransferJob(job_id, kind, tuple(groups), time.monotonic() + timeout_seconds)

    def submit(self, job: TransferJob, request_id: RequestId | None = None) -> None:
        """Begin a load or store; its result comes out of a later `step`. A load ends its request's leases.

        Raises UsageError for a job that contradicts the layout.
        """
        check_job(job, job.kind, self.geometry)
        self._plane().submit(job, time.monotonic(), request_id)

    def place(self, job: TransferJob, request_id: RequestId | None = None) -> TransferJob | None:
        """Begin a job whose copies the engine carries out itself, and say which rows: `slots` and `generations`.

        For stacks whose workers are `EngineCopies`. Blocks that cannot be copied at once are not copied at all: they
        end as cancelled (a store that found its rows taken, a load whose block is in no row). None if that is all of
        them. The job returned has an id of its own, for `EngineCopies.end`. Its group positions are the job's.
        """
        self.submit(job, request_id)
        copies = [emission.job for emission in self._send() if emission.position == CPU_TIER]
        if sum(copy.num_blocks for copy in copies) < job.num_blocks:
            self.cancel(job.job_id)
            self._send()
        if len(copies) > 1:
            raise IntegrityError(f"job {job.job_id} was begun in {len(copies)} parts")
        return copies[0] if copies else None

    def storable(self, keys: Sequence[OffloadKey]) -> tuple[list[OffloadKey], int]:
        """(the keys that are in no row and on their way into none, in their order; how many rows can be had now)."""
        cpu = self._plane().board.cpu
        return [key for key in dict.fromkeys(keys) if key not in cpu.directory], cpu.available

    def cancel(self, job_id: JobId) -> None:
        """End a job early; its result still comes, after the copies under way."""
        self._plane().cancel(job_id, time.monotonic())

    def step(self) -> list[JobResult]:
        """Once per engine step: take in what ended, send what was decided, return the engine's jobs that ended."""
        self._plane()
        return self._turn()

    def _turn(self) -> list[JobResult]:
        assert self._assembled is not None
        plane = self._assembled.plane
        self._arrived.clear()
        now = time.monotonic()
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, tuple):
                plane.answer(item[0], item[1], now)
            elif item.told is Told.FINISHED and item.result is not None:
                plane.finish(item.result, now)
            elif item.told is Told.LATE:
                plane.late(item.job_id, now)
            else:
                plane.ended(item.job_id, now)
        plane.pump(now)
        self._send()
        return plane.take_finished()

    def _send(self) -> Sequence[Emission]:
        """Send what was decided to the loop; returns the jobs."""
        assert self._assembled is not None
        jobs = self._assembled.plane.take_jobs()
        questions = self._assembled.plane.take_questions()
        if jobs or questions:
            self._outbox.append((jobs, questions))
            self._bell.ring()
        return jobs

    def _take_out(self) -> None:
        """In the loop's thread: begin what was sent, in its order."""
        while self._outbox:
            jobs, questions = self._outbox.popleft()
            assert self._assembled is not None
            if jobs:
                self._assembled.dispatcher.submit(jobs)
            for question in questions:
                task = asyncio.get_running_loop().create_task(self._ask(question))
                self._asking.add(task)
                task.add_done_callback(self._asking.discard)

    async def _ask(self, question: Question) -> None:
        assert self._assembled is not None
        answers = await ask(self._assembled, question)
        if answers is not None:
            self._inbox.append((question, answers))
            self._arrived.set()

    def _delivered(self, batch: list[Delivery]) -> None:
        """In the loop's thread: a deque append is atomic, and the engine's thread drains it."""
        self._inbox.extend(batch)
        self._arrived.set()

    def wait(self, timeout_seconds: float) -> bool:
        """For an engine with nothing else to do: wait until something arrived for `step`, or the time is over."""
        self._owner.check()
        return self._arrived.wait(max(0.0, timeout_seconds))

    @property
    def has_pending_work(self) -> bool:
        """True while an engine that idles should go on stepping: jobs are under way or waiting."""
        return not self._plane().idle

    # -- knowing and steering ------------------------------------------------------------------------------------

    @property
    def geometry(self) -> Geometry:
        """The layout in rows of the stack's alignment."""
        self._plane()
        assert self._assembled is not None
        return self._assembled.geometry

    def lookup(self, keys: Sequence[OffloadKey]) -> list[LookupResult]:
        """Presence of each key from memory; RETRY where a shared tier was just asked."""
        return self._plane().lookup(keys, time.monotonic())

    def locate(self, keys: Sequence[OffloadKey]) -> list[str | None]:
        """For each key the name of the highest tier that holds it, or None."""
        return self._plane().locate(keys, time.monotonic())

    def reserve(self, request_id: RequestId, keys: Sequence[OffloadKey]) -> Reservation:
        """Bring keys into rows and lease them to a request."""
        return self._plane().reserve(request_id, keys, time.monotonic())

    def reservation(self, request_id: RequestId) -> Reservation | None:
        """What a request asked for and got so far, in O(1)."""
        return self._plane().reservation(request_id)

    def end_request(self, request_id: RequestId) -> None:
        """The request's leases end."""
        self._plane().end_request(request_id, time.monotonic())

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """One request used these keys, given in prefix order."""
        self._plane().touch(keys)

    def reset(self, timeout_seconds: float = 30.0) -> None:
        """New weights: everything stored before is unreachable in every tier when this returns, also after a crash.

        Raises ResourceError if a tier could not make that durable in time; in memory it holds all the same.
        """
        epoch = self._plane().reset(time.monotonic())
        self._send()
        assert self._assembled is not None
        tiers = [lane.tier for lane in self._assembled.lanes]

        async def reset_tiers() -> None:
            await asyncio.gather(*(tier.reset(epoch) for tier in tiers if isinstance(tier, Resettable)))

        try:
            self._await(reset_tiers(), timeout_seconds)
        except TimeoutError as error:
            raise ResourceError(f"the reset was not made durable within {timeout_seconds} s") from error

    def stats(self) -> StackStats:
        """Figures of every tier since the stack opened; also after it closed."""
        self._owner.check()
        if self._assembled is None:
            raise UsageError("the stack was never opened")
        return collect(self._assembled, time.monotonic())

    def take_events(self) -> list[OffloadingEvent]:
        """What became reachable or ceased to be since the last call, in order."""
        return self._plane().take_events()

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the state machine's sums agree."""
        self._owner.check()
        if self._assembled is not None:
            self._assembled.plane.check_integrity()

    def _plane(self) -> ControlPlane:
        self._owner.check()
        if self._assembled is None:
            raise UsageError("the stack is not open")
        if self._closed:
            raise UsageError("the stack is closed")
        return self._assembled.plane


async def _cancel_tasks() -> None:
    """Cancel what still runs in this loop and wait a moment for it."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=1.0)


def _close_at_exit(reference: weakref.ref[EngineStack]) -> None:
    """Close a stack that was left open when the interpreter ends, without draining.

    A thread that is caught moving bytes while the interpreter goes away can take the process down with an abort.
    """
    stack = reference()
    if stack is not None and stack.close_report is None:
        stack._close(0.0)
        warnings.warn(f"{stack!r} was closed by the end of the program; close it before", ResourceWarning, stacklevel=1)
