"""What takes the place of the plane of a tier below an engine's memory that an exception left half-way through a step.

Wrong state serves wrong bytes, so nothing of that state is used any more: every key is a miss, and no job begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtier.control.jobs import TierJob
from kvtier.control.plane.deliveries import Arrival, Delivery, DeliveryKind, PresenceQuery
from kvtier.engines.engine_memory.plane import EngineMemoryPlane
from kvtier.engines.engine_memory.transfers import EngineTransfer
from kvtier.errors import IntegrityError
from kvtier.tier.contract import LookupResult
from kvtier.types.jobs import DropReason, dropped
from kvtier.types.keys import OffloadKey


class FailedEngineMemoryPlane(EngineMemoryPlane):
    """Made beside every such plane, in advance: when one fails there may be no memory.

    `jobs` are the engine's jobs that were not returned to it. Blocks that had ended keep their outcomes.
    """

    def __init__(self, failed: EngineMemoryPlane, jobs: Mapping[int, EngineTransfer]) -> None:
        self.lower = failed.lower
        self._refused = failed._refused
        self._permits = failed._permits
        self._jobs = failed._jobs  # for the epoch alone
        self._open_jobs = jobs

    def take_over(self) -> None:
        """What was found so far is found no more, and events say so."""
        if self.lower.owned is not None:
            self.lower.index.changes.append((True, list(self.lower.owned.directory)))

    def lookup(self, key: OffloadKey, request_id: str, now: float) -> LookupResult:
        return LookupResult.MISS

    def find(self, keys: Sequence[OffloadKey], now: float) -> list[bool | None]:
        return [False] * len(keys)

    def lease(self, keys: Sequence[OffloadKey], now: float) -> None:
        """Nothing is here."""

    def release(self, keys: Sequence[OffloadKey]) -> None:
        """Nothing is leased."""

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Nothing is here."""

    def remove(self, keys: Sequence[OffloadKey], now: float) -> None:
        """Nothing is here."""

    def announce(self, keys: Sequence[OffloadKey], now: float) -> None:
        """Nothing is here."""

    def end_step(self) -> None:
        """Nothing is leased."""

    def end(self, transfer: EngineTransfer, now: float) -> None:
        """It ends with the next `take_ended`."""

    def reset(self, now: float) -> int:
        """Nothing is found any more; what is on disk is made unreachable all the same."""
        self._jobs.epoch += 1
        return self._jobs.epoch

    def submit(self, transfer: EngineTransfer, now: float) -> None:
        """It ends with the next `take_ended`."""

    def deliver(self, delivery: Arrival, now: float) -> None:
        """No job waits for it."""
        if isinstance(delivery, Delivery) and delivery.kind is not DeliveryKind.LATE:
            self._permits.pop(delivery.job_id, None)

    def relieve(self, now: float) -> None:
        """Nothing is pinned."""

    def give_up(self, now: float) -> int:
        """Every job ends anyway. No copy touches the engine's memory any more."""
        for permit in list(self._permits.values()):
            permit.shut()
        return 0

    def take_jobs(self) -> list[TierJob]:
        return []

    def take_queries(self) -> list[PresenceQuery]:
        return []

    def take_ended(self) -> list[EngineTransfer]:
        ended = list(self._open_jobs.values())
        for transfer in ended:
            for part in transfer.parts:
                part.permit.shut()
            transfer.complete(range(len(transfer.keys)), dropped(DropReason.TIER_DOWN))
            transfer.ended = True
        self.give_up(0.0)
        return ended

    @property
    def busy(self) -> bool:
        return False

    @property
    def backlog(self) -> int:
        return 0

    def check_integrity(self) -> None:
        raise IntegrityError("an exception left the plane half-way through a step")
