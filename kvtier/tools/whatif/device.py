"""One tier in virtual time: the jobs that wait for it, loads first, and a device that serves one byte after another.

Both directions share the device. A job holds it for its bytes; its latency comes on top and holds nothing. The queue is
that of the stack's dispatcher: bounded bytes in flight, and a job that passes its deadline is late.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvtier.control.jobs import Delivery, DeliveryKind, PresenceAnswers, PresenceQuery
from kvtier.stack.dispatcher import TierQueue
from kvtier.stack.traffic import QueuedJob
from kvtier.tier.contract import LookupResult
from kvtier.tools.whatif.service import Service
from kvtier.tools.whatif.virtual_time import VirtualTime
from kvtier.types.geometry import Geometry
from kvtier.types.jobs import LOADED, MISSING, PRESENT, STORED, BlockOutcome, JobKind, JobResult, TransferJob
from kvtier.types.keys import JobId, OffloadKey

Deliver = Callable[[Delivery | PresenceAnswers], None]


class SharedStore:
    """What a shared tier holds, by its own LRU; without a capacity it holds everything."""

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
    """Where a tier was short: jobs that waited before they began, their seconds, the most bytes that waited at once."""

    jobs: int = 0
    waited: int = 0
    seconds: float = 0.0
    longest_seconds: float = 0.0
    peak_jobs: int = 0
    late: int = 0

    def note(self, seconds: float) -> None:
        """A job begins after so long."""
        self.jobs += 1
        if seconds > 0:
            self.waited += 1
            self.seconds += seconds
            self.longest_seconds = max(self.longest_seconds, seconds)


class Device:
    """One tier: `submit` takes its jobs, `deliver` is called with what became of them. `shared` for a shared tier."""

    def __init__(
        self,
        queue: TierQueue,
        service: Service,
        geometry: Geometry,
        time: VirtualTime,
        shared: SharedStore | None = None,
    ) -> None:
        self.queue = queue
        self.service = service
        self.waits = Waits()
        self.shared = shared
        self.deliver: Deliver = lambda delivery: None
        self._geometry = geometry
        self._time = time
        self._free_at = 0.0
        self._waiting: dict[JobId, QueuedJob] = {}
        self._begun: set[JobId] = set()

    def submit(self, job: TransferJob) -> None:
        """Queue a job, and begin what the bound allows."""
        queued = QueuedJob(job, job.num_blocks * self._geometry.row_bytes, self._time.now)
        self.queue.waiting(job.kind).append(queued)
        self.queue.traffic[job.kind].queued_bytes += queued.size
        self._waiting[job.job_id] = queued
        if job.deadline is not None:
            self._time.call_at(job.deadline, partial(self._on_deadline, job))
        self._start()

    def ask(self, query: PresenceQuery) -> None:
        """Answer a lookup after the latency of a load."""
        assert self.shared is not None
        results = [LookupResult.HIT if key in self.shared else LookupResult.MISS for key in query.keys]
        at = self._time.now + self.service.load.latency_seconds
        self._time.call_at(at, lambda: self.deliver(PresenceAnswers(query, results)))

    def _start(self) -> None:
        queue, now = self.queue, self._time.now
        while jobs := queue.loads or queue.stores:
            queued = jobs[0]
            if queue.inflight_bytes and queue.inflight_bytes + queued.size > queue.inflight_bytes_max:
                break
            job = jobs.popleft().job
            del self._waiting[job.job_id]
            self.waits.note(now - queued.since)
            self._begun.add(job.job_id)
            queue.inflight_bytes += queued.size
            queue.traffic[job.kind].begin(queued, now)
            rate = self.service.of(job.kind)
            self._free_at = max(now, self._free_at) + self._payload_bytes(job) / rate.bytes_per_second
            self._time.call_at(self._free_at + rate.latency_seconds, partial(self._end, queued))
        self.waits.peak_jobs = max(self.waits.peak_jobs, len(queue.loads) + len(queue.stores))

    def _payload_bytes(self, job: TransferJob) -> int:
        sizes = self._geometry.kv_bytes_per_offloaded_block
        return sum(len(group.keys) * sizes(group.group) for group in job.groups)

    def _end(self, queued: QueuedJob) -> None:
        queue, job = self.queue, queued.job
        queue.inflight_bytes -= queued.size
        queue.traffic[job.kind].end(queued, self._time.now)
        outcomes = tuple(self._outcomes(job.kind, group.keys) for group in job.groups)
        if job.job_id in self._begun:
            self._begun.remove(job.job_id)
            moved = sum(outcome.ok for group in outcomes for outcome in group) and self._payload_bytes(job)
            self.deliver(Delivery(DeliveryKind.FINISHED, job.job_id, JobResult(job.job_id, outcomes, moved)))
        else:
            self.deliver(Delivery(DeliveryKind.ENDED, job.job_id))
        self._start()

    def _on_deadline(self, job: TransferJob) -> None:
        """The job is late unless it has ended; one that has not begun never will."""
        if job.job_id in self._begun:
            self._begun.remove(job.job_id)
            self.waits.late += 1
            self.queue.traffic[job.kind].late(job.job_id)
            self.deliver(Delivery(DeliveryKind.LATE, job.job_id))
        elif (queued := self._waiting.pop(job.job_id, None)) is not None:
            self.queue.waiting(job.kind).remove(queued)
            self.queue.traffic[job.kind].unqueue(queued, late=True)
            self.waits.late += 1
            self.deliver(Delivery(DeliveryKind.LATE, job.job_id))
            self.deliver(Delivery(DeliveryKind.ENDED, job.job_id))

    def _outcomes(self, kind: JobKind, keys: Sequence[OffloadKey]) -> tuple[BlockOutcome, ...]:
        if self.shared is not None:
            return tuple(self.shared.outcome(kind, key) for key in keys)
        return (LOADED if kind is JobKind.LOAD else STORED,) * len(keys)
