"""The control plane: lookups, loads, stores, finished jobs and the passing of time in; transfer jobs out.

Synchronous and deterministic: no I/O, no clock and no randomness of its own. One thread touches it. After any call
take what there is to do, and what has ended, with `collect`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from kvtier.control.flow.demotions import Demotions
from kvtier.control.flow.engine_job import EngineJob
from kvtier.control.flow.lent_fills import LentFill
from kvtier.control.flow.load_or_compute import LoadOrCompute
from kvtier.control.flow.loads import CopyJob, LeasedLoad, LoadRequest
from kvtier.control.flow.promotions import Promotions
from kvtier.control.flow.stores import StoreRequest
from kvtier.control.hints.following import Hints
from kvtier.control.jobs import Decisions, JoiningTiers, PresenceQuery, Recipient
from kvtier.control.plane.event_log import EventLog
from kvtier.control.plane.lookups import look_up
from kvtier.control.reservations import Reservation, Reservations
from kvtier.control.row_admission import RowAdmission
from kvtier.control.settings import StackSettings
from kvtier.control.state import ControlState
from kvtier.control.tiers.lower_tier import TierSpec
from kvtier.control.tiers.slot_table import READY
from kvtier.errors import UsageError
from kvtier.tier.contract import LookupResult
from kvtier.types.events import OffloadingEvent
from kvtier.types.hints import HintResult, KVHint
from kvtier.types.jobs import (
    CANCELLED,
    LATE,
    LOADED,
    BlockOutcome,
    DropReason,
    JobKind,
    JobResult,
    TransferJob,
    dropped,
)
from kvtier.types.keys import GroupIndex, JobId, OffloadKey, RequestId

if TYPE_CHECKING:
    from kvtier.control.request_tracker import RequestTracker

NO_DECISIONS = Decisions()
STALE_MIN = 64
"""Deadlines of jobs that have ended, of which this number may be kept however few jobs are open."""


class OpenJobs:
    """`jobs` have not ended; `ended` have, and their results were not taken.

    `expires_at` is the first deadline of those that have not ended and were not stopped, infinite without one.
    """

    def __init__(self) -> None:
        self.jobs: dict[JobId, LoadRequest | StoreRequest] = {}
        self.ended: list[LoadRequest | StoreRequest] = []
        self.expires_at = math.inf
        self._by_age: dict[int, LoadRequest | StoreRequest] = {}
        self._deadlines: list[tuple[float, int, LoadRequest | StoreRequest]] = []

    def begin(self, job: TransferJob) -> None:
        """A job is submitted; `add` follows. Raises UsageError if its id is one of `jobs`."""
        if job.job_id in self.jobs:
            raise UsageError(f"job {job.job_id} is in flight already")
        if job.deadline is not None and job.deadline < self.expires_at:
            self.expires_at = job.deadline

    def add(self, request: LoadRequest | StoreRequest) -> None:
        """A job that began."""
        self.jobs[request.job.job_id] = request
        self._by_age[request.age] = request
        if request.job.deadline is not None:
            heappush(self._deadlines, (request.job.deadline, request.age, request))

    def stop(self, job_id: JobId, outcome: BlockOutcome) -> None:
        """Begin no more copies for a job, if it has not ended: what it lacks has this outcome."""
        request = self.jobs.get(job_id)
        if request is not None:
            request.stop(outcome)
            self.expires_at = self._first_deadline()

    def stop_all(self, reason: DropReason) -> None:
        """Begin no more copies: stores are dropped for this reason, loads cancelled."""
        for request in self.jobs.values():
            request.stop(dropped(reason) if isinstance(request, StoreRequest) else CANCELLED)
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
            del self.jobs[request.job.job_id]
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


class ControlPlane(Recipient):
    """Everything that decides. See the module's docstring for how to drive it.

    `uses` (`RequestTracker`, with `chains`) is there where a policy follows requests, and with `settings.curves`.
    `lend_at` is the time at which rows are lent that are to be written below; infinite unless an engine waits for some.
    """

    def __init__(
        self,
        cpu: TierSpec,
        lowers: Sequence[TierSpec],
        factor: int = 1,
        settings: StackSettings | None = None,
        chains: frozenset[GroupIndex] | None = None,
    ) -> None:
        settings = settings or StackSettings()
        self.control = ControlState(cpu, lowers)
        followed = settings.curves or list(self.control.models)
        self.uses: RequestTracker | None = None
        if followed:
            from kvtier.control.request_tracker import RequestTracker

            self.uses = RequestTracker(self.control, chains, settings.curves)
        self.demotions = Demotions(self.control, settings.watermark_rows, settings.gather_seconds)
        self._promotions = Promotions(self.control, self.demotions)
        self.choice = LoadOrCompute(self._promotions, settings.block_seconds)
        self._factor = factor
        self.reservations = Reservations(self._promotions, settings.reservation_seconds, settings.lease_seconds)
        self.hints = Hints(self.control, self.demotions, self._promotions, settings)
        self._admission = RowAdmission(self.control, self.demotions, self.reservations, settings.patience_seconds)
        self._open = OpenJobs()
        self._fills = set[LentFill]()
        self._pumped_at = self._tick_at = -math.inf
        self._patience_seconds = settings.patience_seconds
        self._short_since = self.lend_at = math.inf
        self.events = EventLog(settings.events_max)
        self._collect_changes()

    # -- looking up ----------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[OffloadKey], now: float, ask: bool = True) -> list[LookupResult]:
        """For each key: HIT (in a row), HIT_PENDING (lower down or on its way), RETRY (unknown yet) or MISS.

        What is unknown is looked up, unless `ask` is False. A lookup that asks is counted once nothing is unknown.
        """
        return look_up(self.control, keys, now, ask)

    def locate(self, keys: Sequence[OffloadKey], now: float) -> list[str | None]:
        """For each key the name of the highest tier that holds it ready, or None."""
        indexes = self.control.indexes
        return [next((index.name for index in indexes if index.presence(key, now)), None) for key in keys]

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """A request used these keys, given in prefix order. Recorded leaf to root, so that no parent ages first."""
        for tier in self.control.owned_tiers:
            if tier.request_policy is not None and self.uses is not None and self.uses.counted:
                continue
            state = tier.table.state
            found = map(tier.directory.get, reversed(keys))
            slots = [slot for slot in found if slot is not None and state[slot] == READY]
            if slots:
                tier.touch(slots)

    # -- jobs of the engine --------------------------------------------------------------------------------------

    def submit(self, job: TransferJob, now: float, request_id: RequestId | None = None) -> None:
        """Begin a load or a store of GPU blocks with what needs no other request's rows. Pump afterwards.

        Its result comes out of `collect` under the job's id. A load that names a request ends that request's
        leases once it holds the rows itself.
        """
        self._open.begin(job)
        if now >= self._tick_at:
            self._tick(now)
        if job.kind is JobKind.LOAD:
            load = LoadRequest(self._promotions, job, now, self._admission.ages.next())
            if self.hints.is_used:
                self.hints.on_load(load.keys)
            self._open.add(load)
            reservation = None if request_id is None else self.reservations.by_request.get(request_id)
            if reservation is not None:
                load.brought = reservation.brought
            if not load.take_rows(now):
                self._admission.add(load)
            if request_id is not None:
                self.end_request(request_id, now)
        else:
            store = StoreRequest(self.demotions, self._factor, job, now, self._admission.ages.next())
            self._open.add(store)
            if self.demotions.closing:
                store.stop(dropped(DropReason.CLOSING))
            elif not self.control.shortage and not store.advance(now):
                self.control.shortage = len(store.todo)
            self._admission.add_store(store)

    def lend(self, count: int, now: float) -> tuple[list[int], list[int]]:
        """(rows, their generations): rows that an engine may fill before it states their keys, `count` at most.

        Each ends with `begin_fill` or `return_lent`. The caller bounds how many are lent, and checks whose they are.
        """
        if now >= self._tick_at:
            self._tick(now)
        cpu = self.control.cpu
        rows = cpu.lend(count) if not self.demotions.closing else []
        self.lend_at = math.inf
        if len(rows) < count and not self.demotions.closing:
            rows += self._lend_late(count - len(rows), now)
        else:
            self._short_since = math.inf
        return rows, cpu.table.generations[rows].tolist()

    def end_lending(self) -> None:
        """No engine waits for rows to be lent any more: the next one that does has all its patience."""
        self._short_since = self.lend_at = math.inf

    def _lend_late(self, count: int, now: float) -> list[int]:
        """Wait, like a store, for rows that are to be written below; then take them anyway."""
        self._short_since = min(self._short_since, now)
        patience_ends = self._short_since + self._patience_seconds
        if now < patience_ends:
            self.lend_at = patience_ends
            return []
        return self.control.cpu.lend(count) if self._admission.make_way(count, patient=False) else []

    def begin_leased_load(
        self, keys: Sequence[OffloadKey], rows: Sequence[int], brought: Mapping[OffloadKey, int], now: float
    ) -> LeasedLoad:
        """An engine's own copy out of ready rows that it had pinned begins; `end_leased_load` follows.

        `brought` has the positions of the lower tiers that brought some keys up for it.
        """
        if self.hints.is_used:
            self.hints.on_load(keys)
        return LeasedLoad(self.demotions, keys, rows, brought, now)

    def end_leased_load(self, load: LeasedLoad, errors: Sequence[int], bytes_moved: int) -> list[BlockOutcome]:
        """The copy has ended, with an errno for each block, 0 for success. Returns what became of each."""
        outcomes = load.end(errors, bytes_moved)
        self.touch([key for key, outcome in zip(load.keys, outcomes, strict=True) if outcome is LOADED])
        return outcomes

    def return_lent(self, rows: Sequence[int]) -> None:
        """These rows were lent, and no copy into them was begun, or all have ended. Pump afterwards."""
        self.control.cpu.end_loan(rows)
        self.control.cpu.unpin(rows)

    def begin_fill(
        self, keys: Sequence[OffloadKey], rows: list[int], on_end: Callable[[Sequence[BlockOutcome]], None], now: float
    ) -> LentFill:
        """An engine's own copies into rows lent to it begin; `LentFill.end` follows. Pump after either.

        `on_end` is called in this step or a later one with what became of each block. A key that is there already is
        PRESENT, and its row is free after the copy.
        """
        if now >= self._tick_at:
            self._tick(now)
        fill = LentFill(self.demotions, self._fills, keys, rows, on_end)
        fill.begin(now)
        if self.demotions.closing:
            fill.stop(DropReason.CLOSING)
        return fill

    def cancel(self, job_id: JobId, now: float) -> None:
        """End a job early. Its result still comes, after the copies in flight have ended."""
        self._open.stop(job_id, CANCELLED)
        self.pump(now)

    def reserve(self, request_id: RequestId, keys: Sequence[OffloadKey], now: float, owner: int = 0) -> Reservation:
        """Bring keys into rows and lease them to a request; owners take turns by rows (`FairAges`). Pump afterwards."""
        if now >= self._tick_at:
            self._tick(now)
        reservation = self.reservations.extend(request_id, keys, self._admission.ages.next(owner, len(keys)))
        self._admission.add(reservation)
        self._admission.serve(now)
        return reservation

    def hint(self, hint: KVHint, now: float) -> HintResult:
        """Follow a hint as far as bounds and quotas allow. Pump afterwards. UsageError for seconds that are none."""
        return self.hints.follow(hint, now)

    def reservation(self, request_id: RequestId) -> Reservation | None:
        """The reservation of a request, in O(1)."""
        return self.reservations.by_request.get(request_id)

    def end_request(self, request_id: RequestId, now: float) -> None:
        """The request no longer needs its leases (loaded, finished, aborted)."""
        reservation = self.reservations.by_request.get(request_id)
        if reservation is not None:
            self._admission.remove(reservation)
            self.reservations.end(request_id)

    # -- what the data plane tells -------------------------------------------------------------------------------

    def finish(self, result: JobResult, now: float) -> None:
        """A job of `collect` ended in time."""
        owner = self.control.finish(result, now)
        if type(owner) is CopyJob and owner.request.todo:
            self._admission.add(owner.request)  # a row was corrupt: the load wants another one

    def on_late(self, job_id: JobId, now: float) -> None:
        """A job passed its deadline; `on_end` follows when its I/O has ended."""
        self.control.on_late(job_id, now)

    def on_end(self, job_id: JobId, now: float) -> None:
        """The I/O of a late job has ended, however it ended."""
        self.control.on_end(job_id, now)

    def answer(self, query: PresenceQuery, results: Sequence[LookupResult], now: float) -> None:
        """A shared tier's answer to a query. What was asked before a reset says nothing any more."""
        if query.epoch == self.control.epoch:
            self.control.lowers[query.position - 1].index.take_answers(query.keys, results, now)
            self.control.awaited.on_change(query.keys)

    def join(self, tiers: JoiningTiers, now: float) -> None:
        """Take in the lower tiers, which were held back: what they hold is found, and stores go to them.

        Not if a reset came that does not hold for them yet: they arrive once more when it does. Nor while closing, or
        once they are held back for good.
        """
        if self.control.joining and tiers.resets == self.control.resets and not self.demotions.closing:
            self.control.join(list(tiers.lowers), tiers.epoch)
            self.demotions.on_join(now)
            self._collect_changes()

    def hold_back(self, now: float) -> None:
        """From here on no lower tier loads or stores; transfers in flight end as usual, and nothing else is sent.

        What the tiers hold is not reachable: loads and reservations that wait for it end with misses.
        """
        self.demotions.drop_queued(DropReason.HELD_BACK)
        self.control.hold_back()
        self.hints.hold_back()
        self.pump(now)

    # -- time ----------------------------------------------------------------------------------------------------

    def pump(self, now: float) -> None:
        """Do all work that is possible now. Call after outcomes were reported, and when `next_deadline` has passed."""
        self._pumped_at, jobs, control = now, self._open, self.control
        if now >= self._tick_at:
            self._tick(now)
        if now >= jobs.expires_at:
            jobs.expire(now)
        if now >= control.reclaim_at:
            control.reclaim(now)
        if self.reservations.by_request:
            self.reservations.lapse(now)
        if self.hints.is_used:
            self.hints.advance(now)
        if now >= self.hints.retention.expires_at:
            self.hints.retention.expire(now)
        if control.filled_ages:
            filled, control.filled_ages = control.filled_ages, []
            self._admission.take_filled(filled, now)
        while True:
            blocked = self._admission.serve(now)
            self.demotions.plan(now)
            self._collect_changes()
            if self.hints.is_used and self.hints.demotions:
                self.hints.demotions.advance(now)
            found_rows = control.shortage and control.cpu.available
            if not found_rows and (blocked is None or not self._admission.truncate(blocked, now)):
                break
        if self.hints.is_used and self.hints.prefetches:
            self.hints.prefetches.advance(now, idle=blocked is None and not self._admission.wanting)
        if control.ended_ages:
            ended, control.ended_ages = control.ended_ages, []
            for request in jobs.end(ended, now):
                self._admission.remove(request)
                if isinstance(request, LoadRequest):
                    self.touch(request.loaded_keys)

    def _tick(self, now: float) -> None:
        """Time has passed, a tick of `TickClock` at least; in shorter steps neither ages nor policies can tell."""
        self._tick_at = self.control.tick_clock.advance(now)
        if self.uses is not None:
            self.uses.advance(now)

    def next_deadline(self, now: float) -> float | None:
        """The next time, not before `now`, at which `pump` has work although no outcome was reported."""
        soonest, pumped_at = math.inf, self._pumped_at
        times = [self._open.expires_at, self.control.reclaim_at, self._admission.wake_at, self.lend_at]
        for lower in self.control.lowers:
            times.append(lower.send_at)
        if self.reservations.by_request:
            times.append(self.reservations.next_time())
        if self.hints.is_used:
            times.append(self.hints.next_at())
        for time in times:
            if pumped_at < time < soonest:
                soonest = time
        return max(now, soonest) if soonest < math.inf else None

    # -- reset and closing ---------------------------------------------------------------------------------------

    def reset(self, now: float) -> int:
        """New weights: nothing from before is reachable in any tier from here on. Returns the new epoch.

        Slots with transfers in flight are quarantined until those have ended; waiting stores are dropped and waiting
        loads cancelled, loads that ended but were not taken yet included.
        """
        self.control.epoch += 1
        self.control.resets += 1
        self._stop_all(DropReason.RESET)
        for request in (*self._open.jobs.values(), *self._open.ended):
            request.outcomes = [CANCELLED if each is LOADED else each for each in request.outcomes]  # of before
        self.demotions.reset()
        for index in self.control.indexes:
            index.reset()
        self.control.fills.clear()
        self.hints.reset()
        self.pump(now)
        return self.control.epoch

    def close(self, now: float) -> None:
        """No new stores; what waits for a row is dropped, what is queued for lower tiers goes on until `abandon`."""
        self.demotions.closing = True
        self.hints.stop()
        self._stop_all(DropReason.CLOSING)
        self.pump(now)

    def _stop_all(self, reason: DropReason) -> None:
        self._open.stop_all(reason)
        for fill in tuple(self._fills):
            fill.stop(reason)
        self.reservations.reset()
        self._admission.drop_reservations()

    def flush(self, now: float) -> None:
        """Write back the gathered rows now, as far as the limits allow."""
        self.demotions.flush(now)
        self._collect_changes()

    def drain(self, now: float) -> None:
        """While closing: write back rows that are dirty for an `on_evict` tier, as far as the limits allow."""
        self.demotions.drain(now)
        self._collect_changes()

    def abandon(self) -> int:
        """Give up what is still queued for lower tiers; returns how many blocks that drops."""
        return self.demotions.drop_queued(DropReason.CLOSING)

    # -- taking out ----------------------------------------------------------------------------------------------

    def collect(self) -> Decisions:
        """All there is to do and all jobs of the engine that have ended, each once."""
        control, queries = self.control, []
        for lower in control.lowers:
            if lower.index.queries:
                queries.append(PresenceQuery(lower.position, tuple(lower.index.take_queries()), control.epoch))
        if not (control.outbox or queries or self._open.ended):
            return NO_DECISIONS
        jobs, control.outbox = control.outbox, []
        return Decisions(jobs, queries, self._open.take_results() if self._open.ended else ())

    def take_events(self) -> list[OffloadingEvent]:
        """Blocks that became reachable or ceased to be, in order, each once."""
        self._collect_changes()
        return self.events.take()

    def announce(self, keys: Sequence[OffloadKey], now: float) -> None:
        """Publish once more which owned tiers have these keys, in their order.

        For routers that have forgotten it, or could not understand it before. Each key is published as removed and
        then as stored, which is right for routers that count what is published as well.
        """
        if not self.events.events_max:
            return
        self._collect_changes()
        for spec, there in self.contents(now, keys):
            self.events.record(spec, there, removed=True)
            self.events.record(spec, there, removed=False)

    def contents(
        self, now: float, keys: Sequence[OffloadKey] | None = None
    ) -> list[tuple[TierSpec, Sequence[OffloadKey]]]:
        """The keys that each owned tier has, of these or of all."""
        control = self.control
        lowers = [(lower.spec, lower.owned) for lower in control.lowers if lower.owned is not None]
        tiers = [(control.cpu_spec, control.cpu), *lowers]
        if keys is None:
            return [(spec, tier.ready_keys()) for spec, tier in tiers]
        return [(spec, [key for key in keys if tier.presence(key, now)]) for spec, tier in tiers]

    def _collect_changes(self) -> None:
        control = self.control
        for lower in control.lowers:
            if lower.index.changes:
                changes, lower.index.changes = lower.index.changes, []
                for removed, keys in changes:
                    if control.awaited.ages:
                        control.awaited.on_change(keys)
                    self.events.record(lower.spec, keys, removed)
                    if removed:
                        self.demotions.on_evict_below(lower, keys)
                        if lower.admission is not None:
                            lower.admission.on_evict(keys)
                    elif self.hints.is_used and self.hints.retention and lower.owned is not None:
                        self.hints.retention.on_store_below(lower.owned, keys)
        if control.cpu.changes:
            changes, control.cpu.changes = control.cpu.changes, []
            for removed, keys in changes:
                self.events.record(control.cpu_spec, keys, removed)
                if removed and self.hints.is_used:
                    self.hints.prefetches.on_evict(keys)

    # -- figures -------------------------------------------------------------------------------------------------

    @property
    def backlog(self) -> int:
        """Blocks that may still reach lower tiers; those that are late were given up."""
        rows = -self.demotions.late
        for lower in self.control.lowers:
            rows += len(lower.queue) + lower.stores_in_flight
        return rows

    @property
    def in_flight(self) -> int:
        """Blocks queued for or in flight to lower tiers, late ones included."""
        return self.backlog + self.demotions.late

    @property
    def dirty_rows(self) -> int:
        """Rows that a lower tier has yet to receive."""
        return self.demotions.dirty.count

    @property
    def idle(self) -> bool:
        """True when nothing is in flight and nothing waits."""
        if self.control.running or self.control.late_jobs or self._open.jobs or self._fills or self.backlog:
            return False
        return not (self.hints.is_used and self.hints.busy)

    def give_up(self) -> None:
        """Nothing here is used after a step that raised: reservations are misses, events say that all was removed."""
        for reservation in list(self.reservations.by_request.values()):
            reservation.fail()
        lowers = [(lower.spec, lower.owned) for lower in self.control.lowers if lower.owned and not lower.held_back]
        for spec, tier in [(self.control.cpu_spec, self.control.cpu), *lowers]:
            for removed, keys in [*tier.take_changes(), (True, list(tier.directory))]:
                self.events.record(spec, keys, removed)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every slot sum, free list, directory and counter agrees."""
        for index in self.control.indexes:
            index.check()
        self.demotions.dirty.check()
        self.hints.retention.check()
