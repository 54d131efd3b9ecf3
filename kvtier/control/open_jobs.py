"""The engine's own jobs, from their submission until their results are taken."""

from __future__ import annotations

import math

from kvtier.control.flow.engine_job import StackRequest
from kvtier.control.flow.loads import LoadRequest
from kvtier.control.flow.stores import StoreRequest
from kvtier.errors import UsageError
from kvtier.types.jobs import CANCELLED, LATE, BlockOutcome, DropReason, JobResult, TransferJob, dropped
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

    def begin(self, job: TransferJob) -> None:
        """A job is submitted, and becomes one of `loads` or `stores`. Raises UsageError if its id is one of them."""
        if job.job_id in self.loads or job.job_id in self.stores:
            raise UsageError(f"job {job.job_id} is in flight already")
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
        loads, stores = [], []
        for load in self.loads.values():
            if not load.open:
                loads.append(load)
        for store in self.stores.values():
            if not store.open:
                stores.append(store)
        for load in loads:
            load.ended = now
            del self.loads[load.job.job_id]
        for store in stores:
            store.ended = now
            del self.stores[store.job.job_id]
        if loads or stores:
            self.ended += loads
            self.ended += stores
            self.expires_at = self._first_deadline() if self.loads or self.stores else math.inf
        return loads

    def take_results(self) -> list[JobResult]:
        """The results of the jobs that have ended, each once."""
        ended, self.ended = self.ended, []
        return list(map(StackRequest.result, ended))
