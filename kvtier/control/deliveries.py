"""What the data plane delivers to a control plane: how jobs ended, and what shared tiers answered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import StrEnum

from kvtier.tier_api.contract import LookupResult
from kvtier.types.jobs import JobResult
from kvtier.types.keys import JobId, OffloadKey
from kvtier.types.values import job_value


class DeliveryKind(StrEnum):
    """FINISHED: the result counts. LATE: the deadline passed, I/O goes on. ENDED: the I/O of a late job has ended."""

    FINISHED = "finished"
    LATE = "late"
    ENDED = "ended"


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


class Recipient(ABC):
    """A control plane as the data plane sees it."""

    def deliver(self, delivery: Delivery | PresenceAnswers, now: float) -> None:
        """Record one delivery. Pump afterwards, once for all that arrived together."""
        if isinstance(delivery, PresenceAnswers):
            self.answer(delivery.query, delivery.results, now)
        elif delivery.result is not None:
            self.finish(delivery.result, now)
        elif delivery.kind is DeliveryKind.LATE:
            self.late(delivery.job_id, now)
        else:
            self.ended(delivery.job_id, now)

    @abstractmethod
    def finish(self, result: JobResult, now: float) -> None:
        """A job of `take_jobs` ended in time."""

    @abstractmethod
    def late(self, job_id: JobId, now: float) -> None:
        """A job passed its deadline; `ended` follows when its I/O has ended."""

    @abstractmethod
    def ended(self, job_id: JobId, now: float) -> None:
        """The I/O of a late job has ended, however it ended."""

    @abstractmethod
    def answer(self, query: PresenceQuery, results: Sequence[LookupResult], now: float) -> None:
        """A shared tier's answer to a query."""
