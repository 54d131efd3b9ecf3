"""Jobs for tiers, the owner of each until its I/O has ended, and what a data plane delivers to a control plane."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import StrEnum
from typing import Generic, TypeVar

from kvtier.control.tiers.lower_tier import LowerTier
from kvtier.errors import IntegrityError, UsageError
from kvtier.tier.contract import LookupResult
from kvtier.types.jobs import GPUGroup, JobKind, JobResult, RegionFormat, RowGroup, TransferJob
from kvtier.types.keys import JobId, OffloadKey
from kvtier.types.values import job_value

CPU_TIER = 0
"""The CPU tier's position in a stack's list of tiers below the GPU."""


class JobOwner(ABC):
    """A job handed to the data plane. Exactly one of: `finish`; or `on_late`, later followed by `on_end`."""

    @abstractmethod
    def finish(self, result: JobResult, now: float) -> None:
        """The job ended in time."""

    def on_late(self, now: float) -> None:
        """The job passed its deadline; its I/O goes on and its slots must not be reused."""
        raise AssertionError(f"a {type(self).__name__} has no deadline")

    def on_end(self, now: float) -> None:
        """The I/O of a late job has really ended."""
        raise AssertionError(f"a {type(self).__name__} has no deadline")


@job_value
class TierJob:
    """A job for the tier at `position` (0: CPU)."""

    position: int
    job: TransferJob


OwnerT = TypeVar("OwnerT", bound=JobOwner)


class JobTable(Generic[OwnerT]):
    """Jobs handed to the data plane, and the owner of each until its I/O has ended."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.outbox: list[TierJob] = []
        self.running: dict[JobId, OwnerT] = {}
        self.late_jobs: dict[JobId, OwnerT] = {}
        self._next_job = 1

    def emit(
        self,
        position: int,
        kind: JobKind,
        groups: tuple[GPUGroup | RowGroup, ...],
        deadline: float | None,
        owner: OwnerT,
        formats: tuple[RegionFormat, ...] = (),
    ) -> JobId:
        """Hand a job to the data plane; `owner` is called when it ends."""
        job = TransferJob(JobId(self._next_job), kind, groups, deadline, self.epoch, formats)
        self._next_job += 1
        self.running[job.job_id] = owner
        self.outbox.append(TierJob(position, job))
        return job.job_id

    def take_jobs(self) -> list[TierJob]:
        """The jobs to run, each once."""
        jobs, self.outbox = self.outbox, []
        return jobs

    def finish(self, result: JobResult, now: float) -> OwnerT:
        """A job ended in time; returns its owner."""
        owner = self.running.pop(result.job_id, None)
        if owner is None:
            raise self._unknown(result.job_id)
        owner.finish(result, now)
        return owner

    def on_late(self, job_id: JobId, now: float) -> OwnerT:
        """A job passed its deadline; `on_end` follows when its I/O has ended. Returns its owner."""
        owner = self.running.pop(job_id, None)
        if owner is None:
            raise self._unknown(job_id)
        self.late_jobs[job_id] = owner
        owner.on_late(now)
        return owner

    def on_end(self, job_id: JobId, now: float) -> None:
        """The I/O of a late job has ended, however it ended."""
        owner = self.late_jobs.pop(job_id, None)
        if owner is None:
            raise self._unknown(job_id)
        owner.on_end(now)

    @staticmethod
    def _unknown(job_id: JobId) -> UsageError:
        return UsageError(f"job {job_id} is not in flight")


class DeliveryKind(StrEnum):
    """Kinds of deliveries. FINISHED: the result counts. LATE: the deadline passed, I/O goes on.

    ENDED: the I/O of a late job has ended. FAILED: an exception left the data plane half-way through a step, and
    deliveries may be missing.
    """

    FINISHED = "finished"
    LATE = "late"
    ENDED = "ended"
    FAILED = "failed"


@job_value
class Delivery:
    """The outcome of one job, or a step towards it; `result` only with FINISHED."""

    kind: DeliveryKind
    job_id: JobId
    result: JobResult | None = None


@job_value
class PresenceQuery:
    """Keys whose presence in the shared tier at `position` is to be looked up, in the namespace's `epoch`."""

    position: int
    keys: tuple[OffloadKey, ...]
    epoch: int = 0


@job_value
class PresenceAnswers:
    """A shared tier's answer to a query, one for each of its keys."""

    query: PresenceQuery
    results: Sequence[LookupResult]


@job_value
class Decisions:
    """Jobs to run, lookups to make, and results of the engine's jobs that have ended."""

    jobs: Sequence[TierJob] = ()
    queries: Sequence[PresenceQuery] = ()
    results: Sequence[JobResult] = ()


@job_value
class JoiningTiers:
    """The lower tiers are open now, in the namespace's `epoch`; this holds for `resets` resets of the session."""

    lowers: Sequence[LowerTier]
    epoch: int
    resets: int


Arrival = Delivery | PresenceAnswers | JoiningTiers


class Recipient(ABC):
    """A control plane as the data plane sees it."""

    def deliver(self, delivery: Arrival, now: float) -> None:
        """Record one delivery. Pump afterwards, once for all that arrived together.

        Whatever it raises, the plane may be left half-way through a step. Raises IntegrityError for FAILED.
        """
        if not isinstance(delivery, Delivery):
            if isinstance(delivery, PresenceAnswers):
                self.answer(delivery.query, delivery.results, now)
            else:
                self.join(delivery, now)
        elif delivery.result is not None:
            self.finish(delivery.result, now)
        elif delivery.kind is DeliveryKind.LATE:
            self.on_late(delivery.job_id, now)
        elif delivery.kind is DeliveryKind.FAILED:
            raise IntegrityError("the queues of the tiers have failed, and jobs may be lost")
        else:
            self.on_end(delivery.job_id, now)

    @abstractmethod
    def finish(self, result: JobResult, now: float) -> None:
        """A job handed out before ended in time."""

    @abstractmethod
    def on_late(self, job_id: JobId, now: float) -> None:
        """A job passed its deadline; `on_end` follows when its I/O has ended."""

    @abstractmethod
    def on_end(self, job_id: JobId, now: float) -> None:
        """The I/O of a late job has ended, however it ended."""

    def join(self, tiers: JoiningTiers, now: float) -> None:
        """Lower tiers that were held back are open. A plane whose tiers are open from the start gets none."""
        raise NotImplementedError

    @abstractmethod
    def answer(self, query: PresenceQuery, results: Sequence[LookupResult], now: float) -> None:
        """A shared tier's answer to a query."""
