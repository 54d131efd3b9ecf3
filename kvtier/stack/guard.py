"""The border of a step: an exception that leaves a control plane ends it there, once, and every later call answers.

Half a step may be wrong state, and wrong state serves wrong bytes. So nothing of that state is used any more: each key
is a miss, no job begins, and the engine's jobs end once no copy of GPU blocks is in flight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from kvtier.control.jobs import Decisions
from kvtier.control.plane.control_plane import ControlPlane
from kvtier.control.reservations import Reservation
from kvtier.errors import IntegrityError, UsageError
from kvtier.tier.contract import LookupResult
from kvtier.types.hints import HintRefusal, HintResult, KVHint, Release
from kvtier.types.jobs import MISSING, DropReason, JobKind, JobResult, TransferJob, dropped
from kvtier.types.keys import JobId, OffloadKey, RequestId

P = ParamSpec("P")
T = TypeVar("T")

LOOK_SECONDS = 0.005
"""How often an engine looks whether the copies in flight of a failed plane have ended."""


class Guarded(ABC):
    """A driver whose steps are the methods marked with `guard_step`. The first that raises fails it for good.

    `_errors` counts those that raised.
    """

    _failed = False
    _errors = 0

    def _fail(self, error: BaseException) -> None:
        """A step has raised. Raises again what is no failure, what ends a program, and a defect of the answers."""
        if isinstance(error, UsageError):  # before any change
            raise error
        self._errors += 1
        if self._failed:
            raise error
        self._failed = True
        self._give_up(error)
        if not isinstance(error, Exception):
            raise error

    @abstractmethod
    def _give_up(self, error: BaseException) -> None:
        """Log the failure as critical, put answers in the place of the plane, let no job begin. Called once."""


class GuardedCalls:
    """Calls that belong to a `Guarded`, each a step of it."""

    def __init__(self, driver: Guarded) -> None:
        self._driver = driver

    def _fail(self, error: BaseException) -> None:
        self._driver._fail(error)


G = TypeVar("G", bound=Guarded | GuardedCalls)


def guard_step(method: Callable[Concatenate[G, P], T]) -> Callable[Concatenate[G, P], T]:
    """A method of a `Guarded` as one step. Where it raises, the plane fails, and the method is called again to answer.

    UsageError goes to the caller. So does what ends a program, such as KeyboardInterrupt: its plane has failed too, and
    is to be closed. A private method is called with positional arguments only, which takes less time.
    """
    if method.__name__.startswith("_"):

        @wraps(method)
        def guarded(self: G, /, *args: Any) -> T:
            try:
                return method(self, *args)  # type: ignore[call-arg]
            except BaseException as error:
                self._fail(error)
            return method(self, *args)  # type: ignore[call-arg]

        return guarded  # type: ignore[return-value]

    @wraps(method)
    def public(self: G, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            self._fail(error)
        return method(self, *args, **kwargs)

    return public


class Answers:
    """Stands in the place of a plane that has failed: `answers` by the name of a call; every other call does nothing.

    `jobs` are the engine's jobs that have not ended.
    """

    def __init__(self, answers: Mapping[str, object], jobs: Mapping[Any, object] | None = None) -> None:
        vars(self).update(answers)
        self._jobs = {} if jobs is None else jobs

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _nothing

    def check_integrity(self) -> None:
        """Raise IntegrityError."""
        raise IntegrityError("an exception left the control plane half-way through a step")

    @property
    def idle(self) -> bool:
        """True once every job of the engine has ended."""
        return not self._jobs


def _nothing(*_: object, **__: object) -> None:
    """Nothing is here, nothing is queued, and no request waits."""


def answers_of(failed: ControlPlane, jobs: Mapping[JobId, TransferJob], quiet: Callable[[], bool]) -> Any:
    """The answers in the place of a `ControlPlane`. Of its state only figures, events and reservations are used.

    `quiet` is true when no job begins any more and no copy of GPU blocks is in flight: then every job ends as a miss.
    """
    requests = failed.reservations.by_request

    def reserve(request_id: RequestId, keys: Sequence[OffloadKey], *_: object) -> Reservation:
        reservation = failed.reservations.extend(request_id, keys, 0)
        reservation.fail()
        return reservation

    def collect() -> Decisions:
        return Decisions(results=[_miss(job) for job in jobs.values()] if jobs and quiet() else ())

    def hint(hint: KVHint, now: float) -> HintResult:
        keys = 0 if isinstance(hint, Release) else len(hint.keys)
        return HintResult(0, {HintRefusal.STOPPED: keys} if keys else {})

    def reset(now: float) -> int:
        """The tiers still are to be reset: what they have must not be found after a restart."""
        failed.control.epoch += 1
        failed.control.resets += 1
        return failed.control.epoch

    return Answers(
        {
            "lookup": lambda keys, *_: [LookupResult.MISS] * len(keys),
            "locate": lambda keys, now: [None] * len(keys),
            "reserve": reserve,
            "reservation": requests.get,
            "end_request": lambda request_id, now: requests.pop(request_id, None),
            "hint": hint,
            "choice": Answers({"worth_loading": lambda keys, now: len(keys)}),
            "collect": collect,
            "next_deadline": lambda now: now + LOOK_SECONDS if jobs else None,
            "take_events": failed.take_events,
            "reset": reset,
            "abandon": lambda: failed.dirty_rows,
            "backlog": 0,
            "in_flight": 0,
            "dirty_rows": 0,
            "uses": None,
            "control": failed.control,
            "events": failed.events,
            "hints": failed.hints,
        },
        jobs,
    )


def _miss(job: TransferJob) -> JobResult:
    return JobResult.uniform(job, MISSING if job.kind is JobKind.LOAD else dropped(DropReason.TIER_DOWN))
