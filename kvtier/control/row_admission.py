"""Row admission: the order in which loads, reservations and stores get rows, and which rows are freed for them.

Loads and reservations are served before stores, the oldest first. A request that is short of rows takes dirty rows,
then the rows of the youngest leases. If that is not enough, all younger requests wait. A request that waits for a lower
tier, or has as much in flight as it may, blocks no other request; but while a reservation wants more, no younger
reservation gets rows.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from kvtier.control.flow.demotions import Demotions
from kvtier.control.flow.loads import LoadRequest
from kvtier.control.flow.row_request import RowRequest
from kvtier.control.flow.stores import StoreRequest
from kvtier.control.reservations import Reservation, Reservations
from kvtier.control.state import ControlState
from kvtier.control.tiers.slot_table import RETIRED
from kvtier.types.jobs import MISSING, DropReason, dropped


class RowAdmission:
    """All requests that want rows. `wake_at` is when the next patience ends, infinite if no request is patient."""

    def __init__(
        self, control: ControlState, demotions: Demotions, reservations: Reservations, patience_seconds: float
    ) -> None:
        self.control = control
        self.wake_at = math.inf
        self._demotions = demotions
        self._reservations = reservations
        self._patience_seconds = patience_seconds
        self._requests: dict[int, LoadRequest | Reservation] = {}

    # -- requests -----------------------------------------------------------------------------------------------

    def add(self, request: LoadRequest | Reservation) -> None:
        """A request joins as the youngest. A reservation that asks for more, or was revoked, is back at its own age."""
        self._requests[request.age] = request

    def remove(self, request: RowRequest) -> None:
        self._requests.pop(request.age, None)

    @property
    def wanting(self) -> bool:
        """True if a load or a reservation lacks blocks that are not on their way yet."""
        return any(request.todo for request in self._requests.values())

    def drop_reservations(self) -> None:
        """After a reset, or closing: only loads are left."""
        self._requests = {age: request for age, request in self._requests.items() if isinstance(request, LoadRequest)}

    # -- serving -------------------------------------------------------------------------------------------------

    def serve(self, stores: Collection[StoreRequest], now: float) -> RowRequest | None:
        """Give out what rows there are. Returns the request that is short of rows, if there is one.

        `control.shortage` is then the number of rows that the first waiting request lacks.
        """
        self.wake_at = math.inf
        self.control.shortage = 0
        if self.control.cpu.table.counts[RETIRED] == self.control.num_rows:
            self._send_away(stores)
        blocked = self._serve_oldest(now) if self._requests else None
        if blocked is None and stores:
            self._serve_stores(stores, now)
        return blocked

    def _send_away(self, stores: Collection[StoreRequest]) -> None:
        """Every row has erred twice: there will be none any more."""
        for request in self._requests.values():
            if isinstance(request, LoadRequest):
                request.stop(MISSING)
            else:
                request.truncate()
        for store in stores:
            store.stop(dropped(DropReason.NO_ROW))

    def _serve_oldest(self, now: float) -> RowRequest | None:
        unserved = wanting = False
        for age in sorted(self._requests):
            request = self._requests[age]
            if not isinstance(request, LoadRequest):
                if wanting:
                    continue
                if not unserved and not request.served:
                    request.oldest(now)
                    unserved = True
            self.control.shortage = self._serve_one(request, now) if request.todo else 0
            if self.control.shortage:
                return request
            if not isinstance(request, LoadRequest):
                wanting = bool(request.todo)
                self.complete(request, now)
        return None

    def _serve_one(self, request: RowRequest, now: float) -> int:
        """How many rows the request could use and did not get."""
        while request.todo:
            before = len(request.todo)
            short = request.advance(now)
            if not short:
                break
            if request.short_since is None or len(request.todo) < before:
                request.short_since = now
            patience_ends = request.short_since + self._patience_seconds
            if self._make_way(short, patient=now < patience_ends):
                continue
            if now < patience_ends and self._demotions.cleaning:
                self.wake_at = min(self.wake_at, patience_ends)
                return short
            revoked = self._reservations.revoke_younger(request.age)
            if revoked is None:
                return short
            self.add(revoked)
        request.short_since = None
        return 0

    def _serve_stores(self, stores: Collection[StoreRequest], now: float) -> None:
        for store in stores:
            while store.todo and not store.advance(now):
                patience_ends = store.started + self._patience_seconds
                if now < patience_ends:
                    self.wake_at = min(self.wake_at, patience_ends)
                elif self._make_way(len(store.todo), patient=False):
                    continue
                self.control.shortage = len(store.todo)
                return

    def _make_way(self, count: int, patient: bool) -> bool:
        """Make dirty rows clean, unwritten; True when that made room."""
        before = self.control.cpu.available
        self._demotions.drop_dirty(count - before, patient)
        return self.control.cpu.available > before

    # -- the end of waiting --------------------------------------------------------------------------------------

    def complete(self, reservation: Reservation, now: float) -> None:
        """A reservation that is served leaves; from now on its lease runs."""
        if reservation.served:
            reservation.leased_until = now + self._reservations.lease_seconds
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
        return not self._reservations.older_leases(reservation.age)
