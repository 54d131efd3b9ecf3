"""A stack in virtual time: the control plane of a running stack over tiers that keep no bytes."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.control.flow.load_or_compute import answers
from kvtier.control.jobs import Delivery, PresenceAnswers
from kvtier.control.plane.control_plane import ControlPlane
from kvtier.errors import IntegrityError
from kvtier.stack import StackSettings, TierStats
from kvtier.stack.watching.stats import cpu_stats, lower_stats
from kvtier.tier.contract import LookupResult
from kvtier.tools.whatif.device import Device
from kvtier.tools.whatif.virtual_time import VirtualTime, Waiting
from kvtier.types.jobs import GPUGroup, JobKind, JobResult, TransferJob
from kvtier.types.keys import JobId, OffloadKey, RequestId
from kvtier.types.requests import NO_INFO, RequestInfo


class VirtualStack:
    """Has the calls of a `TierStack` that the serving loop of a replay needs (`kvtier.tools.replay.serve.ServedStack`).

    `devices` are those of the CPU tier and of the lower tiers, in the order of the control plane.
    """

    def __init__(
        self, plane: ControlPlane, devices: Sequence[Device], settings: StackSettings, time: VirtualTime
    ) -> None:
        self.plane = plane
        self.devices = devices
        self._settings = settings
        self._time = time
        self._next_job = 1
        self._ended: dict[JobId, Waiting] = {}
        self._results: dict[JobId, JobResult] = {}
        self._progress = Waiting(time)
        self._timer_at: float | None = None
        for device in devices:
            device.deliver = self._deliver

    # -- what the serving loop calls -----------------------------------------------------------------------------

    async def lookup(self, keys: Sequence[OffloadKey]) -> Sequence[LookupResult]:
        """Presence of each key, as `TierStack.lookup` has it: waits for shared tiers' answers until the deadline, and
        what would be loaded later than computed is a miss."""
        deadline = self._time.now + self._settings.lookup_timeout_seconds
        results = self._look(keys)
        while LookupResult.RETRY in results and self._time.now < deadline:
            await self._wait_progress(deadline)
            results = self._look(keys)
        end = self.plane.choice.worth_loading(keys, self._time.now)
        self._send()
        return answers(results, end)

    def _look(self, keys: Sequence[OffloadKey]) -> Sequence[LookupResult]:
        results = self.plane.lookup(keys, self._time.now)
        self._send()
        return results

    def locate(self, keys: Sequence[OffloadKey]) -> list[str | None]:
        """For each key the name of the highest tier that holds it, or None."""
        return self.plane.locate(keys, self._time.now)

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """One request used these keys, given in prefix order."""
        if self.plane.uses is not None:
            self.plane.uses.on_touch(keys, self._time.now)
        self.plane.touch(keys)

    def begin_request(
        self,
        request_id: RequestId,
        keys: Sequence[OffloadKey],
        *,
        time: float | None = None,
        info: RequestInfo | None = None,
    ) -> None:
        """A request begins that uses these keys, in prefix order; `time` is that of policies that follow requests."""
        if self.plane.uses is not None:
            self.plane.uses.begin(request_id, keys, self._time.now, time, info or NO_INFO)

    def end_request(self, request_id: RequestId, *, output_tokens: int | None = None) -> None:
        """The request has ended, with so many tokens of output where known."""
        self.plane.end_request(request_id, self._time.now)
        if self.plane.uses is not None:
            self.plane.uses.end(request_id, output_tokens)
        self._decided()

    def job(self, kind: JobKind, groups: Sequence[GPUGroup]) -> TransferJob:
        """A job with a fresh id and the stack's own deadline for its kind."""
        seconds = self._settings.load_timeout_seconds if kind is JobKind.LOAD else self._settings.store_timeout_seconds
        job_id = JobId(self._next_job)
        self._next_job += 1
        return TransferJob(job_id, kind, tuple(groups), self._time.now + seconds)

    async def load(self, keys: TransferJob) -> JobResult:
        """Load into GPU blocks."""
        return await self._run(keys)

    async def store(self, keys: TransferJob) -> JobResult:
        """Store GPU blocks; returns when the CPU tier has them."""
        return await self._run(keys)

    async def _run(self, job: TransferJob) -> JobResult:
        ended = self._ended[job.job_id] = Waiting(self._time)
        self.plane.submit(job, self._time.now)
        self._decided()
        await ended
        return self._results.pop(job.job_id)

    async def drain(self, timeout_seconds: float, backlog: int = 0) -> bool:
        """Wait until at most `backlog` blocks are on their way to lower tiers; False when the time ran out."""
        deadline = self._time.now + timeout_seconds
        while self.plane.backlog > backlog:
            if self._time.now >= deadline:
                return False
            self.plane.flush(self._time.now)
            self._send()
            if self.plane.backlog > backlog:
                await self._wait_progress(deadline)
        return True

    def stats(self) -> dict[str, TierStats]:
        """The figures of every tier from the CPU down, as a running stack has them."""
        control, now = self.plane.control, self._time.now
        queues = [device.queue for device in self.devices]
        cpu = cpu_stats(control, queues[:1], now)
        lowers = zip(control.lowers, queues[1:], strict=True)
        return {control.cpu.name: cpu} | {lower.name: lower_stats(lower, [queue], now) for lower, queue in lowers}

    def check_ended(self) -> None:
        """Raise IntegrityError if a job never ended."""
        if self._ended:
            raise IntegrityError(f"{len(self._ended)} jobs did not end in virtual time")

    # -- driving the control plane -------------------------------------------------------------------------------

    def _deliver(self, delivery: Delivery | PresenceAnswers) -> None:
        self.plane.deliver(delivery, self._time.now)
        self._decided()

    def _decided(self) -> None:
        self.plane.pump(self._time.now)
        self._send()
        progress, self._progress = self._progress, Waiting(self._time)
        progress.set()

    def _send(self) -> None:
        """Begin what the plane decided, end the jobs that ended, and look again at its next deadline."""
        plane = self.plane
        for emission in plane.take_jobs():
            self.devices[emission.position].submit(emission.job)
        for query in plane.take_queries():
            self.devices[query.position].ask(query)
        for result in plane.take_finished():
            self._results[result.job_id] = result
            self._ended.pop(result.job_id).set()
        deadline = plane.next_deadline(self._time.now)
        if deadline is not None and (self._timer_at is None or deadline < self._timer_at):
            self._timer_at = deadline
            self._time.call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        """A later deadline may have taken this one's place; then the look costs nothing but itself."""
        if self._timer_at is not None and self._time.now >= self._timer_at:
            self._timer_at = None
            self._decided()

    async def _wait_progress(self, deadline: float) -> None:
        progress = self._progress
        self._time.call_at(deadline, progress.set)
        await progress
