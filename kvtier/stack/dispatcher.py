"""Runs the control plane's jobs on the backends, in one event loop: loads first, bounded bytes, deadlines.

A job that passes its deadline before it started is reported late and ended, and never runs. One that is under way is
reported late once, runs on, and is reported again when it has really ended: cancelling never stops I/O.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from kvtier.control.board import Emission
from kvtier.errors import IntegrityError
from kvtier.jobs import CANCELLED, DropReason, JobKind, JobResult, TransferJob, dropped, failed
from kvtier.keys import JobId
from kvtier.loadstore import Clock, LoadStore

logger = logging.getLogger(__name__)


class Told(StrEnum):
    """FINISHED: the result counts. LATE: the deadline passed, I/O goes on. ENDED: the I/O of a late job is over."""

    FINISHED = "finished"
    LATE = "late"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Delivery:
    """What is told about one job; `result` only with FINISHED."""

    told: Told
    job_id: JobId
    result: JobResult | None = None


@dataclass(slots=True)
class Traffic:
    """Seconds in which at least one job of a kind was under way on a tier."""

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
class Lane:
    """One tier's queues and what is under way on it."""

    tier: LoadStore
    inflight_bytes_max: int
    loads: deque[Emission] = field(default_factory=deque)
    stores: deque[Emission] = field(default_factory=deque)
    inflight_bytes: int = 0
    alarm: asyncio.TimerHandle | None = None
    traffic: dict[JobKind, Traffic] = field(default_factory=lambda: {kind: Traffic() for kind in JobKind})


class Dispatcher:
    """Feeds jobs to tiers. `deliver` is called in the loop with a batch of deliveries, at most once a turn."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        block_bytes: int,
        clock: Clock,
        deliver: Callable[[list[Delivery]], None],
    ) -> None:
        self.lanes = lanes
        self.errors = 0
        self._block_bytes = block_bytes
        self._clock = clock
        self._deliver = deliver
        self._tasks: dict[JobId, asyncio.Task[JobResult]] = {}
        self._late: dict[JobId, bool] = {}
        self._batch: list[Delivery] = []
        self._stopped = False

    def submit(self, emissions: Sequence[Emission]) -> None:
        """Queue jobs and start what the bounds allow; once stopped, jobs end as dropped. Call in the loop."""
        for emission in emissions:
            lane = self.lanes[emission.position]
            (lane.loads if emission.job.kind is JobKind.LOAD else lane.stores).append(emission)
        for lane in self.lanes:
            self._start(lane)

    def stop(self) -> None:
        """Start no further job: those that wait, and those that are still submitted, end as dropped(closing)."""
        self._stopped = True
        for lane in self.lanes:
            self._start(lane)

    @property
    def running(self) -> int:
        """Jobs under way on backends, late ones included."""
        return len(self._tasks)

    def _start(self, lane: Lane) -> None:
        if self._stopped:
            self._drop_waiting(lane)
        else:
            self._tell_expired(lane)
            self._start_waiting(lane)
        self._set_alarm(lane)

    def _start_waiting(self, lane: Lane) -> None:
        while lane.loads or lane.stores:
            queue = lane.loads or lane.stores
            size = queue[0].job.num_blocks * self._block_bytes
            if lane.inflight_bytes and lane.inflight_bytes + size > lane.inflight_bytes_max:
                return
            emission = queue.popleft()
            lane.inflight_bytes += size
            lane.traffic[emission.job.kind].begin(self._clock())
            task = asyncio.create_task(self._run(lane, emission.job))
            self._tasks[emission.job.job_id] = task
            task.add_done_callback(partial(self._conclude, lane, emission.job, size))

    def _tell_expired(self, lane: Lane) -> None:
        """Jobs of a lane are queued in the order of their deadlines, so the expired ones are in front."""
        now = self._clock()
        for queue in (lane.loads, lane.stores):
            while queue and (deadline := queue[0].job.deadline) is not None and now >= deadline:
                job_id = queue.popleft().job.job_id
                self._tell(Delivery(Told.LATE, job_id))
                self._tell(Delivery(Told.ENDED, job_id))

    def _drop_waiting(self, lane: Lane) -> None:
        for queue in (lane.loads, lane.stores):
            while queue:
                job = queue.popleft().job
                self._tell(Delivery(Told.FINISHED, job.job_id, JobResult.uniform(job, dropped(DropReason.CLOSING))))

    def _set_alarm(self, lane: Lane) -> None:
        """Wake up when the first waiting job of a lane passes its deadline, however stuck the running ones are."""
        if lane.alarm is not None:
            lane.alarm.cancel()
            lane.alarm = None
        deadlines = [q[0].job.deadline for q in (lane.loads, lane.stores) if q and q[0].job.deadline is not None]
        if deadlines:
            delay = max(0.0, min(deadlines) - self._clock())
            lane.alarm = asyncio.get_running_loop().call_later(delay, self._start, lane)

    async def _run(self, lane: Lane, job: TransferJob) -> JobResult:
        timer = None
        loop = asyncio.get_running_loop()
        if job.deadline is not None:
            timer = loop.call_later(max(0.0, job.deadline - self._clock()), self._pass_deadline, job.job_id)
        try:
            result = await (lane.tier.load(job) if job.kind is JobKind.LOAD else lane.tier.store(job))
            if [len(outcomes) for outcomes in result.outcomes] != [len(group.keys) for group in job.groups]:
                raise IntegrityError("the result does not have one outcome for each block")
        except Exception:
            # A backend must not raise for bad luck: whatever it was, the blocks failed and the stack goes on.
            logger.exception("tier %s raised in a %s job", type(lane.tier).__name__, job.kind)
            self.errors += 1
            result = JobResult.uniform(job, failed(errno.EIO))
        finally:
            if timer is not None:
                timer.cancel()
        return result

    def _conclude(self, lane: Lane, job: TransferJob, size: int, task: asyncio.Task[JobResult]) -> None:
        """A job has ended. Nobody cancels one but a loop that ends: then those who wait are told, and no other begins.

        Also then its I/O is over, for a backend outlasts cancellation.
        """
        lane.traffic[job.kind].end(self._clock())
        lane.inflight_bytes -= size
        del self._tasks[job.job_id]
        cut_short = task.cancelled() or task.exception() is not None
        self._stopped = self._stopped or cut_short
        if self._late.pop(job.job_id, False):
            self._tell(Delivery(Told.ENDED, job.job_id))
        else:
            result = JobResult.uniform(job, CANCELLED) if cut_short else task.result()
            self._tell(Delivery(Told.FINISHED, job.job_id, result))
        self._start(lane)

    def _pass_deadline(self, job_id: JobId) -> None:
        if job_id in self._tasks:
            self._late[job_id] = True
            self._tell(Delivery(Told.LATE, job_id))

    def _tell(self, delivery: Delivery) -> None:
        if not self._batch:
            asyncio.get_running_loop().call_soon(self._flush)
        self._batch.append(delivery)

    def _flush(self) -> None:
        batch, self._batch = self._batch, []
        self._deliver(batch)
