"""Runs the control plane's jobs on the backends, in one event loop: loads first, bounded bytes, deadlines.

A job that passes its deadline before it started is reported late and ended, and never runs. One that is in flight is
reported late once, runs on, and is reported again when it has really ended: cancelling never stops I/O.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvtier.control.deliveries import Delivery, DeliveryKind
from kvtier.control.state import Emission
from kvtier.errors import IntegrityError
from kvtier.tier_api.contract import Clock, LoadStore
from kvtier.types.jobs import CANCELLED, DropReason, JobKind, JobResult, TransferJob, dropped, failed
from kvtier.types.keys import JobId

logger = logging.getLogger(__name__)

RESOLUTION_SECONDS = 1e-6
"""A timer may fire this much before its time."""


@dataclass(slots=True)
class Traffic:
    """Seconds in which at least one job of a kind was in flight on a tier."""

    running: int = 0
    since: float = 0.0
    busy_seconds: float = 0.0

    def begin(self, now: float) -> None:
        if not self.running:
            self.since = now
        self.running += 1

    def end(self, now: float) -> None:
        self.running -= 1
        if not self.running:
            self.busy_seconds += now - self.since

    def seconds(self, now: float) -> float:
        """Busy seconds up to now."""
        return self.busy_seconds + (now - self.since if self.running else 0.0)


@dataclass(slots=True)
class TierQueue:
    """One tier's waiting jobs, each kind in the order of its deadlines, and what is in flight.

    `deadlines` are those of running jobs that are not late yet. `alarm_at` is when the dispatcher next looks for passed
    deadlines, at the latest.
    """

    tier: LoadStore
    inflight_bytes_max: int
    loads: deque[TransferJob] = field(default_factory=deque)
    stores: deque[TransferJob] = field(default_factory=deque)
    inflight_bytes: int = 0
    deadlines: dict[JobId, float] = field(default_factory=dict)
    alarm: asyncio.TimerHandle | None = None
    alarm_at: float = math.inf
    traffic: dict[JobKind, Traffic] = field(default_factory=lambda: {kind: Traffic() for kind in JobKind})


class Dispatcher:
    """Feeds jobs to tiers. `deliver` is called in the loop with a batch of deliveries, at most once a turn.

    The clock is that of the loop, `time.monotonic`.
    """

    def __init__(
        self, queues: Sequence[TierQueue], block_bytes: int, clock: Clock, deliver: Callable[[list[Delivery]], None]
    ) -> None:
        self.queues = queues
        self.errors = 0
        self._block_bytes = block_bytes
        self._clock = clock
        self._deliver = deliver
        self._tasks: dict[JobId, asyncio.Task[JobResult]] = {}
        self._late: set[JobId] = set()
        self._batch: list[Delivery] = []
        self._stopped = False

    def submit(self, emissions: Sequence[Emission]) -> None:
        """Queue jobs and start what the bounds allow; once stopped, jobs end as dropped. Call in the loop."""
        for emission in emissions:
            queue, job = self.queues[emission.position], emission.job
            (queue.loads if job.kind is JobKind.LOAD else queue.stores).append(job)
            if job.deadline is not None and job.deadline < queue.alarm_at:
                self._set_alarm(queue, job.deadline)
        for queue in self.queues:
            if queue.loads or queue.stores:
                self._start(queue)

    def stop(self) -> None:
        """Start no further job: those that wait, and those that are still submitted, end as dropped(closing)."""
        self._stopped = True
        for queue in self.queues:
            self._start(queue)

    def detach(self) -> None:
        """Deliver nothing any more, unless something is to come: so the dispatcher does not keep its stack alive."""
        if not (self._tasks or self._batch):
            self._deliver = _discard

    @property
    def running(self) -> int:
        """Jobs in flight on backends, late ones included."""
        return len(self._tasks)

    def _start(self, queue: TierQueue) -> None:
        """Start waiting jobs, loads first, as far as the bound on bytes in flight allows."""
        if self._stopped:
            self._drop_waiting(queue)
        now = self._clock()
        while jobs := queue.loads or queue.stores:
            job = jobs[0]
            if job.deadline is not None and now >= job.deadline:
                self._expire(jobs, now)
                continue
            size = job.num_blocks * self._block_bytes
            if queue.inflight_bytes and queue.inflight_bytes + size > queue.inflight_bytes_max:
                return
            jobs.popleft()
            self._begin(queue, job, size, now)

    def _begin(self, queue: TierQueue, job: TransferJob, size: int, now: float) -> None:
        queue.inflight_bytes += size
        queue.traffic[job.kind].begin(now)
        if job.deadline is not None:
            queue.deadlines[job.job_id] = job.deadline
        tier = queue.tier
        task = asyncio.ensure_future(tier.load(job) if job.kind is JobKind.LOAD else tier.store(job))
        self._tasks[job.job_id] = task
        task.add_done_callback(partial(self._conclude, queue, job, size))

    def _drop_waiting(self, queue: TierQueue) -> None:
        for jobs in (queue.loads, queue.stores):
            while jobs:
                job = jobs.popleft()
                result = JobResult.uniform(job, dropped(DropReason.CLOSING))
                self._report(Delivery(DeliveryKind.FINISHED, job.job_id, result))
        if not self._tasks and queue.alarm is not None:
            queue.alarm.cancel()

    def _conclude(self, queue: TierQueue, job: TransferJob, size: int, task: asyncio.Task[JobResult]) -> None:
        """Report a job that has ended.

        A task is cancelled only when its loop ends. Then the job is reported as cancelled and no other begins. Its
        I/O is over also then, because a backend delays cancellation until its I/O has ended.
        """
        queue.traffic[job.kind].end(self._clock())
        queue.inflight_bytes -= size
        queue.deadlines.pop(job.job_id, None)
        del self._tasks[job.job_id]
        if task.cancelled():
            self._stopped = True
            result = JobResult.uniform(job, CANCELLED)
        elif (error := task.exception()) is not None:
            result = self._failure(queue, job, error)
        else:
            result = task.result()
            if not result.fits(job):
                result = self._failure(
                    queue, job, IntegrityError("the result does not have one outcome for each block")
                )
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
        self.errors += 1
        return JobResult.uniform(job, failed(errno.EIO))

    # -- deadlines -----------------------------------------------------------------------------------------------

    def _set_alarm(self, queue: TierQueue, deadline: float) -> None:
        """Look for passed deadlines then. The timer does not keep a stack alive that its program forgot."""
        if queue.alarm is not None:
            queue.alarm.cancel()
        queue.alarm_at = deadline
        delay = max(0.0, deadline - self._clock())
        loop = asyncio.get_running_loop()
        queue.alarm = loop.call_later(delay, _look_for_deadlines, weakref.ref(self), queue)

    def _on_alarm(self, queue: TierQueue) -> None:
        now = self._clock() + RESOLUTION_SECONDS
        queue.alarm, queue.alarm_at = None, math.inf
        for job_id in [job_id for job_id, deadline in queue.deadlines.items() if now >= deadline]:
            del queue.deadlines[job_id]
            self._late.add(job_id)
            self._report(Delivery(DeliveryKind.LATE, job_id))
        for jobs in (queue.loads, queue.stores):
            self._expire(jobs, now)
        self._start(queue)
        waiting = [jobs[0].deadline for jobs in (queue.loads, queue.stores) if jobs]
        ahead = [deadline for deadline in (*queue.deadlines.values(), *waiting) if deadline is not None]
        if ahead:
            self._set_alarm(queue, min(ahead))

    def _expire(self, jobs: deque[TransferJob], now: float) -> None:
        """Report the jobs in front that passed their deadline before they began: late, and ended."""
        while jobs and (deadline := jobs[0].deadline) is not None and now >= deadline:
            job_id = jobs.popleft().job_id
            self._report(Delivery(DeliveryKind.LATE, job_id))
            self._report(Delivery(DeliveryKind.ENDED, job_id))

    # -- deliveries ----------------------------------------------------------------------------------------------

    def _report(self, delivery: Delivery) -> None:
        if not self._batch:
            asyncio.get_running_loop().call_soon(self._flush)
        self._batch.append(delivery)

    def _flush(self) -> None:
        batch, self._batch = self._batch, []
        self._deliver(batch)


def _look_for_deadlines(dispatcher: weakref.ref[Dispatcher], queue: TierQueue) -> None:
    alive = dispatcher()
    if alive is not None:
        alive._on_alarm(queue)


def _discard(batch: list[Delivery]) -> None:
    """What a closed stack does with deliveries."""
