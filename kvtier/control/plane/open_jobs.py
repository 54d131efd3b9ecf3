"""The engine's own jobs, from their submission until their results are taken."""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush

from kvtier.control.flow.engine_job import EngineJob
from kvtier.control.flow.loads import LoadRequest
from kvtier.control.flow.stores import StoreRequest
from kvtier.errors import UsageError
from kvtier.types.jobs import CANCELLED, LATE, BlockOutcome, DropReason, JobResult, TransferJob, dropped
from kvtier.types.keys import JobId

STALE_MIN = 64
"""So many deadlines of jobs that have ended may be kept, whatever the number of those that have not."""


class OpenJobs:
    """`loads` and `stores` have not ended; `ended` have, and their results were not taken.

    `expires_at` is the first deadline of those that have not ended and were not stopped, infinite without one.
    """

    def __init__(self) -> None:
        self.loads: dict[JobId, LoadRequest] = {}
        self.stores: dict[JobId, StoreRequest] = {}
        self.ended: list[LoadRequest | StoreRequest] = []
        self.expires_at = math.inf
        self._by_age: dict[int, LoadRequest | StoreRequest] = {}
        self._deadlines: list[tuple[float, int, LoadRequest | StoreRequest]] = []

    def begin(self, job: TransferJob) -> None:
        """A job is submitted; `add` follows. Raises UsageError if its id is one of `loads` or `stores`."""
        if job.job_id in self.loads or job.job_id in self.stores:
            raise UsageError(f"job {job.job_id} is in flight already")
        if job.deadline is not None and job.deadline < self.expires_at:
            self.expires_at = job.deadline

    def add(self, request: LoadRequest | StoreRequest) -> None:
        """A job that began."""
        if isinstance(request, LoadRequest):
            self.loads[request.job.job_id] = request
        else:
            self.stores[request.job.job_id] = request
        self._by_age[request.age] = request
        if request.job.deadline is not None:
            heappush(self._deadlines, (request.job.deadline, request.age, request))

    def stop(self, job_id: JobId, outcome: BlockOutcome) -> None:
        """Begin no more copies for a job, if it has not ended: what it lacks has this outcome."""
        request = self.loads.get(job_id) or self.stores.get(job_id)
        if request is not None:
            request.stop(outcome)
            self.expires_at = self._first_deadline()

    def stop_all(self, reason: DropReason) -> None:
        """Begin no more copies: stores are dropped for this reason, loads cancelled."""
        for store in self.stores.values():
            store.stop(dropped(reason))
        for load in self.loads.values():
            load.stop(CANCELLED)
        self.expires_at = math.inf

    def expire(self, now: float) -> None:
        """Stop the jobs whose deadlines have passed, loads first, the oldest first."""
        due = []
        while self._first_deadline() <= now:
            due.append(heappop(self._deadlines)[2])
        for request in sorted(due, key=_loads_first):
            request.stop(dropped(DropReason.NO_ROW) if isinstance(request, StoreRequest) else LATE)
        self.expires_at = self._first_deadline()

    def _first_deadline(self) -> float:
        """The first deadline of a job that has not ended and was not stopped."""
        deadlines = self._deadlines
        while deadlines and (deadlines[0][2].stopping is not None or not deadlines[0][2].open):
            heappop(deadlines)
        return deadlines[0][0] if deadlines else math.inf

    def end(self, ages: list[int], now: float) -> list[LoadRequest | StoreRequest]:
        """Take out and return the loads and stores of these ages, which have ended: loads first, the oldest first."""
        ended = list(map(self._by_age.pop, ages))
        if len(ended) > 1:
            ended.sort(key=_loads_first)
        for request in ended:
            request.ended = now
            del (self.loads if isinstance(request, LoadRequest) else self.stores)[request.job.job_id]
        self.ended += ended
        if len(self._deadlines) > STALE_MIN + 2 * len(self._by_age):
            self._deadlines = [each for each in self._deadlines if each[1] in self._by_age]
            heapify(self._deadlines)
        self.expires_at = self._first_deadline()
        return ended

    def take_results(self) -> list[JobResult]:
        """The results of the jobs that have ended, each once."""
        ended, self.ended = self.ended, []
        return list(map(EngineJob.result, ended))


def _loads_first(request: LoadRequest | StoreRequest) -> tuple[bool, int]:
    return isinstance(request, StoreRequest), request.age
