"""An engine's state beside a stack process: what is leased and lent to it, and its jobs. No I/O and no clock.

Items to send wait in `out` until the engine's step sends them; `take_in` is given what has come. Without a connection
(`lose`) nothing is leased, every lookup is a MISS, and stores are dropped; copies in flight end all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from kvtier.service import wire
from kvtier.service.wire import LEASED, PENDING, UNKNOWN, Item, Keys, Places, split
from kvtier.tier.contract import LookupResult
from kvtier.types.arrays import IntArray, int_array
from kvtier.types.jobs import (
    MISSING,
    BlockOutcome,
    BlockStatus,
    DropReason,
    GPUGroup,
    JobKind,
    JobResult,
    TransferJob,
    dropped,
    failed,
)
from kvtier.types.keys import JobId, OffloadKey

RESULTS = {LEASED: LookupResult.HIT, PENDING: LookupResult.HIT_PENDING, UNKNOWN: LookupResult.RETRY}
LENT_MIN = 64


@dataclass(slots=True)
class ClientRequest:
    """A request of the engine: the rows leased to it by key, and the state of what it asked for."""

    id: str
    leased: dict[OffloadKey, tuple[int, int]] = field(default_factory=dict)
    states: dict[OffloadKey, int] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    ended: bool = False

    @property
    def served(self) -> bool:
        """True when all that was asked and reserved has an answer."""
        return not self.waiting


@dataclass(slots=True)
class Job:
    """A job of the engine, and the positions in it of the blocks that are copied."""

    job: TransferJob
    outcomes: list[BlockOutcome | None]
    copied: list[int]
    bytes_moved: int = 0


class EngineCore:
    """The state of one engine. `out` are the items that its next step sends."""

    def __init__(self) -> None:
        self.out: list[Item] = []
        self.connected = True
        self.results: list[JobResult] = []
        self._requests: dict[str, ClientRequest] = {}
        self._asked: dict[int, tuple[ClientRequest, list[OffloadKey]]] = {}
        self._jobs: dict[int, Job] = {}
        self._lent: list[tuple[int, int]] = []
        self._number = 0
        self._wanted = self._stored = 0

    # -- requests ------------------------------------------------------------------------------------------------

    def request(self, request_id: str, keys: Sequence[OffloadKey] = ()) -> ClientRequest:
        """A request; what it may find is asked for with the next send."""
        request = self._requests[request_id] = ClientRequest(request_id)
        self.ask(request, keys)
        return request

    def ask(self, request: ClientRequest, keys: Sequence[OffloadKey]) -> None:
        """Ask which of these keys are there, unless that was asked before."""
        new = [key for key in dict.fromkeys(keys) if key not in request.states]
        self._send_keys(wire.Ask, request, new)

    def reserve(self, request: ClientRequest, keys: Sequence[OffloadKey]) -> None:
        """Have these keys brought into rows and leased; `served` says when that was answered."""
        self._send_keys(wire.Reserve, request, [key for key in dict.fromkeys(keys) if key not in request.leased])

    def _send_keys(self, kind: type[wire.Ask | wire.Reserve], request: ClientRequest, keys: list[OffloadKey]) -> None:
        if not self.connected:
            return
        for _, part in split(keys):
            self._number += 1
            self._asked[self._number] = request, list(part)
            request.waiting.add(self._number)
            request.states.update(dict.fromkeys(part, UNKNOWN))
            self.out.append(kind(request.id, self._number, Keys.of(part)))

    def lookup(self, request: ClientRequest, keys: Sequence[OffloadKey]) -> list[LookupResult]:
        """Presence of these keys: RETRY until an answer has come."""
        if not self.connected:
            return [LookupResult.MISS] * len(keys)
        return [RESULTS.get(request.states.get(key, wire.MISSING), LookupResult.MISS) for key in keys]

    def end(self, request: ClientRequest) -> None:
        """The request's leases end. Idempotent."""
        if not request.ended:
            request.ended = True
            if self._requests.get(request.id) is request:
                del self._requests[request.id]
            self._forget(request)
            if self.connected:
                self.out.append(wire.Drop(request.id))

    def _forget(self, request: ClientRequest) -> None:
        request.leased.clear()
        for number in request.waiting:
            self._asked.pop(number, None)
        request.waiting.clear()

    # -- jobs ----------------------------------------------------------------------------------------------------

    def begin_load(self, job: TransferJob, request: ClientRequest) -> TransferJob | None:
        """Begin to load what is leased to the request; the rest is MISSING. Returns what a worker copies out of rows.

        The request's leases end with it, those of the copy when the workers have reported.
        """
        places = [[request.leased.get(key) for key in group.keys] for group in job.gpu_groups]
        part = self._begin(job, places, MISSING)
        if part is not None:
            rows, generations = _flat(part)
            self.out.append(wire.Load(job.job_id, request.id, Places.of(rows, generations)))
            self._forget(request)
        return part

    def begin_store(self, job: TransferJob) -> TransferJob | None:
        """Begin to store blocks into lent rows, the front of each prefix first; what gets no row is dropped."""
        self._stored += job.num_blocks
        places = []
        for group in job.gpu_groups:
            count = min(len(group.keys), len(self._lent)) if self.connected else 0
            places.append([*self._lent[:count], *[None] * (len(group.keys) - count)])
            del self._lent[:count]
        part = self._begin(job, places, dropped(DropReason.NO_ROW))
        if part is not None:
            rows, generations = _flat(part)
            keys = list(chain.from_iterable(group.keys for group in part.groups))
            self.out.append(wire.Fill(job.job_id, Keys.of(keys), Places.of(rows, generations)))
        return part

    def _begin(
        self, job: TransferJob, places: list[list[tuple[int, int] | None]], without: BlockOutcome
    ) -> TransferJob | None:
        """Keep the job, with this outcome for blocks without a place; the part of it that has places."""
        groups, copied, first = [], list[int](), 0
        for group, found in zip(job.gpu_groups, places, strict=True):
            at = [position for position, place in enumerate(found) if place is not None]
            copied += [first + position for position in at]
            first += len(group.keys)
            there = [place for place in found if place is not None]
            if at:
                rows = int_array([row for row, _ in there]), int_array([generation for _, generation in there])
                runs = group.runs if len(at) == len(group.keys) else group.runs.select(int_array(at))
                groups.append(GPUGroup(group.group, tuple(group.keys[i] for i in at), runs, *rows))
        outcomes: list[BlockOutcome | None] = [without] * first
        for position in copied:
            outcomes[position] = None
        state = self._jobs[job.job_id] = Job(job, outcomes, copied)
        if not groups:
            self._end_job(state)
            return None
        return replace(job, groups=tuple(groups))

    def _end_job(self, state: Job) -> None:
        del self._jobs[state.job.job_id]
        each = iter([outcome or MISSING for outcome in state.outcomes])
        outcomes = tuple(tuple(next(each) for _ in group.keys) for group in state.job.groups)
        self.results.append(JobResult(state.job.job_id, outcomes, state.bytes_moved))

    @property
    def busy(self) -> bool:
        """True while a job has not ended."""
        return bool(self._jobs or self.results)

    # -- what comes ----------------------------------------------------------------------------------------------

    def take_in(self, items: Sequence[Any]) -> None:
        """Record what the stack process sent."""
        for item in items:
            match item:
                case wire.Found():
                    self._on_found(item)
                case wire.Ended():
                    self._on_ended(item)
                case wire.Lent():
                    rows, generations = item.places.unpack()
                    self._lent += zip(rows.tolist(), generations.tolist(), strict=True)
                case wire.Closing():
                    self.lose()

    def _on_found(self, item: wire.Found) -> None:
        found = self._asked.pop(item.number, None)
        if found is None:
            return  # the request has ended
        request, keys = found
        request.waiting.discard(item.number)
        rows, generations = item.places.unpack()
        places = iter(zip(rows.tolist(), generations.tolist(), strict=True))
        for key, state in zip(keys, item.states, strict=True):
            request.states[key] = state
            if state == LEASED:
                request.leased[key] = next(places)

    def _on_ended(self, item: wire.Ended) -> None:
        state = self._jobs.get(item.job)
        if state is None:
            return
        runs = [(count, _outcome(status, reason, errno)) for count, status, reason, errno in item.outcomes]
        outcomes = [outcome for count, outcome in runs for _ in range(count)]
        for position, outcome in zip(state.copied, outcomes, strict=True):
            state.outcomes[position] = outcome
        self._end_job(state)

    def want_rows(self) -> None:
        """Ask for rows ahead: twice what was stored since the last call, and some at least. Once in a while."""
        wanted = max(LENT_MIN, 2 * self._stored)
        self._stored = 0
        if self.connected and wanted != self._wanted:
            self._wanted = wanted
            self.out.append(wire.Want(wanted))

    def lose(self) -> None:
        """The connection has ended: nothing is leased or lent any more."""
        self.connected = False
        self.out.clear()
        self._lent.clear()
        for request in self._requests.values():
            request.states.clear()
            self._forget(request)
        for state in list(self._jobs.values()):
            if state.job.kind is JobKind.STORE:
                for position in state.copied:
                    state.outcomes[position] = dropped(DropReason.TIER_DOWN)
                self._end_job(state)

    def on_copied_alone(self, job_id: JobId, outcomes: Sequence[BlockOutcome]) -> None:
        """A load's copy has ended while there is no connection: its rows were leased, so what the worker says holds."""
        state = self._jobs.get(job_id)
        if state is not None and not self.connected and state.job.kind is JobKind.LOAD:
            for position, outcome in zip(state.copied, outcomes, strict=True):
                state.outcomes[position] = outcome
            self._end_job(state)


def _flat(job: TransferJob) -> tuple[IntArray, IntArray]:
    groups = job.gpu_groups
    rows = int_array(list(chain.from_iterable(group.rows.tolist() for group in groups)))
    return rows, int_array(list(chain.from_iterable(group.generations.tolist() for group in groups)))


def _outcome(status: str, reason: str, errno: int) -> BlockOutcome:
    if status == BlockStatus.FAILED:
        return failed(errno)
    return dropped(DropReason(reason)) if reason else BlockOutcome(BlockStatus(status))
