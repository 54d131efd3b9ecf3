"""Reservations: for engines that look up a hit first and load it later, such as vLLM.

A request asks for keys, perhaps in several phases. It is served when they are in rows and leased to it. Only the oldest
request that is not served may pin rows while it wants more; all others wait without new pins. If the oldest cannot
grow, the youngest leases not yet handed to a load are revoked. If it does not fit even alone, it is truncated to what
fits. So every request is served, and no two wait for each other.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from heapq import heapify, heappop, heappush

from kvtier.control.flow.promotions import Promotions
from kvtier.control.flow.row_request import RowRequest
from kvtier.tier.contract import LookupResult
from kvtier.types.keys import OffloadKey, RequestId

STALE_MIN = 64
"""Times of reservations that have ended, of which this number may be kept however few are open."""


class KeyState(StrEnum):
    WANTED = "wanted"
    FILLING = "filling"
    LEASED = "leased"
    MISSING = "missing"


class Reservation(RowRequest):
    """The keys that a request reserves, and the rows leased to it. `open` keys are WANTED or FILLING.

    `brought`: the position of the lower tier that brought a key up for it. They are hits once they are loaded.
    """

    def __init__(self, owner: Reservations, request_id: RequestId, age: int) -> None:
        super().__init__(owner.promotions, age)
        self.owner = owner
        self.request_id = request_id
        self.keys = []
        self.todo = deque()
        self.index: dict[OffloadKey, int] = {}
        self.state: list[KeyState] = []
        self.rows: dict[int, int] = {}
        self.brought: dict[OffloadKey, int] = {}
        self.open = 0
        self.oldest_since: float | None = None
        self.leased_until = math.inf
        self.ended = False

    def extend(self, keys: Sequence[OffloadKey]) -> None:
        """Add a phase: keys already asked for are not asked again."""
        self.walked = False
        self.leased_until = math.inf
        for key in keys:
            if key not in self.index:
                self.index[key] = len(self.keys)
                self.todo.append(len(self.keys))
                self.keys.append(key)
                self.state.append(KeyState.WANTED)
                self.open += 1

    def answer(self, key: OffloadKey) -> LookupResult | None:
        """The answer for a key once this is served; None if it was not reserved."""
        index = self.index.get(key)
        if index is None:
            return None
        return LookupResult.HIT if self.state[index] is KeyState.LEASED else LookupResult.MISS

    def on_fills(self, fills: Sequence[tuple[int, int]], success: bool, position: int, now: float) -> None:
        own = {index: row for index, row in fills if self.state[index] is KeyState.FILLING}
        if self.ended or not own:
            return
        self.owner.control.filled_ages.append(self.age)
        if success:
            if position:
                self.brought |= {self.keys[index]: position for index in own}
            self._hold(own)
            return
        if position:
            self._on_load_failure(own, position)
        for index in own:
            self.state[index] = KeyState.WANTED
        self.todo.extendleft(own)

    def _hold(self, ready: dict[int, int]) -> None:
        self.owner.control.cpu.pin(list(ready.values()))
        self.rows.update(ready)
        for index in ready:
            self.state[index] = KeyState.LEASED
        self.open -= len(ready)

    def _wait(self, indices: Sequence[int]) -> None:
        for index in indices:
            self.state[index] = KeyState.FILLING

    def _miss(self, index: int) -> None:
        self.state[index] = KeyState.MISSING
        self.open -= 1

    def advance(self, now: float) -> int:
        cpu, quota = self.owner.control.cpu, self.promotions.quota(now)
        self.promote(cpu.available, quota, now)
        return 0 if cpu.available or not quota else len(self.todo)

    def truncate(self) -> None:
        """The keys that are still wanted are misses for the lifetime of the request."""
        for index in self.todo:
            self._miss(index)
        self.todo.clear()

    def expire(self) -> None:
        """The deadline passed: what is wanted or on its way is a miss."""
        self.truncate()
        for index, state in enumerate(self.state):
            if state is KeyState.FILLING:
                self._miss(index)

    def revoke(self) -> None:
        """Take all leases away; the keys are wanted again."""
        rows = list(self.rows.values())
        self.owner.control.cpu.unpin(rows)
        for index in self.rows:
            self.state[index] = KeyState.WANTED
        self.todo = deque(sorted([*self.todo, *self.rows]))
        self.open += len(rows)
        self.rows.clear()
        self.walked = False
        self.oldest_since = None
        self.leased_until = math.inf

    def fail(self) -> None:
        """Nothing is to be had from here on: every key is a miss. The rows stay as they are."""
        self.todo.clear()
        self.rows.clear()
        self.state = [KeyState.MISSING] * len(self.keys)
        self.open = 0

    @property
    def changes_at(self) -> float:
        """The time at which something changes by time alone: the lease lapses, or the turn ends."""
        if self.ended:
            return math.inf
        if self.leased_until < math.inf or self.oldest_since is None:
            return self.leased_until
        return self.oldest_since + self.owner.deadline_seconds

    @property
    def served(self) -> bool:
        """True when every key asked for is leased or missing."""
        return self.open == 0

    def on_turn(self, now: float) -> None:
        """It is this request's turn: its deadline runs from the first time on."""
        if self.oldest_since is None:
            self.oldest_since = now
            self.owner.expect(self, now + self.owner.deadline_seconds)
        if now >= self.oldest_since + self.owner.deadline_seconds:
            self.expire()

    def hits(self) -> list[bool]:
        """For each key in the order asked: True if it is leased in a row."""
        return [state is KeyState.LEASED for state in self.state]


def _none() -> bool:
    return False


class Reservations:
    """All reservations, as they came. Those that change by time alone are `expect`ed in order of their times.

    `has_leases_outside`: a caller pins rows for leases of its own, and will end some of them without being asked.
    """

    def __init__(self, promotions: Promotions, deadline_seconds: float, lease_seconds: float) -> None:
        self.control = promotions.control
        self.promotions = promotions
        self.deadline_seconds = deadline_seconds
        self.lease_seconds = lease_seconds
        self.by_request: dict[RequestId, Reservation] = {}
        self.has_leases_outside: Callable[[], bool] = _none
        self._times: list[tuple[float, int, Reservation]] = []
        self._serials = itertools.count()

    def expect(self, reservation: Reservation, time: float) -> None:
        """Something may change for a reservation at that time."""
        heappush(self._times, (time, next(self._serials), reservation))
        if len(self._times) > STALE_MIN + 2 * len(self.by_request):
            self._times = [each for each in self._times if each[2].changes_at == each[0]]
            heapify(self._times)

    def lease(self, reservation: Reservation, now: float) -> None:
        """A reservation is served: its lease runs from now on."""
        reservation.leased_until = now + self.lease_seconds
        self.expect(reservation, reservation.leased_until)

    def extend(self, request_id: RequestId, keys: Sequence[OffloadKey], age: int) -> Reservation:
        """The request's reservation with these keys added; `age` orders it when it is new."""
        reservation = self.by_request.get(request_id)
        if reservation is None:
            reservation = self.by_request[request_id] = Reservation(self, request_id, age)
        reservation.extend(keys)
        return reservation

    def end(self, request_id: RequestId) -> None:
        """The request is loaded, finished or aborted: its leases end."""
        reservation = self.by_request.pop(request_id, None)
        if reservation is not None:
            reservation.ended = True
            self.control.cpu.unpin(list(reservation.rows.values()))
            reservation.rows.clear()

    def revoke_younger(self, age: int) -> Reservation | None:
        """Revoke the leases of the youngest request that has some and is younger than `age`; it wants them again."""
        younger = [other for other in self.by_request.values() if other.rows and other.age > age]
        youngest = max(younger, key=lambda other: other.age, default=None)
        if youngest is not None:
            youngest.revoke()
        return youngest

    def has_older_leases(self, age: int) -> bool:
        """True if a request older than `age`, or an engine, holds leases, which will end by themselves."""
        return any(other.rows for other in self.by_request.values() if other.age < age) or self.has_leases_outside()

    def lapse(self, now: float) -> None:
        """Leases that were reported and not used in time are revoked; the request may ask again."""
        while self._times and self._times[0][0] <= now:
            time, _, reservation = heappop(self._times)
            if reservation.leased_until == time and reservation.served and reservation.rows:
                self.end(reservation.request_id)

    def next_time(self) -> float:
        """The time at which something here changes by time alone, after the last `lapse`; infinite if nothing does."""
        while self._times and self._times[0][2].changes_at != self._times[0][0]:
            heappop(self._times)
        return self._times[0][0] if self._times else math.inf

    def reset(self) -> None:
        """After a reset nothing that was promised holds."""
        for request_id in list(self.by_request):
            self.end(request_id)
