"""The control plane: lookups, loads, stores, finished jobs and the passing of time in; transfer jobs out.

Synchronous and deterministic: no I/O, no clock and no randomness of its own. One thread touches it. After any call
take what there is to do with `take_jobs`, and what has ended with `take_finished`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress

from kvtier.control.board import Board, Emission, InFlight, LowerTier, TierCounters, TierPlan
from kvtier.control.claims import Claims
from kvtier.control.demotion import Demotions
from kvtier.control.loads import LoadRequest, Loads
from kvtier.control.promotion import Promotions
from kvtier.control.reservations import Reservation, Reservations
from kvtier.control.slots import READY
from kvtier.control.stores import StoreRequest, Stores
from kvtier.errors import UsageError
from kvtier.events import OffloadingEvent
from kvtier.jobs import CANCELLED, LOADED, BlockOutcome, DropReason, JobKind, JobResult, TransferJob, dropped
from kvtier.jobs import LATE as LATE_OUTCOME
from kvtier.keys import JobId, Medium, OffloadKey, RequestId
from kvtier.loadstore import LookupResult


@dataclass(frozen=True, slots=True)
class ControlLimits:
    """Limits of the control plane, beside those of each tier.

    `watermark_rows` rows are kept free or clean by background demotion; `reservation_seconds` is how long the oldest
    reservation may wait; `lease_seconds` how long a reported hit is kept for an engine that does not load it.
    `patience_seconds` is how long a store waits for rows that are to be written below, and a load or a reservation
    for those that an `on_evict` tier is to have, before they take them anyway.
    `events_max` bounds the events kept for `take_events`; 0 records none.
    """

    watermark_rows: int = 0
    reservation_seconds: float = 10.0
    lease_seconds: float = 10.0
    patience_seconds: float = 1.0
    events_max: int = 65536


@dataclass(frozen=True, slots=True)
class Question:
    """Keys whose presence in the shared tier at `position` is to be looked up, in the namespace's `epoch`."""

    position: int
    keys: tuple[OffloadKey, ...]
    epoch: int = 0


class ControlPlane:
    """Everything that decides. See the module's docstring for how to drive it."""

    def __init__(
        self, cpu: TierPlan, lowers: Sequence[TierPlan], factor: int = 1, limits: ControlLimits | None = None
    ) -> None:
        limits = limits or ControlLimits()
        self.board = Board(cpu, lowers)
        self._demotions = Demotions(self.board, limits.watermark_rows)
        promotions = Promotions(self.board, self._demotions)
        self._loads = Loads(self.board, promotions)
        self._stores = Stores(self.board, self._demotions, factor)
        self._reservations = Reservations(self.board, promotions, limits.reservation_seconds, limits.lease_seconds)
        self._claims = Claims(self.board, self._demotions, self._reservations, limits.patience_seconds)
        self._open_loads: dict[JobId, LoadRequest] = {}
        self._open_stores: dict[JobId, StoreRequest] = {}
        self._limits = limits
        self._pumped_at = -math.inf
        self._events: deque[OffloadingEvent] = deque()
        self.events_lost = 0
        self._closing = False
        self._collect_changes()

    # -- looking up ----------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[OffloadKey], now: float) -> list[LookupResult]:
        """For each key: HIT (in a row), HIT_PENDING (lower down or on its way), RETRY (unknown yet) or MISS."""
        cpu = self.board.cpu
        state = cpu.table.state
        hit, pending = LookupResult.HIT, LookupResult.HIT_PENDING
        rows = list(map(cpu.directory.get, keys))
        if None not in rows:
            return [hit if state[row] == READY else pending for row in rows]  # type: ignore[index]
        below = iter(self._lookup_below([key for key, row in zip(keys, rows, strict=True) if row is None], now))
        return [next(below) if row is None else hit if state[row] == READY else pending for row in rows]

    def _lookup_below(self, keys: Sequence[OffloadKey], now: float) -> list[LookupResult]:
        """Presence in the tiers below the CPU: of each key in the highest tier that has it and may be asked."""
        lowers = [lower for lower in self.board.lowers if lower.may_load(now)]
        if not lowers:
            return [LookupResult.MISS] * len(keys)
        if len(lowers) == 1 and lowers[0].owned is not None and not lowers[0].roots.any_silent:
            tier = lowers[0].owned
            state, pending, miss = tier.table.state, LookupResult.HIT_PENDING, LookupResult.MISS
            slots = map(tier.directory.get, keys)
            return [miss if slot is None or state[slot] != READY else pending for slot in slots]
        return [self._lookup_in(lowers, key, now) for key in keys]

    @staticmethod
    def _lookup_in(lowers: Sequence[LowerTier], key: OffloadKey, now: float) -> LookupResult:
        unknown = False
        for lower in lowers:
            if lower.owned is not None:
                if lower.holds_key(key, now):
                    return LookupResult.HIT_PENDING
            elif lower.shared is not None:
                presence = lower.shared.presence(key, now)
                if presence:
                    return LookupResult.HIT_PENDING
                if presence is None:
                    lower.shared.ask(key, now)
                    unknown = True
        return LookupResult.RETRY if unknown else LookupResult.MISS

    def locate(self, keys: Sequence[OffloadKey], now: float) -> list[str | None]:
        """For each key the name of the highest tier that holds it ready, or None."""
        cpu_name = self.board.cpu.name
        result: list[str | None] = []
        for key in keys:
            if self.board.cpu.ready(key) is not None:
                result.append(cpu_name)
                continue
            for lower in self.board.lowers:
                if lower.owned is not None:
                    found = lower.owned.ready(key) is not None
                else:
                    found = lower.shared is not None and lower.shared.presence(key, now) is True
                if found:
                    result.append(lower.name)
                    break
            else:
                result.append(None)
        return result

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """These keys, in prefix order, were used by one request: told leaf to root, so no parent ages first."""
        owned = [self.board.cpu, *(lower.owned for lower in self.board.lowers if lower.owned is not None)]
        for tier in owned:
            state = tier.table.state
            found = map(tier.directory.get, reversed(keys))
            slots = [slot for slot in found if slot is not None and state[slot] == READY]
            if slots:
                tier.touch(slots)

    # -- jobs of the engine --------------------------------------------------------------------------------------

    def submit(self, job: TransferJob, now: float, request_id: RequestId | None = None) -> None:
        """Begin a load or a store of GPU blocks. Its result comes out of `take_finished` under the job's id.

        A load that names a request ends that request's leases once it holds the rows itself.
        """
        if job.job_id in self._open_loads or job.job_id in self._open_stores:
            raise UsageError(f"job {job.job_id} is under way already")
        if job.kind is JobKind.LOAD:
            load = LoadRequest(self._loads, job, now)
            load.age = self._claims.next_age
            self._open_loads[job.job_id] = load
            self._claims.add(load)
            load.take_rows(now)
            if request_id is not None:
                self.end_request(request_id, now)
        else:
            store = StoreRequest(self._stores, job, now)
            self._open_stores[job.job_id] = store
            if self._closing:
                store.stop(dropped(DropReason.CLOSING))
        self.pump(now)

    def cancel(self, job_id: JobId, now: float) -> None:
        """End a job early. Its result still comes, after the copies under way have ended."""
        self._stop(job_id, CANCELLED)
        self.pump(now)

    def _stop(self, job_id: JobId, outcome: BlockOutcome) -> None:
        request = self._open_loads.get(job_id) or self._open_stores.get(job_id)
        if request is not None:
            request.stop(outcome)

    def reserve(self, request_id: RequestId, keys: Sequence[OffloadKey], now: float) -> Reservation:
        """Ask for keys to be brought into rows and leased to a request; may be called again with more keys."""
        reservation = self._reservations.ask(request_id, keys, self._claims.next_age)
        self._claims.add(reservation)
        self.pump(now)
        return reservation

    def reservation(self, request_id: RequestId) -> Reservation | None:
        """What a request asked for and got so far, in O(1)."""
        return self._reservations.by_request.get(request_id)

    def end_request(self, request_id: RequestId, now: float) -> None:
        """The request no longer needs its leases (loaded, finished, aborted)."""
        reservation = self._reservations.by_request.get(request_id)
        if reservation is not None:
            self._claims.remove(reservation)
            self._reservations.end(request_id)

    # -- what the data plane tells -------------------------------------------------------------------------------

    def finish(self, result: JobResult, now: float) -> None:
        """A job of `take_jobs` ended in time."""
        self._in_flight(self.board.running, result.job_id).finish(result, now)

    def late(self, job_id: JobId, now: float) -> None:
        """A job passed its deadline; `ended` will follow when its I/O is really over."""
        owner = self._in_flight(self.board.running, job_id)
        self.board.late_jobs[job_id] = owner
        owner.late(now)

    def ended(self, job_id: JobId, now: float) -> None:
        """The I/O of a late job is over, however it ended."""
        self._in_flight(self.board.late_jobs, job_id).ended(now)

    @staticmethod
    def _in_flight(jobs: dict[JobId, InFlight], job_id: JobId) -> InFlight:
        try:
            return jobs.pop(job_id)
        except KeyError:
            raise UsageError(f"job {job_id} is not under way") from None

    def answer(self, question: Question, results: Sequence[LookupResult], now: float) -> None:
        """A shared tier's answer to a question. What was asked before a reset says nothing any more."""
        shared = self.board.lowers[question.position - 1].shared
        assert shared is not None
        if question.epoch == self.board.epoch:
            shared.answer(question.keys, results, now)

    # -- time ----------------------------------------------------------------------------------------------------

    def pump(self, now: float) -> None:
        """Let everything that can go on go on. Call after outcomes were told, and when `next_deadline` has passed."""
        self._pumped_at = now
        self._expire(now)
        self._reservations.lapse(now)
        self._loads.copy_arrived()
        while True:
            blocked = self._claims.serve(self._open_stores.values(), now)
            self._demotions.plan(now)
            self._collect_changes()
            found_rows = self.board.shortage and self.board.cpu.available
            if not found_rows and not self._claims.truncate(blocked, now):
                break
        self._finish_requests(now)

    def _expire(self, now: float) -> None:
        for open_jobs in (self._open_loads, self._open_stores):
            for request in open_jobs.values():
                deadline = request.job.deadline
                if deadline is not None and now >= deadline and request.stopping is None:
                    if isinstance(request, StoreRequest):
                        request.stop(dropped(DropReason.NO_ROW))
                    else:
                        request.stop(LATE_OUTCOME)

    def _finish_requests(self, now: float) -> None:
        ended = [job_id for job_id, load in self._open_loads.items() if not load.open]
        for job_id in ended:
            load = self._open_loads.pop(job_id)
            if load.outcomes.count(LOADED) == len(load.keys):
                self.touch(load.keys)
            else:
                good = (outcome is not None and outcome.ok for outcome in load.outcomes)
                self.touch(list(compress(load.keys, good)))
            self.board.finished.append(load.result(now))
        if ended:
            self._claims.drop_ended_loads()
        for job_id in [job_id for job_id, store in self._open_stores.items() if not store.open]:
            self.board.finished.append(self._open_stores.pop(job_id).result(now))

    def next_deadline(self, now: float) -> float | None:
        """The next time, not before `now`, at which `pump` has something to do although nothing was told."""
        times = [
            request.job.deadline
            for open_jobs in (self._open_loads, self._open_stores)
            for request in open_jobs.values()
            if request.job.deadline is not None and request.stopping is None
        ]
        times += [self._claims.wake_at, *self._reservations.deadlines()]
        soonest = min((time for time in times if time > self._pumped_at), default=math.inf)
        return max(now, soonest) if soonest < math.inf else None

    # -- reset and closing ---------------------------------------------------------------------------------------

    def reset(self, now: float) -> int:
        """New weights: nothing from before is reachable in any tier from here on. Returns the new epoch.

        Slots with transfers under way are quarantined until those have ended; waiting stores are dropped and waiting
        loads cancelled, loads that ended but were not taken yet included.
        """
        self.board.epoch += 1
        for store in self._open_stores.values():
            store.stop(dropped(DropReason.RESET))
        for load in self._open_loads.values():
            load.stop(CANCELLED)
            load.disown()
        self.board.finished = [_disowned(result) for result in self.board.finished]
        self._reservations.reset()
        self._claims.drop_reservations()
        self._demotions.reset()
        self.board.cpu.reset()
        for lower in self.board.lowers:
            if lower.owned is not None:
                lower.owned.reset()
            if lower.shared is not None:
                lower.shared.reset()
        self.board.fills.clear()
        self.pump(now)
        return self.board.epoch

    def close(self, now: float) -> None:
        """No new stores; what waits for a row is dropped, what is queued for lower tiers goes on until `abandon`."""
        self._closing = self._demotions.closing = True
        for store in self._open_stores.values():
            store.stop(dropped(DropReason.CLOSING))
        for load in self._open_loads.values():
            load.stop(CANCELLED)
        self._reservations.reset()
        self._claims.drop_reservations()
        self.pump(now)

    def drain(self, now: float) -> None:
        """While closing: demote rows that still owe it to a lower tier."""
        self._demotions.flush(now)
        self._collect_changes()

    def abandon(self) -> int:
        """Give up what is still queued for lower tiers; returns how many blocks that drops."""
        return self._demotions.drop_queued(DropReason.CLOSING)

    # -- taking out ----------------------------------------------------------------------------------------------

    def take_jobs(self) -> list[Emission]:
        """The jobs to run, each once."""
        jobs, self.board.outbox = self.board.outbox, []
        return jobs

    def take_finished(self) -> list[JobResult]:
        """Results of the engine's own jobs, each once."""
        finished, self.board.finished = self.board.finished, []
        return finished

    def take_questions(self) -> list[Question]:
        """Lookups that shared tiers are to answer."""
        return [
            Question(lower.position, tuple(keys), self.board.epoch)
            for lower in self.board.lowers
            if lower.shared is not None and (keys := lower.shared.take_questions())
        ]

    def take_events(self) -> list[OffloadingEvent]:
        """What became reachable or ceased to be, in order, each once."""
        events = list(self._events)
        self._events.clear()
        return events

    def _collect_changes(self) -> None:
        board = self.board
        for lower in board.lowers:
            if lower.owned is not None and lower.owned.changes:
                for removed, keys in lower.owned.take_changes():
                    self._publish(lower.plan.medium, keys, removed)
                    if removed:
                        self._demotions.evicted_below(lower, keys)
        for removed, keys in board.cpu.take_changes():
            self._publish(board.cpu_plan.medium, keys, removed)

    def _publish(self, medium: Medium, keys: list[OffloadKey], removed: bool) -> None:
        if self._limits.events_max and keys:
            self._events.append(OffloadingEvent(tuple(keys), medium, removed))
            if len(self._events) > self._limits.events_max:
                self.events_lost += len(self._events.popleft().keys)

    # -- figures -------------------------------------------------------------------------------------------------

    @property
    def backlog(self) -> int:
        """Blocks that may still reach lower tiers; those that are late were given up."""
        return self._demotions.backlog

    @property
    def under_way(self) -> int:
        """Blocks queued for or under way to lower tiers, late ones included."""
        return self._demotions.under_way

    @property
    def owed(self) -> int:
        """Rows that a lower tier has yet to receive."""
        return self._demotions.owing

    @property
    def idle(self) -> bool:
        """True when nothing is under way and nothing waits."""
        return not (self.board.running or self.board.late_jobs or self._open_loads or self._open_stores or self.backlog)

    def counters(self, position: int) -> TierCounters:
        return self.board.counters(position)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every slot sum, free list, directory and counter agrees."""
        self.board.cpu.check()
        for lower in self.board.lowers:
            if lower.owned is not None:
                lower.owned.check()


def _disowned(result: JobResult) -> JobResult:
    """A result that a reset overtook: what was loaded before it must not be taken for valid."""
    outcomes = tuple(
        tuple(CANCELLED if outcome is LOADED else outcome for outcome in group) for group in result.outcomes
    )
    return replace(result, outcomes=outcomes)
