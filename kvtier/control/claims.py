"""Who gets rows next: loads and reservations in order of age, then stores; and what gives way to them.

The oldest is served first. One that is short of rows takes them from rows that only wait to be written below, then
from the youngest leases; if that is not enough everybody younger waits. One that waits for a tier below, or has as
much in motion as it may, holds nobody up, but a reservation that wants more lets no younger one take leases.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from kvtier.control.board import Board
from kvtier.control.demotion import Demotions
from kvtier.control.loads import LoadRequest
from kvtier.control.reservations import Reservation, Reservations
from kvtier.control.slots import SlotState
from kvtier.control.stores import StoreRequest
from kvtier.jobs import MISSING, DropReason, dropped

Claim = LoadRequest | Reservation


class Claims:
    """Everything that wants rows. `wake_at` is when somebody's patience ends, infinite when nobody is waiting so."""

    def __init__(self, board: Board, demotions: Demotions, reservations: Reservations, patience_seconds: float) -> None:
        self.board = board
        self.wake_at = math.inf
        self._demotions = demotions
        self._reservations = reservations
        self._patience_seconds = patience_seconds
        self.next_age = 1
        self._claims: dict[int, Claim] = {}

    # -- who is there --------------------------------------------------------------------------------------------

    def add(self, claim: Claim) -> None:
        """A claim joins as the youngest, or a reservation is back at its own age: it asked for more, or was revoked."""
        self._claims[claim.age] = claim
        self.next_age = max(self.next_age, claim.age + 1)

    def remove(self, claim: Claim) -> None:
        self._claims.pop(claim.age, None)

    def drop_reservations(self) -> None:
        """After a reset, or closing: only loads are left."""
        self._claims = {age: claim for age, claim in self._claims.items() if isinstance(claim, LoadRequest)}

    def drop_ended_loads(self) -> None:
        for claim in [c for c in self._claims.values() if isinstance(c, LoadRequest) and not c.open]:
            self.remove(claim)

    # -- serving -------------------------------------------------------------------------------------------------

    def serve(self, stores: Iterable[StoreRequest], now: float) -> Claim | None:
        """Give out what rows there are. Returns the claim that is short of rows, if there is one.

        `board.shortage` then says how many rows whoever is first in line lacks.
        """
        self.wake_at = math.inf
        self.board.shortage = 0
        if self.board.cpu.table.counts[SlotState.RETIRED] == self.board.num_rows:
            self._send_away(stores)
        blocked = self._serve_claims(now)
        if blocked is None:
            self._serve_stores(stores, now)
        return blocked

    def _send_away(self, stores: Iterable[StoreRequest]) -> None:
        """Every row has erred twice: there will be none any more."""
        for claim in self._claims.values():
            if isinstance(claim, LoadRequest):
                claim.stop(MISSING)
            else:
                claim.truncate()
        for store in stores:
            store.stop(dropped(DropReason.NO_ROW))

    def _serve_claims(self, now: float) -> Claim | None:
        unserved = wanting = False
        for age in sorted(self._claims):
            claim = self._claims[age]
            if isinstance(claim, Reservation):
                if wanting:
                    continue
                if not unserved and not claim.served:
                    claim.oldest(now)
                    unserved = True
            self.board.shortage = self._serve_claim(claim, now)
            if self.board.shortage:
                return claim
            if isinstance(claim, Reservation):
                wanting = bool(claim.todo)
                self.settle(claim, now)
        return None

    def _serve_claim(self, claim: Claim, now: float) -> int:
        """How many rows the claim could use and did not get."""
        while claim.todo:
            before = len(claim.todo)
            short = claim.advance(now)
            if not short:
                break
            if claim.short_since is None or len(claim.todo) < before:
                claim.short_since = now
            patience_ends = claim.short_since + self._patience_seconds
            if self._make_way(short, patient=now < patience_ends):
                continue
            if now < patience_ends and self._demotions.cleaning:
                self.wake_at = min(self.wake_at, patience_ends)
                return short
            revoked = self._reservations.revoke_younger(claim.age)
            if revoked is None:
                return short
            self.add(revoked)
        claim.short_since = None
        return 0

    def _serve_stores(self, stores: Iterable[StoreRequest], now: float) -> None:
        for store in stores:
            while store.todo and not store.advance(now):
                patience_ends = store.started + self._patience_seconds
                if now < patience_ends:
                    self.wake_at = min(self.wake_at, patience_ends)
                elif self._make_way(len(store.todo), patient=False):
                    continue
                self.board.shortage = len(store.todo)
                return

    def _make_way(self, count: int, patient: bool) -> bool:
        """Free rows that only wait to be written below; True when that made room."""
        before = self.board.cpu.available
        self._demotions.give_way(count - before, patient)
        return self.board.cpu.available > before

    # -- the end of waiting --------------------------------------------------------------------------------------

    def settle(self, reservation: Reservation, now: float) -> None:
        """A reservation that is served leaves; from now on its lease runs."""
        if reservation.served:
            reservation.leased_until = now + self._reservations.lease_seconds
            self.remove(reservation)

    def truncate(self, claim: Claim | None, now: float) -> bool:
        """Cut a reservation that is short of rows for good to what it has. True when that was done."""
        if not isinstance(claim, Reservation) or not self._cannot_grow(claim):
            return False
        claim.truncate()
        self.settle(claim, now)
        return True

    def _cannot_grow(self, reservation: Reservation) -> bool:
        """True when no row will become free but by this request's own doing."""
        if self.board.running or self.board.late_jobs:
            retired = self.board.cpu.table.counts[SlotState.RETIRED]
            return len(reservation.rows) >= self.board.num_rows - retired
        return not self._reservations.older_leases(reservation.age)
