"""Runs the control plane's jobs on the backends, in one event loop: loads first, bounded bytes, deadlines, figures.

A job that passes its deadline before it started is reported late and ended, and never runs. One that is in flight is
reported late once, runs on, and is reported again when it has really ended: cancelling never stops I/O.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from kvtier.control.jobs import Delivery, DeliveryKind, TierJob
from kvtier.control.tiers.histogram import Histogram, HistogramFigures
from kvtier.errors import IntegrityError
from kvtier.stack.guard import Guarded, guard_step
from kvtier.tier.contract import AnswersLookups, Clock, LoadStore, LookupResult
from kvtier.types.jobs import (
    CANCELLED,
    KEYS_OF,
    PRESENT,
    DropReason,
    JobKind,
    JobResult,
    RowGroup,
    TransferJob,
    dropped,
    failed,
)
from kvtier.types.keys import JobId, OffloadKey
from kvtier.types.values import job_value

logger = logging.getLogger(__name__)

RESOLUTION_SECONDS = 1e-6
"""A timer may fire this much before its time."""


QUEUED, IN_FLIGHT = "queued", "in_flight"
"""Where a job was when its deadline passed."""


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Transfers of a tier in one direction: of the CPU tier copies to and from the GPU, of a lower tier promotions
    (`load`) or demotions (`store`).

    `took_seconds` is from a job's beginning to its end, `waited_seconds` from its arrival in the tier's queue to its
    beginning; both count jobs. Bytes are those of the rows that the jobs name. `deadlines_missed` counts jobs by where
    they were then: `queued`, and then they never began, or `in_flight`. `oldest_seconds` is how long the oldest job in
    flight has been so, 0 without one. It grows while I/O hangs, also after the job's deadline. `largest_queued_bytes`
    are those of the largest job that waits.
    """

    took_seconds: HistogramFigures
    waited_seconds: HistogramFigures
    in_flight_bytes: int
    queued_bytes: int
    deadlines_missed: dict[str, int]
    oldest_seconds: float = 0.0
    largest_queued_bytes: int = 0


@job_value
class QueuedJob:
    """A job that waits for its tier since a time; `size` are the bytes of the rows that it names."""

    job: TransferJob
    size: int
    since: float


@dataclass(slots=True)
class Traffic:
    """Transfers of a kind on a tier. One thread counts, any may read figures. Its queue adds to `queued_bytes`.

    `busy_seconds` are those in which at least one was in flight, before the one that is since `busy_since`.
    """

    busy_since: float = 0.0
    busy_seconds: float = 0.0
    in_flight_bytes: int = 0
    queued_bytes: int = 0
    took: Histogram = field(default_factory=Histogram)
    waited: Histogram = field(default_factory=Histogram)
    late_queued: int = 0
    late_in_flight: int = 0
    _begun: dict[Hashable, float] = field(default_factory=dict)

    def unqueue(self, queued: QueuedJob, late: bool = False) -> None:
        """A job waits no more and does not begin, perhaps because it is late."""
        self.queued_bytes -= queued.size
        self.late_queued += late

    def begin(self, transfer: Hashable, size: int, now: float, since: float | None = None) -> None:
        """A transfer of so many bytes is in flight: a job that waited since a time, or what waits for nothing."""
        if since is not None:
            self.waited.observe(now - since)
            self.queued_bytes -= size
        self.in_flight_bytes += size
        if not self._begun:
            self.busy_since = now
        self._begun[transfer] = now

    def end(self, transfer: Hashable, size: int, now: float) -> float:
        """A transfer that was in flight has ended, late or not. Returns when it had begun."""
        began = self._begun.pop(transfer)
        self.took.observe(now - began)
        self.in_flight_bytes -= size
        if not self._begun:
            self.busy_seconds += now - self.busy_since
        return began

    def on_late(self, job_id: JobId) -> None:
        """The deadline of a job in flight has passed, of this kind or another one."""
        self.late_in_flight += job_id in self._begun

    def seconds(self, now: float) -> float:
        """Busy seconds up to now. From any thread: the one in flight may have begun after `now` was read."""
        return self.busy_seconds + (max(0.0, now - self.busy_since) if self._begun else 0.0)

    def oldest_seconds(self, now: float) -> float:
        """The age of the oldest job in flight. From any thread: `list` of a dict is one step."""
        begun = list(self._begun.values())
        return max(0.0, now - begun[0]) if begun else 0.0


@dataclass(slots=True)
class TierQueue:
    """Queues of one tier: its waiting jobs, each kind in the order of its deadlines, and what is in flight.

    `running` are the jobs in flight, late ones included; `deadlines` are those of the jobs that are not late yet.
    `alarm_at` is when the dispatcher next looks for passed deadlines, at the latest. `look_up_first` is what the tier's
    `Opened` has as `look_up_before_store`.
    """

    tier: LoadStore
    inflight_bytes_max: int
    loads: deque[QueuedJob] = field(default_factory=deque)
    stores: deque[QueuedJob] = field(default_factory=deque)
    inflight_bytes: int = 0
    running: dict[JobId, asyncio.Future[JobResult]] = field(default_factory=dict)
    deadlines: dict[JobId, float] = field(default_factory=dict)
    alarm: asyncio.TimerHandle | None = None
    alarm_at: float = math.inf
    traffic: dict[JobKind, Traffic] = field(default_factory=lambda: {kind: Traffic() for kind in JobKind})
    look_up_first: bool = False

    def waiting(self, kind: JobKind) -> deque[QueuedJob]:
        """The waiting jobs of a kind."""
        return self.loads if kind is JobKind.LOAD else self.stores

    def figures(self, kind: JobKind, now: float) -> TransferStats:
        """The figures of a kind. From any thread: the copy of a deque is one step of the interpreter."""
        traffic, waiting = self.traffic[kind], list(self.waiting(kind))
        return TransferStats(
            traffic.took.figures(),
            traffic.waited.figures(),
            traffic.in_flight_bytes,
            traffic.queued_bytes,
            {QUEUED: traffic.late_queued, IN_FLIGHT: traffic.late_in_flight},
            traffic.oldest_seconds(now),
            max((each.size for each in waiting), default=0),
        )


if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

SCOPE = "kvtier"
NANOSECONDS = 1_000_000_000


class JobSpans:
    """Makes the span of a job that has ended, from its place in the queue on: a trace of its own, because a job may
    serve many requests or none.

    Needs `pip install 'kvtier[otel]'`. A job in flight costs nothing more, and the engine's thread makes no span. None
    has a key, a request or a tenant.
    """

    def __init__(self, tracer: Tracer, clock: Clock) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, Status, StatusCode

        self._tracer = tracer
        self._root = Context()
        self._kind = SpanKind.CLIENT
        self._error = Status(StatusCode.ERROR)
        self._zero = time.time_ns() - int(clock() * NANOSECONDS)

    def record(self, tier: str, queued: QueuedJob, began: float, now: float, result: JobResult) -> None:
        """A job that was in flight has ended, in time or late."""
        job = queued.job
        outcomes = Counter(outcome.status.value for group in result.outcomes for outcome in group)
        span = self._tracer.start_span(
            f"{SCOPE} {job.kind.value} {tier}",
            self._root,
            self._kind,
            {
                "kvtier.tier": tier,
                "kvtier.direction": job.kind.value,
                "kvtier.row_bytes": queued.size,
                "kvtier.waited_seconds": began - queued.since,
                **{f"kvtier.{status}_blocks": count for status, count in outcomes.items()},
            },
            start_time=self._zero + int(queued.since * NANOSECONDS),
        )
        if not result.ok:
            span.set_status(self._error)
        span.end(self._zero + int(now * NANOSECONDS))


class Dispatcher(Guarded):
    """Feeds jobs to tiers. `deliver` is called in the loop with a batch of deliveries, at most once a turn.

    `job_bytes` gives the bytes of rows that a job takes. The clock is that of the loop, `time.monotonic`. A step of its
    own that raised is delivered as FAILED: nothing is begun any more, and what is in flight ends. `errors` counts these
    steps, the calls of tiers that raised and the spans that could not be made. With `spans` each job that was begun
    has one.
    """

    def __init__(
        self,
        queues: Sequence[TierQueue],
        job_bytes: Callable[[TransferJob], int],
        clock: Clock,
        deliver: Callable[[list[Delivery]], None],
        spans: JobSpans | None = None,
    ) -> None:
        self.queues = queues
        self._spans = spans
        self._job_bytes = job_bytes
        self._clock = clock
        self._deliver = deliver
        self._late: set[JobId] = set()
        self._batch: list[Delivery] = []
        self._stopped = False

    @guard_step
    def submit(self, emissions: Sequence[TierJob]) -> None:
        """Queue jobs and start what the bounds allow; once stopped, jobs end as dropped. Call in the loop."""
        if self._failed:
            return
        now = self._clock()
        for emission in emissions:
            queue, job = self.queues[emission.position], emission.job
            queued = QueuedJob(job, self._job_bytes(job), now)
            (queue.loads if job.kind is JobKind.LOAD else queue.stores).append(queued)
            queue.traffic[job.kind].queued_bytes += queued.size
            if job.deadline is not None and job.deadline < queue.alarm_at:
                self._set_alarm(queue, job.deadline)
        for queue in self.queues:
            if queue.loads or queue.stores:
                self._start(queue)

    @guard_step
    def stop(self) -> None:
        """Start no further job: those that wait, and those that are still submitted, end as dropped(closing)."""
        self._stopped = True
        if not self._failed:
            for queue in self.queues:
                self._start(queue)

    def detach(self) -> None:
        """Deliver nothing any more, unless something is to come: so the dispatcher does not keep its stack alive."""
        if not (self.running or self._batch):
            self._deliver = _discard

    @property
    def errors(self) -> int:
        """Steps, calls of tiers and spans that raised."""
        return self._errors

    @property
    def running(self) -> int:
        """Jobs in flight on backends, late ones included."""
        return sum(len(queue.running) for queue in self.queues)

    @property
    def stopped(self) -> bool:
        """True once no further job begins. From any thread."""
        return self._stopped

    def copies(self) -> set[JobId]:
        """The jobs of the first tier that have not ended: copies of GPU blocks, late ones left out. From any thread."""
        running = list(self.queues[0].running.items())
        return {job_id for job_id, ended in running if job_id not in self._late and not ended.done()}

    def _start(self, queue: TierQueue) -> None:
        """Start waiting jobs, loads first, as far as the bound on bytes in flight allows."""
        if self._stopped:
            self._drop_waiting(queue)
        now = self._clock()
        while jobs := queue.loads or queue.stores:
            queued = jobs[0]
            deadline = queued.job.deadline
            if deadline is not None and now >= deadline:
                self._expire(queue, jobs, now)
                continue
            if queue.inflight_bytes and queue.inflight_bytes + queued.size > queue.inflight_bytes_max:
                return
            jobs.popleft()
            self._begin(queue, queued, now)

    def _begin(self, queue: TierQueue, queued: QueuedJob, now: float) -> None:
        job = queued.job
        queue.inflight_bytes += queued.size
        queue.traffic[job.kind].begin(job.job_id, queued.size, now, queued.since)
        if job.deadline is not None:
            queue.deadlines[job.job_id] = job.deadline
        tier = queue.tier
        ended: asyncio.Future[JobResult]
        try:
            if job.kind is JobKind.LOAD:
                work = tier.load(job)
            else:
                work = store_absent(tier, job) if queue.look_up_first else tier.store(job)
            ended = asyncio.ensure_future(work)
        except Exception as error:  # a tier may be anyone's, and its call no coroutine
            ended = asyncio.get_running_loop().create_future()
            ended.set_exception(error)
        queue.running[job.job_id] = ended
        ended.add_done_callback(partial(self._conclude, queue, queued))

    def _drop_waiting(self, queue: TierQueue) -> None:
        for jobs in (queue.loads, queue.stores):
            while jobs:
                queued = jobs.popleft()
                job = queued.job
                queue.traffic[job.kind].unqueue(queued)
                result = JobResult.uniform(job, dropped(DropReason.CLOSING))
                self._report(Delivery(DeliveryKind.FINISHED, job.job_id, result))
        if not self.running and queue.alarm is not None:
            queue.alarm.cancel()

    @guard_step
    def _conclude(self, queue: TierQueue, queued: QueuedJob, ended: asyncio.Future[JobResult]) -> None:
        """Report a job that has ended.

        A task is cancelled only when its loop ends. Then the job is reported as cancelled and no other begins. Its
        I/O is over also then, because a backend delays cancellation until its I/O has ended.
        """
        job = queued.job
        if queue.running.pop(job.job_id, None) is None or self._failed:
            return
        now = self._clock()
        began = queue.traffic[job.kind].end(job.job_id, queued.size, now)
        queue.inflight_bytes -= queued.size
        queue.deadlines.pop(job.job_id, None)
        if ended.cancelled():
            self._stopped = True
            result = JobResult.uniform(job, CANCELLED)
        elif (error := ended.exception()) is not None:
            result = self._failure(queue, job, error)
        else:
            result = ended.result()
            if not result.fits(job):
                error = IntegrityError("the result does not have one outcome for each block")
                result = self._failure(queue, job, error)
        if self._spans is not None:
            self._trace(queue, queued, (began, now), result)
        if job.job_id in self._late:
            self._late.remove(job.job_id)
            self._report(Delivery(DeliveryKind.ENDED, job.job_id))
        else:
            self._report(Delivery(DeliveryKind.FINISHED, job.job_id, result))
        if queue.loads or queue.stores or self._stopped:
            self._start(queue)

    def _failure(self, queue: TierQueue, job: TransferJob, error: BaseException) -> JobResult:
        """A backend must not raise for an I/O error. Whatever it raised, its blocks failed and the stack goes on."""
        logger.error("tier %s raised in a %s job", type(queue.tier).__name__, job.kind, exc_info=error)
        self._errors += 1
        return JobResult.uniform(job, failed(errno.EIO))

    def _trace(self, queue: TierQueue, queued: QueuedJob, times: tuple[float, float], result: JobResult) -> None:
        """Make the span of a job. Whatever the provider of traces raises costs the job nothing."""
        assert self._spans is not None
        try:
            self._spans.record(queue.tier.options.label, queued, *times, result)
        except Exception:
            self._errors += 1
            logger.exception("the span of a job could not be made")

    # -- deadlines -----------------------------------------------------------------------------------------------

    def _set_alarm(self, queue: TierQueue, deadline: float) -> None:
        """Look for passed deadlines then. The timer does not keep a stack alive that its program forgot."""
        if queue.alarm is not None:
            queue.alarm.cancel()
        queue.alarm_at = deadline
        delay = max(0.0, deadline - self._clock())
        loop = asyncio.get_running_loop()
        queue.alarm = loop.call_later(delay, _look_for_deadlines, weakref.ref(self), queue)

    @guard_step
    def _on_alarm(self, queue: TierQueue) -> None:
        if self._failed:
            return
        now = self._clock() + RESOLUTION_SECONDS
        queue.alarm, queue.alarm_at = None, math.inf
        for job_id in [job_id for job_id, deadline in queue.deadlines.items() if now >= deadline]:
            del queue.deadlines[job_id]
            self._late.add(job_id)
            for traffic in queue.traffic.values():
                traffic.on_late(job_id)
            self._report(Delivery(DeliveryKind.LATE, job_id))
        for jobs in (queue.loads, queue.stores):
            self._expire(queue, jobs, now)
        self._start(queue)
        waiting = [jobs[0].job.deadline for jobs in (queue.loads, queue.stores) if jobs]
        ahead = [deadline for deadline in (*queue.deadlines.values(), *waiting) if deadline is not None]
        if ahead:
            self._set_alarm(queue, min(ahead))

    def _expire(self, queue: TierQueue, jobs: deque[QueuedJob], now: float) -> None:
        """Report the jobs in front that passed their deadline before they began: late, and ended."""
        while jobs and (deadline := jobs[0].job.deadline) is not None and now >= deadline:
            queued = jobs.popleft()
            job = queued.job
            queue.traffic[job.kind].unqueue(queued, late=True)
            self._report(Delivery(DeliveryKind.LATE, job.job_id))
            self._report(Delivery(DeliveryKind.ENDED, job.job_id))

    # -- deliveries ----------------------------------------------------------------------------------------------

    def _report(self, delivery: Delivery) -> None:
        if not self._batch:
            asyncio.get_running_loop().call_soon(self._flush)
        self._batch.append(delivery)

    def _flush(self) -> None:
        batch, self._batch = self._batch, []
        self._deliver(batch)

    def _give_up(self, error: BaseException) -> None:
        self._stopped = True
        logger.critical("the queues of the tiers are damaged: nothing is begun any more", exc_info=error)
        self._deliver([Delivery(DeliveryKind.FAILED, JobId(0))])


def bytes_by_rows(row_bytes: int) -> Callable[[TransferJob], int]:
    """Make the measure of jobs in which each block takes a row."""
    return lambda job: sum(map(len, map(KEYS_OF, job.groups))) * row_bytes


def _look_for_deadlines(dispatcher: weakref.ref[Dispatcher], queue: TierQueue) -> None:
    if (alive := dispatcher()) is not None:
        alive._on_alarm(queue)


def _discard(batch: list[Delivery]) -> None:
    """Take deliveries of a closed stack, and do nothing."""


async def store_absent(tier: LoadStore, job: TransferJob) -> JobResult:
    """Store the blocks of a job that a shared tier does not hold; those that it holds are PRESENT.

    It takes one lookup for the whole job, where that costs less than writing what another host has stored.
    Where the lookup says nothing, as when a server does not answer, everything is stored.
    """
    held = await _held(tier, job)
    if not held:
        return await tier.store(job)
    groups = [_without(group, held) for group in job.row_groups]
    rest = replace(job, groups=tuple(group for group in groups if group.keys))
    stored = await tier.store(rest) if rest.groups else JobResult(job.job_id, ())
    if not stored.fits(rest):
        raise IntegrityError("the result does not have one outcome for each block")
    each = chain.from_iterable(stored.outcomes)
    outcomes = [tuple([PRESENT if key in held else next(each) for key in group.keys]) for group in job.row_groups]
    return JobResult(job.job_id, tuple(outcomes), stored.bytes_moved, stored.seconds)


async def presence_in(tier: LoadStore, keys: Sequence[OffloadKey]) -> Sequence[LookupResult] | None:
    """A shared tier's answer for each key; None, and a line in the log, if there is none: a tier may be anyone's."""
    assert isinstance(tier, AnswersLookups)
    try:
        answers = await tier.lookup(keys)
    except Exception:
        logger.exception("tier %s could not answer a lookup", tier.options.label)
        return None
    if len(answers) != len(keys):
        logger.error("tier %s answered %d of %d keys", tier.options.label, len(answers), len(keys))
        return None
    return answers


async def _held(tier: LoadStore, job: TransferJob) -> set[OffloadKey]:
    """The keys of the job that the tier has."""
    keys = [key for group in job.groups for key in group.keys]
    answers = await presence_in(tier, keys) or ()
    return {key for key, answer in zip(keys, answers, strict=False) if answer is LookupResult.HIT}


def _without(group: RowGroup, held: Collection[OffloadKey]) -> RowGroup:
    """A group of a shared tier's job, without the keys that are there."""
    left = [(key, row) for key, row in zip(group.keys, group.rows, strict=True) if key not in held]
    return RowGroup(group.group, tuple(key for key, _ in left), [row for _, row in left])
