"""Lookups and reservations of one engine: which rows are leased to which of its requests, within bounds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvtier.control.reservations import Reservation
from kvtier.control.tiers.owned_tier import OwnedTier
from kvtier.service import wire
from kvtier.service.open_lookups import OpenLookups
from kvtier.service.quotas import PoolState
from kvtier.service.wire import LATE, LEASED, MISSING, PENDING, UNKNOWN, Breach, Item
from kvtier.tier.contract import LookupResult
from kvtier.types.keys import OffloadKey, RequestId

WAITING_MAX = 4096
"""Reservations of an engine that may wait; others are misses."""
REQUESTS_MAX = 65536
"""Requests of an engine that may hold or wait for something."""
STATES = {
    LookupResult.HIT: LEASED,
    LookupResult.HIT_PENDING: PENDING,
    LookupResult.RETRY: UNKNOWN,
    LookupResult.MISS: MISSING,
}


@dataclass(slots=True, eq=False)
class Waiting:
    """A `Reserve` that has no answer yet: `reservation` once it has begun.

    The first `worth` keys are worth a load; the first `count` are reserved, fewer where there is no room for more.
    """

    number: int
    request: str
    keys: list[OffloadKey]
    worth: int
    count: int
    deadline: float = math.inf
    reservation: Reservation | None = None

    @property
    def is_served(self) -> bool:
        """True if it can be answered."""
        return self.reservation is not None and (self.reservation.served or self.reservation.ended)


@dataclass(slots=True, eq=False)
class Leases:
    """Rows of a request by key, of which `found` without a reservation; the numbers that it waits for.

    `void` are rows leased before a reset, pinned until the engine drops them. `brought`: positions of the lower tiers
    that brought keys up. With `computes` the engine computes what is in no row. `revoked`: the engine was asked for it.
    """

    rows: dict[OffloadKey, int] = field(default_factory=dict)
    found: int = 0
    brought: dict[OffloadKey, int] = field(default_factory=dict)
    waiting: dict[int, Waiting] = field(default_factory=dict)
    void: list[int] = field(default_factory=list)
    computes: bool = False
    revoked: bool = False

    @property
    def num_rows(self) -> int:
        """Rows that are pinned."""
        return len(self.rows) + len(self.void)

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to keep."""
        return not (self.rows or self.void or self.waiting or self.computes)

    def on_reset(self) -> None:
        """Nothing that was leased holds any more. The rows stay pinned."""
        self.void += self.rows.values()
        self.rows.clear()
        self.brought.clear()
        self.computes = False


class HoldsRows(Protocol):
    """Rows of an engine beside those that are leased to its requests."""

    @property
    def held(self) -> int:
        """The number of these rows."""


class Leasing:
    """The leases of the requests of one engine, which is `number` for the control plane. `out` takes the answers.

    `copies` holds the engine's other rows.
    """

    def __init__(self, number: int, pool: PoolState, out: list[Item], copies: HoldsRows) -> None:
        self.leases: dict[str, Leases] = {}
        self.lookups = OpenLookups(pool, out, self._lease_found)
        self.found = 0
        self.leased = 0
        self.reserving = 0
        self._number = number
        self._pool = pool
        self._out = out
        self._copies = copies
        self._waiting: dict[int, Waiting] = {}
        self._to_begin: dict[int, Waiting] = {}

    @property
    def held(self) -> int:
        """Rows that the engine holds: leased, lent, in copies, or on their way for its reservations."""
        return self.leased + self.reserving + self._copies.held

    @property
    def has_work(self) -> bool:
        """True if a lookup or a reservation is open, or leases are beyond the engine's bound."""
        return bool(self._waiting) or self.lookups.look_at < math.inf or self.found > self._pool.quotas.found_most

    def leased_rows(self) -> Iterator[int]:
        """The rows that are leased to requests, those of the latest request first."""
        return (row for leases in reversed(self.leases.values()) for row in leases.rows.values())

    @property
    def _cpu(self) -> OwnedTier:
        return self._pool.plane.control.cpu

    # -- lookups -------------------------------------------------------------------------------------------------

    def _lease_found(
        self, item: wire.Ask, keys: Sequence[OffloadKey], found: Sequence[LookupResult]
    ) -> tuple[bytes, wire.Places]:
        """(states of these keys, places): what is in rows is leased, as far as the bounds go."""
        leases, directory, quotas = self._of(item.request), self._cpu.directory, self._pool.quotas
        room = min(quotas.found_room(self.found), quotas.pinned_most - self.held)
        rows, states, new = list[int](), bytearray(), dict[OffloadKey, int]()
        for key, result in zip(keys, found, strict=True):
            state = STATES[result]
            if state == LEASED:
                row = leases.rows.get(key, new.get(key))
                if row is None and len(new) < room:
                    row = new[key] = directory[key]
                if row is None:
                    state = PENDING
                else:
                    rows.append(row)
            states.append(state)
        if new:
            self._lease(leases, new)
            self._count_found(leases, len(new))
        self._keep(item.request, leases)
        return bytes(states), self._places(rows)

    def _lease(self, leases: Leases, rows: dict[OffloadKey, int]) -> None:
        self._cpu.pin(list(rows.values()))
        leases.rows |= rows
        leases.revoked = False
        self.leased += len(rows)

    def _count_found(self, leases: Leases, count: int) -> None:
        leases.found += count
        self.found += count
        self._pool.quotas.found += count

    def _of(self, request: str) -> Leases:
        leases = self.leases.get(request)
        return Leases() if leases is None else leases

    def _keep(self, request: str, leases: Leases) -> None:
        if not leases.is_empty:
            self.leases[request] = leases

    def _places(self, rows: Sequence[int]) -> wire.Places:
        generation = self._cpu.table.generation
        return wire.Places.of(rows, [generation[row] for row in rows])

    # -- reservations --------------------------------------------------------------------------------------------

    def reserve(self, item: wire.Reserve, keys: list[OffloadKey], now: float) -> None:
        """Bring up what is worth a load; the answer comes when it is there. Raises Breach for a number that waits."""
        if item.number in self._waiting:
            raise Breach(f"number {item.number} waits already")
        if len(self._waiting) >= WAITING_MAX or len(self.leases) >= REQUESTS_MAX:
            self.lookups.answer_missing(item.number, len(keys))
            return
        leases = self._of(item.request)
        count = self._worth(leases, keys, now)
        waiting = Waiting(item.number, item.request, keys, count, count, now + self._pool.settings.reservation_seconds)
        self._waiting[item.number] = self._to_begin[item.number] = leases.waiting[item.number] = waiting
        self._keep(item.request, leases)
        self._begin_waiting(now)

    def _worth(self, leases: Leases, keys: list[OffloadKey], now: float) -> int:
        """The number of keys, in their order, that are worth a load; once it is not all, only those in rows are.

        Of several groups all is loaded or nothing, because each group must have its part.
        """
        if not self._pool.settings.chooses:
            return len(keys)
        if leases.computes:
            return next((at for at, key in enumerate(keys) if self._cpu.ready(key) is None), len(keys))
        count = self._pool.plane.choice.worth_loading(keys, now)
        leases.computes = count < len(keys)
        return count if not leases.computes or self._pool.geometry.num_groups == 1 else 0

    def _begin_waiting(self, now: float) -> bool:
        """Begin reservations in their order, as far as the engine's bound goes. True if one began.

        One that does not fit waits for leases of other requests, at most until its deadline. Then, or if there is
        nothing to wait for, it gets what fits.
        """
        begun = 0
        while self._to_begin:
            waiting = next(iter(self._to_begin.values()))
            room = self._pool.quotas.pinned_most - self.held
            if waiting.count > room:
                if now < waiting.deadline and self._may_get_rows_back(waiting.request):
                    break
                waiting.count = max(0, room)
            name = RequestId(f"{self._number}\0{waiting.number}")  # no request that the control plane follows has it
            waiting.reservation = self._pool.plane.reserve(name, waiting.keys[: waiting.count], now, self._number)
            self.reserving += waiting.count
            del self._to_begin[waiting.number]
            begun += 1
        return begun > 0

    def _may_get_rows_back(self, request: str) -> bool:
        """True if rows that others than this request hold will be free without it."""
        return bool(self.reserving or self._copies.held) or any(
            leases.rows and not leases.waiting and name != request for name, leases in self.leases.items()
        )

    @property
    def wakes_at(self) -> float:
        """The time at which a reservation is to be begun that did not fit, or a lookup goes on."""
        if not self._to_begin:
            return self.lookups.look_at
        return min(next(iter(self._to_begin.values())).deadline, self.lookups.look_at)

    def advance(self, now: float) -> bool:
        """Answer reservations that are served, begin others. True if the control plane is to be pumped again."""
        looked = self.lookups.go_on(now)
        if not self._waiting:
            return looked
        served = [each for each in self._waiting.values() if each.is_served]
        for waiting in served:
            leases = self.leases[waiting.request]
            self._answer(leases, waiting, now)
            self._forget(leases, waiting, now)
            if leases.is_empty:
                del self.leases[waiting.request]
        return self._begin_waiting(now) or bool(served) or looked

    def _answer(self, leases: Leases, waiting: Waiting, now: float) -> None:
        """The request gets the rows of a reservation, which the control plane cannot take back from then on."""
        reservation = waiting.reservation
        assert reservation is not None
        rows = {key: reservation.rows[at] for key, at in reservation.index.items() if at in reservation.rows}
        self._lease(leases, {key: row for key, row in rows.items() if key not in leases.rows})
        leases.brought |= {key: position for key, position in reservation.brought.items() if key in rows}
        there = [rows.get(key) if at < waiting.count else None for at, key in enumerate(waiting.keys)]
        states = bytearray([MISSING if row is None else LEASED for row in there])
        places = self._places([row for row in there if row is not None])
        if MISSING in states[: waiting.worth]:
            self._mark_late(states, waiting, now)
        self._out.append(wire.Found(waiting.number, bytes(states), places))

    def _mark_late(self, states: bytearray, waiting: Waiting, now: float) -> None:
        """Tell what is in a tier, and was not in a row in time, from what is nowhere."""
        missing = [at for at in range(waiting.worth) if states[at] == MISSING]
        found = self._pool.plane.lookup([waiting.keys[at] for at in missing], now, ask=False)
        for at, result in zip(missing, found, strict=True):
            if result in (LookupResult.HIT, LookupResult.HIT_PENDING):
                states[at] = LATE

    def _forget(self, leases: Leases, waiting: Waiting, now: float) -> None:
        """A reservation waits no more."""
        del self._waiting[waiting.number], leases.waiting[waiting.number]
        if waiting.reservation is None:
            del self._to_begin[waiting.number]
        else:
            self._pool.plane.end_request(waiting.reservation.request_id, now)
            self.reserving -= waiting.count

    # -- the end of leases ---------------------------------------------------------------------------------------

    def drop(self, request: str, now: float) -> None:
        """The engine has forgotten what the request was found, and what it waits for."""
        self.lookups.drop(request)
        leases = self.leases.pop(request, None)
        if leases is None:
            return
        rows = [*leases.rows.values(), *leases.void]
        self._cpu.unpin(rows)
        self.leased -= len(rows)
        self._count_found(leases, -leases.found)
        for waiting in list(leases.waiting.values()):
            self._forget(leases, waiting, now)

    def drop_all(self, now: float) -> None:
        """Every lease ends."""
        self.lookups.drop_all()
        for request in list(self.leases):
            self.drop(request, now)

    def end_waiting(self, now: float, answers: bool) -> None:
        """No reservation goes on; what is leased stays so. With `answers` each is a miss."""
        for waiting in list(self._waiting.values()):
            self._forget(self.leases[waiting.request], waiting, now)
            if answers:
                self.lookups.answer_missing(waiting.number, len(waiting.keys))

    def on_reset(self, now: float) -> None:
        """Another engine has reset the pool. Rows that are leased stay pinned until this one drops them."""
        self.lookups.drop_all()
        self.end_waiting(now, answers=True)
        for leases in self.leases.values():
            leases.on_reset()

    # -- taking back ---------------------------------------------------------------------------------------------

    @property
    def will_return_rows(self) -> bool:
        """True if a request holds rows and waits for nothing here."""
        return any(each.rows and not each.waiting for each in self.leases.values())

    @property
    def rows_wanted_back(self) -> int:
        """Rows of other requests of the engine without which it is beyond a bound, or a reservation of it waits."""
        beyond = self.found - self._pool.quotas.found_most
        waiting = next(iter(self._to_begin.values()), None)
        short = 0 if waiting is None else waiting.count + self.held - self._pool.quotas.pinned_most
        return max(0, beyond, short)

    def revocable(self, rows: int) -> list[tuple[str, int]]:
        """The youngest requests that hold so many rows in all, with their rows, but for those named before."""
        named: list[tuple[str, int]] = []
        for request, leases in reversed(self.leases.items()):
            if rows <= 0:
                break
            if leases.rows and not leases.waiting:
                rows -= leases.num_rows
                if not leases.revoked:
                    leases.revoked = True
                    named.append((request, leases.num_rows))
        return named
