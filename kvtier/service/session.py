"""An engine at a pool: the rows that are lent and leased to it, its copies in flight, and the answers it is sent.

No I/O and no clock. A session is given what its engine sent (`handle`) and what its workers reported (`on_copied`); the
pool sends `take_items` and pumps the control plane. Every number of an engine is compared with what it was given: one
that was not is a `Breach`, which ends the connection.

A promise ends by the engine's word or with its processes, never by time. After `lose` nothing is promised any more, and
rows that a copy of the engine may touch stay as they are until `on_exit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from errno import ECONNRESET
from itertools import groupby
from typing import Any

from kvtier.control.plane.control_plane import ControlPlane
from kvtier.control.reservations import Reservation
from kvtier.errors import KVTierError
from kvtier.service import wire
from kvtier.service.wire import LEASED, MISSING, PENDING, UNKNOWN, Item
from kvtier.tier.contract import LookupResult
from kvtier.types.arrays import int_array
from kvtier.types.geometry import Geometry
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import GPUGroup, JobKind, JobResult, TransferJob
from kvtier.types.keys import JobId, OffloadKey, RequestId, key_group

LENT_MIN = 64
LENT_SHARE = 32
"""Rows lent ahead to an engine are at most this part of all."""
LEASED_SHARE = 8
"""Rows leased to what an engine asks for, beyond reservations and copies, are at most this part of all."""
STATES = {
    LookupResult.HIT: LEASED,
    LookupResult.HIT_PENDING: PENDING,
    LookupResult.RETRY: UNKNOWN,
    LookupResult.MISS: MISSING,
}


EARLY_MAX = 1024
"""Reports of workers that may be kept until the engine's own word of their jobs comes."""


class Breach(KVTierError):
    """An engine named what it does not have, or broke an order of messages."""


@dataclass(slots=True)
class Copy:
    """A copy that workers of an engine carry out. `left`: those that have not reported. `errors`: of each block."""

    job: int
    rows: list[int]
    generations: list[int]
    left: set[int]
    errors: list[int]
    fills: bool


@dataclass(slots=True)
class Waiting:
    """A `Reserve` that is not served yet."""

    keys: list[OffloadKey]
    reservation: Reservation


@dataclass(slots=True)
class Leases:
    """The rows of a request by key, and the answers that it waits for by number."""

    rows: dict[OffloadKey, int] = field(default_factory=dict)
    waiting: dict[int, Waiting] = field(default_factory=dict)


class Session:
    """An engine of a pool. `number` distinguishes it; `workers` copy for it."""

    def __init__(self, number: int, plane: ControlPlane, geometry: Geometry, pool: JobNumbers) -> None:
        self.number = number
        self.plane = plane
        self.geometry = geometry
        self._pool = pool
        self._workers = range(geometry.world_size)
        self._lent: dict[int, int] = {}
        self._wanted = 0
        self._requests: dict[str, Leases] = {}
        self._leased = 0
        self._copies: dict[int, Copy] = {}
        self._early: list[tuple[int, wire.Copied]] = []
        self._last_job = 0
        self._jobs: dict[JobId, int] = {}
        self._items: list[Item] = []
        self.lost = False

    # -- from the engine -----------------------------------------------------------------------------------------

    def handle(self, item: Any, now: float) -> None:
        """Take in one item. Raises Breach, WireError. Pump the control plane afterwards, then `advance`."""
        match item:
            case wire.Ask():
                self._ask(item, now)
            case wire.Reserve():
                self._reserve(item, now)
            case wire.Drop():
                self._drop(item.request, now)
            case wire.Load():
                self._load(item, now)
            case wire.Fill():
                self._fill(item, now)
            case wire.Return():
                self._return(self._take_lent(item.places))
            case wire.Want():
                self._wanted = max(0, item.rows)
            case _:
                raise Breach(f"{type(item).__name__} is not served")
        if self._early and self._early[0][1].job in self._copies:
            early, self._early = self._early, []
            for worker, report in early:
                self.on_copied(worker, report)

    def _ask(self, item: wire.Ask, now: float) -> None:
        """The states of these keys; what is in rows is leased, as far as the bound goes."""
        keys = self._keys(item.keys)
        leases = self._requests.setdefault(item.request, Leases())
        cpu, rows, states = self.plane.control.cpu, list[int](), bytearray()
        for key, found in zip(keys, self.plane.lookup(keys, now), strict=True):
            state = STATES[found]
            if state == LEASED:
                row = leases.rows.get(key)
                if row is None and self._leased * LEASED_SHARE < len(cpu.table):
                    row = leases.rows[key] = cpu.directory[key]
                    cpu.pin((row,))
                    self._leased += 1
                if row is None:
                    state = PENDING
                else:
                    rows.append(row)
            states.append(state)
        self._items.append(wire.Found(item.number, bytes(states), self._places(rows)))

    def _reserve(self, item: wire.Reserve, now: float) -> None:
        keys = self._keys(item.keys)
        leases = self._requests.setdefault(item.request, Leases())
        leases.waiting[item.number] = Waiting(keys, self.plane.reserve(self._name(item.request), keys, now))

    def _drop(self, request: str, now: float) -> None:
        leases = self._requests.pop(request, None)
        if leases is not None:
            self._unlease(leases)
            self.plane.end_request(self._name(request), now)

    def _unlease(self, leases: Leases) -> None:
        self.plane.control.cpu.unpin(list(leases.rows.values()))
        self._leased -= len(leases.rows)
        leases.rows.clear()

    def _load(self, item: wire.Load, now: float) -> None:
        """The rows get a pin of the copy's own before the request's leases end."""
        leases = self._requests.get(item.request)
        rows, generations = (each.tolist() for each in item.places.unpack())
        table = self.plane.control.cpu.table
        held = set(leases.rows.values()) if leases is not None else set()
        if not held.issuperset(rows) or [int(table.generation[row]) for row in rows] != generations:
            raise Breach("a load names rows that are not leased to its request")
        self._begin_copy(item.job, rows, generations, fills=False)
        self.plane.control.cpu.pin(rows)
        self._drop(item.request, now)

    def _end_load(self, copy: Copy) -> None:
        cpu = self.plane.control.cpu
        good = [row for row, error in zip(copy.rows, copy.errors, strict=True) if not error]
        cpu.touch([row for row in reversed(good) if cpu.has(row, copy.generations[copy.rows.index(row)])])
        cpu.unpin(copy.rows)
        runs = [(len(list(run)), "failed" if error else "loaded", "", error) for error, run in groupby(copy.errors)]
        self._items.append(wire.Ended(copy.job, runs))

    # -- rows lent ahead -----------------------------------------------------------------------------------------

    def _take_lent(self, places: wire.Places) -> list[int]:
        rows: list[int] = places.unpack()[0].tolist()
        generations = places.unpack()[1].tolist()
        if len(set(rows)) < len(rows) or [self._lent.get(row) for row in rows] != generations:
            raise Breach("an engine names rows that were not lent to it")
        for row in rows:
            del self._lent[row]
        return rows

    def _fill(self, item: wire.Fill, now: float) -> None:
        keys = self._keys(item.keys)
        rows = self._take_lent(item.places)
        if len(keys) != len(rows):
            self._return(rows)
            raise Breach("a fill has as many keys as rows")
        generations = item.places.unpack()[1].tolist()
        self._begin_copy(item.job, rows, generations, fills=True)
        groups = []
        for group, run in groupby(range(len(keys)), key=lambda at: key_group(keys[at])):
            at = list(run)
            blocks = GPURuns.whole(range(len(at) * self.geometry.factor), self.geometry.factor)
            places = int_array([rows[i] for i in at]), int_array([generations[i] for i in at])
            groups.append(GPUGroup(group, tuple(keys[i] for i in at), blocks, *places))
        job = TransferJob(self._pool.next(), JobKind.STORE, tuple(groups), None)
        self._jobs[job.job_id] = item.job
        self.plane.fill(job, now)

    def _return(self, rows: list[int]) -> None:
        self.plane.return_lent(rows)

    # -- copies --------------------------------------------------------------------------------------------------

    def _begin_copy(self, job: int, rows: list[int], generations: list[int], fills: bool) -> None:
        if job <= self._last_job:
            raise Breach(f"job {job} came after job {self._last_job}")
        self._last_job = job
        self._copies[job] = Copy(job, rows, generations, set(self._workers), [0] * len(rows), fills)

    def on_copied(self, worker: int, item: wire.Copied) -> None:
        """A worker's part has ended. Raises Breach for a copy that it has not been given, or other outcomes than it has
        blocks."""
        copy = self._copies.get(item.job)
        if copy is None and item.job > self._last_job and len(self._early) < EARLY_MAX:
            self._early.append((worker, item))  # it came before the engine's own word, over another socket
            return
        if copy is None or worker not in copy.left:
            raise Breach(f"worker {worker} reports job {item.job}, which is not in flight")
        errors = [error for count, error in item.outcomes for _ in range(min(count, len(copy.rows) + 1))]
        if len(errors) != len(copy.rows):
            raise Breach(f"worker {worker} reports {len(errors)} blocks of {len(copy.rows)}")
        self._report(copy, worker, errors)

    def _report(self, copy: Copy, worker: int, errors: Sequence[int]) -> None:
        copy.errors = [mine or theirs for mine, theirs in zip(copy.errors, errors, strict=True)]
        copy.left.discard(worker)
        if not copy.left:
            del self._copies[copy.job]
            if copy.fills:
                self._pool.end_copy(copy)  # the control plane's own job ends with it; its result is the engine's
            else:
                self._end_load(copy)

    # -- to the engine -------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Answer reservations that are served, and lend rows. Call after the control plane was pumped."""
        if self.lost:
            return
        for leases in self._requests.values():
            for number, waiting in list(leases.waiting.items()):
                if waiting.reservation.served:
                    del leases.waiting[number]
                    self._on_served(number, leases, waiting)
                    self.plane.end_request(waiting.reservation.request_id, now)
        self._lend(now)

    def _on_served(self, number: int, leases: Leases, waiting: Waiting) -> None:
        """The request gets the rows of a reservation, which the control plane cannot take back from then on."""
        cpu, reservation = self.plane.control.cpu, waiting.reservation
        rows = [reservation.rows.get(reservation.index[key]) for key in waiting.keys]
        new = {key: row for key, row in zip(waiting.keys, rows, strict=True) if row is not None}
        new = {key: row for key, row in new.items() if key not in leases.rows}
        cpu.pin(list(new.values()))
        leases.rows |= new
        self._leased += len(new)
        states = bytes(MISSING if row is None else LEASED for row in rows)
        self._items.append(wire.Found(number, states, self._places([row for row in rows if row is not None])))

    def _lend(self, now: float) -> None:
        most = max(LENT_MIN, len(self.plane.control.cpu.table) // LENT_SHARE)
        missing = min(self._wanted, most) - len(self._lent)
        if missing > 0:
            rows, generations = self.plane.lend(missing, now)
            if rows:
                self._lent.update(zip(rows, generations, strict=True))
                self._items.append(wire.Lent(wire.Places.of(rows, generations)))

    def on_result(self, result: JobResult) -> bool:
        """The control plane's job of a fill has ended. False if it is another session's."""
        job = self._jobs.pop(result.job_id, None)
        if job is None:
            return False
        each = [outcome for group in result.outcomes for outcome in group]
        runs = [
            (len(list(run)), outcome.status.value, outcome.reason.value if outcome.reason else "", outcome.errno)
            for outcome, run in groupby(each)
        ]
        self._items.append(wire.Ended(job, runs))
        return True

    def take_items(self) -> list[Item]:
        """The items for the engine, in order, each once."""
        items, self._items = self._items, []
        return items

    # -- ending --------------------------------------------------------------------------------------------------

    def lose(self, now: float) -> None:
        """The engine's connection has ended: leases that no copy uses end. Lent rows may be in a copy."""
        self.lost = True
        for request in list(self._requests):
            self._drop(request, now)

    def on_exit(self, now: float) -> None:
        """Every process of the engine has exited: no copy goes on. Raises nothing."""
        self.lose(now)
        self._return(list(self._lent))
        self._lent.clear()
        for copy in list(self._copies.values()):
            for worker in sorted(copy.left):
                self._report(copy, worker, [ECONNRESET] * len(copy.rows))

    # -- helpers -------------------------------------------------------------------------------------------------

    def _keys(self, packed: wire.Keys) -> list[OffloadKey]:
        keys = packed.unpack()
        if any(len(key) <= 4 or key_group(key) >= self.geometry.num_groups for key in keys):
            raise Breach("a key of a group that the layout does not have")
        return keys

    def _places(self, rows: Sequence[int]) -> wire.Places:
        generation = self.plane.control.cpu.table.generation
        return wire.Places.of(rows, [generation[row] for row in rows])

    def _name(self, request: str) -> RequestId:
        return RequestId(f"{self.number}:{request}")


class JobNumbers:
    """Numbers of the fills of all sessions of a pool. `end_copy` is called when all workers have reported one."""

    def __init__(self, end_copy: Callable[[Copy], None]) -> None:
        self.end_copy = end_copy
        self._last = 0

    def next(self) -> JobId:
        """The number of a new job."""
        self._last += 1
        return JobId(self._last)
