"""Row admission: the order in which loads, reservations and stores get rows, and which rows are freed for them.

Loads and reservations are served before stores, the oldest first. A request that is short of rows takes dirty rows,
then the rows of the youngest leases. If that is not enough, all younger requests wait. A request that waits for a lower
tier, or has as much in flight as it may, blocks no other request; but while a reservation wants more, no younger
reservation gets rows.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from kvtier.control.flow.demotions import Demotions
from kvtier.control.flow.loads import LoadRequest
from kvtier.control.flow.promotions import Promotions
from kvtier.control.flow.row_request import RowRequest
from kvtier.control.flow.stores import StoreRequest
from kvtier.control.reservations import Reservation, Reservations
from kvtier.control.state import ControlState
from kvtier.control.tiers.slot_table import RETIRED
from kvtier.types.jobs import MISSING, DropReason, dropped

NEVER = 1 << 120
"""An age that no request reaches."""
TIE_BITS, OWNERS_MAX = 40, 256


class Ages(list[int]):
    """Ages of requests in order, each once. Every call takes O(log n) steps and one move of memory."""

    def add(self, age: int) -> None:
        """Add an age, if it is not here."""
        at = bisect_left(self, age)
        if at == len(self) or self[at] != age:
            self.insert(at, age)

    def discard(self, age: int) -> None:
        """Remove an age, if it is here."""
        at = bisect_left(self, age)
        if at < len(self) and self[at] == age:
            del self[at]

    def after(self, age: int) -> int:
        """The first that is above this one, or `NEVER`."""
        at = bisect_right(self, age)
        return self[at] if at < len(self) else NEVER


class FairAges:
    """Ages of requests, each once: start tags of start-time fair queuing (Goyal, Vin and Cheng, 1996), in rows.

    An age is `now`, the age of the last reservation that was served, or the end of its owner's last one, if later.
    """

    def __init__(self) -> None:
        self.now = self._number = 0
        self._ends: dict[int, int] = {}

    def next(self, owner: int = 0, rows: int = 0) -> int:
        """The age of a new request of an owner for so many rows."""
        self._number += 1
        start = max(self.now, self._ends.get(owner, 0)) >> TIE_BITS
        self._ends[owner] = start + rows << TIE_BITS
        if len(self._ends) > OWNERS_MAX:
            self._ends = {each: end for each, end in self._ends.items() if end > self.now}
        return start << TIE_BITS | self._number


class WaitingLoads:
    """Loads that lack blocks of which no transfer is under way: those that are due, and those that wait.

    A load waits for room in the tier (or root) of its next block, or for transfers of its own (`LoadRequest.full`). It
    is due again when there is room, when that block changed (`AwaitedKeys`) or the health of any tier, and on `add`.
    """

    def __init__(self, promotions: Promotions) -> None:
        self._promotions = promotions
        self._control = promotions.control
        self.due = Ages()
        self._in_root: dict[tuple[int, int], Ages] = {}
        self.waiting: dict[int, Ages | None] = {}
        self._health: list[object] = []

    def add(self, age: int) -> None:
        """A load is due: it is new, or one of its transfers has ended."""
        self._end_wait(age)
        self.due.add(age)

    def remove(self, age: int) -> None:
        """A load is looked at now, or has ended."""
        self._end_wait(age)
        self.due.discard(age)

    def wait(self, load: LoadRequest, now: float) -> None:
        """Nothing can be done for a load at the moment."""
        key = load.next_key
        place = None
        if not load.full:
            lower = self._promotions.source(key, load.tried.get(load.todo[0], 0), now)
            if lower is None:
                self.due.add(load.age)
                return
            root = lower.roots.of(*lower.index.slots((key,))) if lower.roots.several else 0
            place = self._in_root.setdefault((lower.position, root), Ages())
            place.add(load.age)
        self.waiting[load.age] = place
        self._control.awaited.add(key, load.age)

    def _end_wait(self, age: int) -> None:
        if age in self.waiting:
            place = self.waiting.pop(age)
            self._control.awaited.discard(age)
            if place is not None:
                place.discard(age)

    def next(self, last: int, now: float) -> int:
        """The oldest load above the age `last` that is to be looked at, or `NEVER`."""
        if self.waiting:
            self._look_at_tiers(now)
        first = self.due.after(last)
        if self.waiting:
            quota = self._promotions.quota(now)
            short = bool(quota) and not self._control.cpu.available  # the oldest may make rows free for itself
            for (position, root), ages in self._in_root.items():
                if ages and (short or quota.has(position, root)):
                    first = min(first, ages.after(last))
        return first

    def _look_at_tiers(self, now: float) -> None:
        health: list[object] = []
        for lower in self._control.lowers:
            health.append(lower.may_load(now))
            if lower.roots.any_silent:
                health.append([late > 0 for late in lower.roots.late])
        if health != self._health:
            self._health = health
            for age in list(self.waiting):
                self.add(age)
        for age in self._control.awaited.take_changed():
            self.add(age)


class RowAdmission:
    """All requests that want rows. `wake_at` is when the next patience ends, infinite if no request is patient.

    A step looks at loads that are due (`WaitingLoads`), at the oldest reservation that is not served, and at those of
    which a fill ended, up to the first that still wants more.
    """

    def __init__(
        self, control: ControlState, demotions: Demotions, reservations: Reservations, patience_seconds: float
    ) -> None:
        self.control = control
        self.wake_at = math.inf
        self.ages = FairAges()
        self._demotions = demotions
        self._reservations = reservations
        self._patience_seconds = patience_seconds
        self._requests: dict[int, LoadRequest | Reservation] = {}
        self._loads = WaitingLoads(reservations.promotions)
        self._reserving = Ages()
        self._reservations_due = Ages()
        self._revoked: list[Reservation] = []
        self._stores: dict[int, StoreRequest] = {}
        self._stores_waiting = Ages()

    # -- requests -----------------------------------------------------------------------------------------------

    def add(self, request: LoadRequest | Reservation) -> None:
        """A request joins, or is back: it lacks blocks again."""
        age = request.age
        self._requests[age] = request
        if isinstance(request, Reservation):
            self._reserving.add(age)
            self._reservations_due.add(age)
        elif request.todo:
            self._loads.add(age)

    def add_store(self, store: StoreRequest) -> None:
        """A store that has not ended, be it that it waits for rows or not."""
        self._stores[store.age] = store
        if store.todo:
            self._stores_waiting.add(store.age)

    def remove(self, request: RowRequest | StoreRequest) -> None:
        """A request has ended."""
        age = request.age
        if type(request) is LoadRequest:
            if self._requests.pop(age, None) is not None:
                self._loads.remove(age)
        elif type(request) is StoreRequest:
            del self._stores[age]
            if self._stores_waiting:
                self._stores_waiting.discard(age)
        elif self._requests.pop(age, None) is not None:
            self._reserving.discard(age)
            self._reservations_due.discard(age)

    def take_filled(self, ages: Sequence[int], now: float) -> None:
        """Fills ended for the requests of these ages, or they were stopped: copy what arrived, look at what is left."""
        for age in sorted(set(ages)):
            request = self._requests.get(age)
            if type(request) is LoadRequest:
                request.copy_promoted(now)
                if request.todo:
                    self._loads.add(age)
                else:
                    self._loads.remove(age)
            elif request is not None:
                self._reservations_due.add(age)
            elif age in self._stores and self._stores[age].todo:
                self._stores_waiting.add(age)

    @property
    def wanting(self) -> bool:
        """True if a load or a reservation lacks blocks that are not on their way yet."""
        return bool(self._loads.due or self._loads.waiting) or any(
            self._requests[age].todo for age in self._reservations_due
        )

    def drop_reservations(self) -> None:
        """After a reset, or closing: only loads are left."""
        self._requests = {age: request for age, request in self._requests.items() if isinstance(request, LoadRequest)}
        self._reserving, self._reservations_due = Ages(), Ages()

    # -- serving -------------------------------------------------------------------------------------------------

    def serve(self, now: float) -> RowRequest | None:
        """Give out what rows there are. Returns the request that is short of rows, if there is one.

        `control.shortage` is then the number of rows that the first waiting request lacks.
        """
        self.wake_at = math.inf
        self.control.shortage = 0
        if self.control.cpu.table.counts[RETIRED] == self.control.num_rows:
            self._send_away()
        blocked = None
        if self._loads.due or self._loads.waiting or self._reserving:
            blocked = self._serve_oldest(now)
            for reservation in self._revoked:
                self.add(reservation)
            self._revoked.clear()
        if blocked is None and self._stores_waiting:
            self._serve_stores(now)
        return blocked

    def _send_away(self) -> None:
        """Every row has erred twice: there will be none any more."""
        for request in self._requests.values():
            if isinstance(request, LoadRequest):
                request.stop(MISSING)
            else:
                request.truncate()
                self._reservations_due.add(request.age)
        for store in self._stores.values():
            store.stop(dropped(DropReason.NO_ROW))

    def _serve_oldest(self, now: float) -> RowRequest | None:
        if self.control.awaited.ages:
            for lower in self.control.lowers:
                for _, keys in lower.index.changes:
                    self.control.awaited.on_change(keys)
        age, unserved, wanting = 0, False, False
        while True:
            age = min(self._loads.next(age, now), self._next_reservation(age, unserved, wanting))
            if age == NEVER:
                return None
            request = self._requests[age]
            if isinstance(request, LoadRequest):
                self._loads.remove(age)
            else:
                self._reservations_due.discard(age)
                if not unserved and not request.served:
                    request.on_turn(now)
                    unserved = True
            self.control.shortage = self._serve_one(request, now) if request.todo else 0
            if self.control.shortage:
                self.add(request)
                return request
            if isinstance(request, LoadRequest):
                if request.todo:
                    self._loads.wait(request, now)
            else:
                wanting = bool(request.todo)
                if wanting:
                    self._reservations_due.add(age)
                self.complete(request, now)

    def _next_reservation(self, last: int, unserved: bool, wanting: bool) -> int:
        """The next reservation to look at: at first the oldest not served; none while an older one wants more."""
        if wanting:
            return NEVER
        return (self._reservations_due if unserved else self._reserving).after(last)

    def _serve_one(self, request: RowRequest, now: float) -> int:
        """The number of rows that the request could use and did not get."""
        while request.todo:
            before = len(request.todo)
            short = request.advance(now)
            usable = request.usable(now) if short else 0
            if usable <= 0:
                break
            if request.short_since is None or len(request.todo) < before:
                request.short_since = now
            patience_ends = request.short_since + self._patience_seconds
            if self.make_way(min(short, usable), patient=now < patience_ends):
                continue
            if now < patience_ends and self._demotions.cleaning:
                self.wake_at = min(self.wake_at, patience_ends)
                return short
            revoked = self._reservations.revoke_younger(request.age)
            if revoked is None:
                return short
            if revoked.age in self._requests:
                self.add(revoked)
            else:
                self._revoked.append(revoked)
        request.short_since = None
        return 0

    def _serve_stores(self, now: float) -> None:
        while (age := self._stores_waiting.after(0)) != NEVER:
            store = self._stores[age]
            while store.todo and not store.advance(now):
                patience_ends = store.started + self._patience_seconds
                if now < patience_ends:
                    self.wake_at = min(self.wake_at, patience_ends)
                elif self.make_way(len(store.todo), patient=False):
                    continue
                self.control.shortage = len(store.todo)
                return
            self._stores_waiting.discard(age)

    def make_way(self, count: int, patient: bool) -> bool:
        """Make dirty rows clean, unwritten; True when that made room."""
        before = self.control.cpu.available
        self._demotions.drop_dirty(count - before, patient)
        return self.control.cpu.available > before

    # -- the end of waiting --------------------------------------------------------------------------------------

    def complete(self, reservation: Reservation, now: float) -> None:
        """A reservation that is served leaves; from now on its lease runs."""
        if reservation.served:
            self.ages.now = max(self.ages.now, reservation.age)
            self._reservations.lease(reservation, now)
            self.remove(reservation)

    def truncate(self, request: RowRequest | None, now: float) -> bool:
        """Truncate a reservation that will not get more rows to what it has. True when that was done."""
        if not isinstance(request, Reservation) or not self._cannot_grow(request):
            return False
        request.truncate()
        self.complete(request, now)
        return True

    def _cannot_grow(self, reservation: Reservation) -> bool:
        """True when no row will become free but by this request's own doing."""
        if self.control.running or self.control.late_jobs:
            taken = self.control.cpu.table.counts[RETIRED] + len(self.control.cpu.retained.slots)
            return len(reservation.rows) >= self.control.num_rows - taken
        return not self._reservations.has_older_leases(reservation.age)
