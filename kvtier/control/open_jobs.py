"""The engine's own jobs, from their submission until their results are taken."""

from __future__ import annotations

import math

from kvtier.control.flow.engine_job import StackRequest
from kvtier.control.flow.loads import LoadRequest
from kvtier.control.flow.stores import StoreRequest
from kvtier.types.jobs import CANCELLED, LATE, BlockOutcome, DropReason, JobResult, dropped
from kvtier.types.keys import JobId


class OpenJobs:
    """`loads` and `stores` have not ended; `ended` have, and their results were not taken.

    `expires_at` is the first deadline of those that have not ended and were not stopped, infinite without one.
    """

    def __init__(self) -> None:
        self.loads: dict[JobId, LoadRequest] = {}
        self.stores: dict[JobId, StoreRequest] = {}
        self.ended: list[LoadRequest | StoreRequest] = []
        self.expires_at = math.inf

    def __contains__(self, job_id: JobId) -> bool:
        return job_id in self.loads or job_id in self.stores

    def add(self, request: LoadRequest | StoreRequest) -> None:
        """A job that was submitted."""
        job = request.job
        if isinstance(request, LoadRequest):
            self.loads[job.job_id] = request
        else:
            self.stores[job.job_id] = request
        if job.deadline is not None and job.deadline < self.expires_at:
            self.expires_at = job.deadline

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
        """Stop the jobs whose deadlines have passed."""
        for deadline, request in self._deadlines():
            if now >= deadline:
                request.stop(dropped(DropReason.NO_ROW) if isinstance(request, StoreRequest) else LATE)
        self.expires_at = self._first_deadline()

    def _first_deadline(self) -> float:
        return min((deadline for deadline, _ in self._deadlines()), default=math.inf)

    def _deadlines(self) -> list[tuple[float, LoadRequest | StoreRequest]]:
        """The jobs that have a deadline and were not stopped."""
        requests: list[LoadRequest | StoreRequest] = [*self.loads.values(), *self.stores.values()]
        return [
            (deadline, request)
            for request in requests
            if request.stopping is None and (deadline := request.job.deadline) is not None
        ]

    def end(self, now: float) -> list[LoadRequest]:
        """Take out the loads and stores of which every block has an outcome; returns the loads among them."""
        loads, ended = [], len(self.ended)
        for load in list(self.loads.values()):
            if not load.open:
                loads.append(load)
                load.ended = now
                self.ended.append(load)
                del self.loads[load.job.job_id]
        for store in list(self.stores.values()):
            if not store.open:
                store.ended = now
                self.ended.append(store)
                del self.stores[store.job.job_id]
        if len(self.ended) > ended:
            self.expires_at = self._first_deadline() if self.loads or self.stores else math.inf
        return loads

    def take_results(self) -> list[JobResult]:
        """The results of the jobs that have ended, each once."""
        ended, self.ended = self.ended, []
        return list(map(StackRequest.result, ended))
