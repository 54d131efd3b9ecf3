"""What takes the place of a control plane that an exception left half-way through a step.

Wrong state serves wrong bytes, so nothing of that state is used any more: every key is a miss in every tier, nothing is
stored, and no job begins. The engine's jobs end as soon as no copy of GPU blocks is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvtier.control.jobs import TierJob
from kvtier.control.plane.control_plane import ControlPlane
from kvtier.control.plane.deliveries import Arrival, PresenceQuery
from kvtier.control.reservations import Reservation
from kvtier.errors import IntegrityError
from kvtier.tier.contract import LookupResult
from kvtier.types.hints import HintRefusal, HintResult, KVHint, Release
from kvtier.types.jobs import MISSING, DropReason, JobKind, JobResult, TransferJob, dropped
from kvtier.types.keys import JobId, OffloadKey, RequestId
from kvtier.types.requests import RequestInfo

LOOK_SECONDS = 0.005
"""How often to look whether the copies in flight have ended."""


class FailedPlane(ControlPlane):
    """Made beside every control plane, in advance: when one fails there may be no memory.

    `jobs` are the engine's jobs whose results were not taken; `quiet` says that no job begins any more and no copy of
    GPU blocks is in flight. A job that was through but for its result keeps its outcomes; every other is a miss.
    """

    def __init__(self, failed: ControlPlane, jobs: Mapping[JobId, TransferJob], quiet: Callable[[], bool]) -> None:
        self.control = failed.control
        self.uses = None
        self.events = failed.events
        self.hints = failed.hints
        self._reservations = failed._reservations
        self._failed = failed
        self._jobs = jobs
        self._quiet = quiet
        self._was_reset = False

    def take_over(self) -> None:
        """What was found so far is found no more: reservations end, and events say so."""
        control = self.control
        for reservation in list(self._reservations.by_request.values()):
            reservation.fail()
        owned = [lower for lower in control.lowers if lower.owned is not None and not lower.held_back]
        specs = [control.cpu_spec, *(lower.spec for lower in owned)]
        for tier, spec in zip(control.owned_tiers, specs, strict=True):
            self.events.record(spec, list(tier.directory), removed=True)

    # -- looking up: misses --------------------------------------------------------------------------------------

    def lookup(
        self, keys: Sequence[OffloadKey], now: float, info: RequestInfo | None = None, ask: bool = True
    ) -> list[LookupResult]:
        return [LookupResult.MISS] * len(keys)

    def locate(self, keys: Sequence[OffloadKey], now: float) -> list[str | None]:
        return [None] * len(keys)

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Nothing is here."""

    def announce(self, keys: Sequence[OffloadKey], now: float) -> None:
        """Nothing is here."""

    def reserve(
        self, request_id: RequestId, keys: Sequence[OffloadKey], now: float, info: RequestInfo | None = None
    ) -> Reservation:
        reservation = self._reservations.extend(request_id, keys, 0)
        reservation.fail()
        return reservation

    def hint(self, hint: KVHint, now: float) -> HintResult:
        keys = 0 if isinstance(hint, Release) else len(hint.keys)
        return HintResult(0, {HintRefusal.STOPPED: keys} if keys else {})

    def end_request(self, request_id: RequestId, now: float) -> None:
        self._reservations.by_request.pop(request_id, None)

    # -- jobs: each ends, none begins ----------------------------------------------------------------------------

    def submit(
        self, job: TransferJob, now: float, request_id: RequestId | None = None, info: RequestInfo | None = None
    ) -> None:
        """It ends with the next `take_finished` that finds no copy in flight."""

    def cancel(self, job_id: JobId, now: float) -> None:
        """It ends anyway."""

    def deliver(self, delivery: Arrival, now: float) -> None:
        """No request waits for it."""

    def hold_back(self, now: float) -> None:
        """Nothing is loaded or stored anyway, and no tier joins."""

    def take_jobs(self) -> list[TierJob]:
        return []

    def take_queries(self) -> list[PresenceQuery]:
        return []

    def take_finished(self) -> list[JobResult]:
        if not self._jobs or not self._quiet():
            return []
        return [self._result(job) for job in list(self._jobs.values())]

    def _result(self, job: TransferJob) -> JobResult:
        """What became of a job, if every block of it had an outcome already; else misses."""
        failed, job_id = self._failed, job.job_id
        jobs = failed._open
        ended = [request for request in jobs.ended if request.job.job_id == job_id]
        request = ended[0] if ended else jobs.loads.get(job_id) or jobs.stores.get(job_id)
        if request is not None and not request.open and not self._was_reset:
            return request.result()
        return JobResult.uniform(job, MISSING if job.kind is JobKind.LOAD else dropped(DropReason.TIER_DOWN))

    # -- time, reset and closing ---------------------------------------------------------------------------------

    def pump(self, now: float) -> None:
        """Nothing is decided."""

    def next_deadline(self, now: float) -> float | None:
        return now + LOOK_SECONDS if self._jobs else None

    def reset(self, now: float) -> int:
        """The tiers still are to be reset: what they have must not be found after a restart."""
        self._was_reset = True
        self.control.epoch += 1
        self.control.resets += 1
        return self.control.epoch

    def close(self, now: float) -> None:
        """Nothing is queued."""

    def flush(self, now: float) -> None:
        """Nothing is queued."""

    def drain(self, now: float) -> None:
        """Nothing is written back: it may not be what its key says."""

    def abandon(self) -> int:
        return self._failed.dirty_rows

    # -- figures -------------------------------------------------------------------------------------------------

    @property
    def backlog(self) -> int:
        return 0

    @property
    def in_flight(self) -> int:
        return 0

    @property
    def dirty_rows(self) -> int:
        return 0

    @property
    def idle(self) -> bool:
        return not self._jobs

    def check_integrity(self) -> None:
        raise IntegrityError("an exception left the control plane half-way through a step")
