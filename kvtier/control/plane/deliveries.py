"""What the data plane delivers to a control plane: how jobs ended, what shared tiers answered, tiers that join."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from kvtier.errors import IntegrityError
from kvtier.tier.contract import LookupResult
from kvtier.types.jobs import JobResult
from kvtier.types.keys import JobId, OffloadKey
from kvtier.types.values import job_value

if TYPE_CHECKING:
    from kvtier.control.tiers.lower_tier import LowerTier


class DeliveryKind(StrEnum):
    """FINISHED: the result counts. LATE: the deadline passed, I/O goes on. ENDED: the I/O of a late job has ended.

    FAILED: an exception left the data plane half-way through a step, and deliveries may be missing.
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
            self.late(delivery.job_id, now)
        elif delivery.kind is DeliveryKind.FAILED:
            raise IntegrityError("the queues of the tiers have failed, and jobs may be lost")
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

    def join(self, tiers: JoiningTiers, now: float) -> None:
        """Lower tiers that were held back are open. A plane whose tiers are open from the start gets none."""
        raise NotImplementedError

    @abstractmethod
    def answer(self, query: PresenceQuery, results: Sequence[LookupResult], now: float) -> None:
        """A shared tier's answer to a query."""
