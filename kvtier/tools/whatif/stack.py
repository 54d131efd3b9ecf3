"""A stack in virtual time: the control plane of a running stack over tiers that keep no bytes.

Both directions of a tier share its device. A job keeps it busy for its bytes; its latency comes on top and keeps
nothing busy. The queue is that of the stack's dispatcher: bounded bytes in flight, and a job past its deadline is late.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from selectors import SelectorKey, SelectSelector
from typing import Any

from kvtier.control.flow.load_or_compute import answers
from kvtier.control.jobs import Delivery, DeliveryKind, PresenceAnswers, PresenceQuery
from kvtier.control.plane.control_plane import ControlPlane
from kvtier.errors import IntegrityError
from kvtier.stack import StackSettings, TierStats
from kvtier.stack.dispatcher import RESOLUTION_SECONDS, QueuedJob, TierQueue
from kvtier.stack.watching.stats import lower_stats, tier_stats
from kvtier.tier.contract import LookupResult
from kvtier.tools.whatif.service import Service
from kvtier.types.geometry import Geometry
from kvtier.types.jobs import LOADED, MISSING, PRESENT, STORED, BlockOutcome, GPUGroup, JobKind, JobResult, TransferJob
from kvtier.types.keys import JobId, OffloadKey, RequestId
from kvtier.types.requests import NO_INFO, RequestInfo


class _Clock(SelectSelector):
    """The part of a loop that waits: time passes at once. `idle` is set where nothing is left to happen."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.idle: asyncio.Future[None] | None = None
        self.error: BaseException | None = None

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        error, self.error = self.error, None
        if error is not None:
            raise error
        if timeout is not None:
            self.now += timeout
        elif self.idle is not None:
            self.idle.set_result(None)
            self.idle = None
        else:
            raise IntegrityError("a simulation waits, and nothing is left to happen")
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose time begins at 0. What a callback raises ends the run."""

    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Raise the exception of a callback from the run."""
        self._clock.error = context.get("exception")

    async def idle(self) -> None:
        """Wait until nothing is left to happen."""
        self._clock.idle = self.create_future()
        await self._clock.idle


Deliver = Callable[[Delivery | PresenceAnswers], None]


class SharedStore:
    """The blocks of a shared tier, by its own LRU; without a capacity it holds everything."""

    def __init__(self, capacity_blocks: int | None) -> None:
        self._capacity_blocks = capacity_blocks
        self._held: OrderedDict[OffloadKey, None] = OrderedDict()

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._held

    def outcome(self, kind: JobKind, key: OffloadKey) -> BlockOutcome:
        """Load or store one block."""
        if key in self._held:
            self._held.move_to_end(key)
            return LOADED if kind is JobKind.LOAD else PRESENT
        if kind is JobKind.LOAD:
            return MISSING
        self._held[key] = None
        if self._capacity_blocks is not None and len(self._held) > self._capacity_blocks:
            self._held.popitem(last=False)
        return STORED


@dataclass(slots=True)
class Waits:
    """Shortages of a tier: jobs that waited before they began, their seconds, the most jobs that waited at once."""

    jobs: int = 0
    waited: int = 0
    seconds: float = 0.0
    longest_seconds: float = 0.0
    peak_jobs: int = 0
    late: int = 0

    def note(self, seconds: float) -> None:
        """Count a job that begins after this wait."""
        self.jobs += 1
        if seconds > 0:
            self.waited += 1
            self.seconds += seconds
            self.longest_seconds = max(self.longest_seconds, seconds)


class Device:
    """A tier in virtual time: `submit` queues jobs, `deliver` is called with their ends. `shared` for a shared tier."""

    def __init__(
        self,
        queue: TierQueue,
        service: Service,
        geometry: Geometry,
        loop: asyncio.AbstractEventLoop,
        shared: SharedStore | None = None,
    ) -> None:
        self.queue = queue
        self.service = service
        self.waits = Waits()
        self.shared = shared
        self.deliver: Deliver = lambda delivery: None
        self._geometry = geometry
        self._loop = loop
        self._free_at = 0.0
        self._waiting: dict[JobId, QueuedJob] = {}
        self._alarms: dict[JobId, asyncio.TimerHandle | None] = {}

    def submit(self, job: TransferJob) -> None:
        """Queue a job, and begin what the bound allows."""
        queued = QueuedJob(job, job.num_blocks * self._geometry.row_bytes, self._loop.time())
        self.queue.waiting(job.kind).append(queued)
        self.queue.traffic[job.kind].queued_bytes += queued.size
        self._waiting[job.job_id] = queued
        at = job.deadline
        self._alarms[job.job_id] = None if at is None else self._loop.call_at(at, self._on_deadline, job)
        self._start()

    def look_up(self, query: PresenceQuery) -> None:
        """Answer a lookup after the latency of a load."""
        assert self.shared is not None
        results = [LookupResult.HIT if key in self.shared else LookupResult.MISS for key in query.keys]
        at = self._loop.time() + self.service.load.latency_seconds
        self._loop.call_at(at, self.deliver, PresenceAnswers(query, results))

    def _start(self) -> None:
        queue, now = self.queue, self._loop.time()
        while jobs := queue.loads or queue.stores:
            queued = jobs[0]
            if queue.inflight_bytes and queue.inflight_bytes + queued.size > queue.inflight_bytes_max:
                break
            job = jobs.popleft().job
            del self._waiting[job.job_id]
            self.waits.note(now - queued.since)
            queue.inflight_bytes += queued.size
            queue.traffic[job.kind].begin(job.job_id, queued.size, now, queued.since)
            rate = self.service.of(job.kind)
            self._free_at = max(now, self._free_at) + self._payload_bytes(job) / rate.bytes_per_second
            self._loop.call_at(self._free_at + rate.latency_seconds, self._end, queued)
        self.waits.peak_jobs = max(self.waits.peak_jobs, len(queue.loads) + len(queue.stores))

    def _payload_bytes(self, job: TransferJob) -> int:
        sizes = self._geometry.kv_bytes_per_offloaded_block
        return sum(len(group.keys) * sizes(group.group) for group in job.groups)

    def _end(self, queued: QueuedJob) -> None:
        queue, job = self.queue, queued.job
        queue.inflight_bytes -= queued.size
        queue.traffic[job.kind].end(job.job_id, queued.size, self._loop.time())
        outcomes = tuple(self._outcomes(job.kind, group.keys) for group in job.groups)
        if job.job_id in self._alarms:
            if (alarm := self._alarms.pop(job.job_id)) is not None:
                alarm.cancel()
            moved = sum(outcome.ok for group in outcomes for outcome in group) and self._payload_bytes(job)
            self.deliver(Delivery(DeliveryKind.FINISHED, job.job_id, JobResult(job.job_id, outcomes, moved)))
        else:
            self.deliver(Delivery(DeliveryKind.ENDED, job.job_id))
        self._start()

    def _on_deadline(self, job: TransferJob) -> None:
        """The job is late; one that has not begun never will."""
        del self._alarms[job.job_id]
        self.waits.late += 1
        queued = self._waiting.pop(job.job_id, None)
        if queued is None:
            self.queue.traffic[job.kind].on_late(job.job_id)
            self.deliver(Delivery(DeliveryKind.LATE, job.job_id))
        else:
            self.queue.waiting(job.kind).remove(queued)
            self.queue.traffic[job.kind].unqueue(queued, late=True)
            self.deliver(Delivery(DeliveryKind.LATE, job.job_id))
            self.deliver(Delivery(DeliveryKind.ENDED, job.job_id))

    def _outcomes(self, kind: JobKind, keys: Sequence[OffloadKey]) -> tuple[BlockOutcome, ...]:
        if self.shared is not None:
            return tuple(self.shared.outcome(kind, key) for key in keys)
        return (LOADED if kind is JobKind.LOAD else STORED,) * len(keys)


class VirtualStack:
    """Has the calls of a `TierStack` that the serving loop of a replay needs (`kvtier.tools.replay.serve.ServedStack`).

    `devices` are those of the CPU tier and of the lower tiers, in the order of the control plane.
    """

    def __init__(
        self, plane: ControlPlane, devices: Sequence[Device], settings: StackSettings, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.plane = plane
        self.devices = devices
        self._settings = settings
        self._loop = loop
        self._next_job = 1
        self._ended: dict[JobId, asyncio.Future[JobResult]] = {}
        self._progress: asyncio.Future[None] | None = None
        self._timer_at: float | None = None
        for device in devices:
            device.deliver = self._deliver

    # -- what the serving loop calls -----------------------------------------------------------------------------

    async def lookup(self, keys: Sequence[OffloadKey]) -> Sequence[LookupResult]:
        """Presence of each key, as `TierStack.lookup` has it: waits for shared tiers' answers until the deadline, and
        what would be loaded later than computed is a miss."""
        deadline = self._loop.time() + self._settings.lookup_timeout_seconds
        results = self._look(keys)
        while LookupResult.RETRY in results and self._loop.time() < deadline:
            await self._wait_progress(deadline)
            results = self._look(keys)
        end = self.plane.choice.worth_loading(keys, self._loop.time())
        self._send()
        return answers(results, end)

    def _look(self, keys: Sequence[OffloadKey]) -> Sequence[LookupResult]:
        results = self.plane.lookup(keys, self._loop.time())
        self._send()
        return results

    def locate(self, keys: Sequence[OffloadKey]) -> list[str | None]:
        """For each key the name of the highest tier that holds it, or None."""
        return self.plane.locate(keys, self._loop.time())

    def request(
        self, request_id: RequestId, keys: Sequence[OffloadKey], *, info: RequestInfo | None, time: float | None
    ) -> VirtualRequest:
        """A request that uses these keys, in prefix order; `time` is that of policies that follow requests."""
        if self.plane.uses is not None:
            self.plane.uses.begin(request_id, keys, self._loop.time(), time, info or NO_INFO)
        return VirtualRequest(self, request_id)

    def job(self, kind: JobKind, groups: Sequence[GPUGroup]) -> TransferJob:
        """A job with a fresh id and the stack's own deadline for its kind."""
        seconds = self._settings.load_timeout_seconds if kind is JobKind.LOAD else self._settings.store_timeout_seconds
        job_id = JobId(self._next_job)
        self._next_job += 1
        return TransferJob(job_id, kind, tuple(groups), self._loop.time() + seconds)

    async def run(self, job: TransferJob) -> JobResult:
        """Load into GPU blocks, or store them; a store returns when the CPU tier has them."""
        ended: asyncio.Future[JobResult] = self._loop.create_future()
        self._ended[job.job_id] = ended
        self.plane.submit(job, self._loop.time())
        self._carry_out()
        return await ended

    async def drain(self, timeout_seconds: float, backlog: int = 0) -> bool:
        """Wait until at most `backlog` blocks are on their way to lower tiers; False when the time ran out."""
        deadline = self._loop.time() + timeout_seconds
        while self.plane.backlog > backlog:
            if self._loop.time() >= deadline:
                return False
            self.plane.flush(self._loop.time())
            self._send()
            if self.plane.backlog > backlog:
                await self._wait_progress(deadline)
        return True

    def stats(self) -> dict[str, TierStats]:
        """The figures of every tier from the CPU down, as a running stack has them."""
        control, now = self.plane.control, self._loop.time()
        queues = [dict.fromkeys(JobKind, device.queue) for device in self.devices]
        cpu = tier_stats(control.cpu_spec, control.cpu, control.cpu_counters, queues[0], now)
        lowers = zip(control.lowers, queues[1:], strict=True)
        return {control.cpu.name: cpu} | {lower.name: lower_stats(lower, queue, now) for lower, queue in lowers}

    # -- driving the control plane -------------------------------------------------------------------------------

    def _deliver(self, delivery: Delivery | PresenceAnswers) -> None:
        self.plane.deliver(delivery, self._loop.time())
        self._carry_out()

    def _carry_out(self) -> None:
        self.plane.pump(self._loop.time())
        self._send()
        if self._progress is not None:
            _wake(self._progress)
            self._progress = None

    def _send(self) -> None:
        """Begin what the plane decided, end the jobs that ended, and look again at its next deadline."""
        plane = self.plane
        decided = plane.collect()
        for emission in decided.jobs:
            self.devices[emission.position].submit(emission.job)
        for query in decided.queries:
            self.devices[query.position].look_up(query)
        for result in decided.results:
            self._ended.pop(result.job_id).set_result(result)
        deadline = plane.next_deadline(self._loop.time())
        if deadline is not None and (self._timer_at is None or deadline < self._timer_at):
            self._timer_at = deadline
            self._loop.call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        """A later deadline may have taken this one's place; then the look costs nothing but itself."""
        if self._timer_at is not None and self._loop.time() + RESOLUTION_SECONDS >= self._timer_at:
            self._timer_at = None
            self._carry_out()

    async def _wait_progress(self, deadline: float) -> None:
        progress = self._progress = self._progress or self._loop.create_future()
        timer = self._loop.call_at(deadline, _wake, progress)
        await progress
        timer.cancel()


def _wake(progress: asyncio.Future[None]) -> None:
    if not progress.done():
        progress.set_result(None)


@dataclass(frozen=True, slots=True)
class VirtualRequest:
    """A request of a `VirtualStack`."""

    stack: VirtualStack
    request_id: RequestId

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Count these keys, given in prefix order, as used."""
        plane = self.stack.plane
        if plane.uses is not None:
            plane.uses.on_touch(keys, self.stack._loop.time())
        plane.touch(keys)

    def end(self, output_tokens: int | None) -> None:
        """End the request, with the length of its output where it is known."""
        plane = self.stack.plane
        plane.end_request(self.request_id, self.stack._loop.time())
        if plane.uses is not None:
            plane.uses.end(self.request_id, output_tokens)
        self.stack._carry_out()
