"""Blocks that are brought up before they are asked for: after all that is asked for, and a bounded number at once."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import islice

from kvtier.control.flow.promotions import Promotions
from kvtier.control.flow.row_request import RowRequest
from kvtier.types.keys import OffloadKey

IN_FLIGHT_MAX = 32
"""Blocks on their way up at once, at most: a load that comes meanwhile waits behind no more of one tier."""
WAIT_SECONDS = 30.0
"""What has not been brought up by then is not wanted any more."""
FRESH_SECONDS = 60.0
"""For so long a block that was brought up and not used counts against the rows that prefetches may take."""


class PrefetchRequest(RowRequest):
    """The blocks of one hint."""

    def __init__(self, owner: Prefetches, keys: Sequence[OffloadKey], deadline: float) -> None:
        super().__init__(owner.promotions)
        self.owner = owner
        self.keys = list(keys)
        self.todo = deque(range(len(keys)))
        self.deadline = deadline
        self.filling = 0

    @property
    def over(self) -> bool:
        """True if nothing is left to do."""
        return not self.todo and not self.filling

    def advance(self, now: float) -> int:
        """A prefetch waits for rows that are free or cold, and makes nothing else wait."""
        room = self.owner.room(now)
        if room > 0:
            self.promote(room, self.promotions.rooms(now, room), now)
        return 0

    def filled(self, index: int, row: int | None, position: int, now: float) -> None:
        self.filling -= 1
        self.owner.filling -= 1
        if row is not None:
            if position:
                self.owner.arrived(self.keys[index], now)
        else:
            if position:
                self._load_failed(index, position)
            self.todo.append(index)

    def _hold(self, ready: dict[int, int]) -> None:
        """They are in rows already."""

    def _wait(self, index: int) -> None:
        self.filling += 1
        self.owner.filling += 1

    def _miss(self, index: int) -> None:
        self.owner.missing += 1


class Prefetches:
    """All prefetches, the oldest first. `waiting` are the blocks that have yet to be brought up.

    Of the blocks that were brought up, `used` were loaded by then and `unused` were evicted, or not loaded in
    `FRESH_SECONDS`; `missing` were in no tier, `late` were not brought up in time.
    """

    def __init__(self, promotions: Promotions, waiting_max: int) -> None:
        self.promotions = promotions
        self.waiting_max = waiting_max
        self.rows_max = max(1, promotions.control.num_rows // 4)
        self.filling = 0
        self.brought = self.used = self.unused = self.missing = self.late = 0
        self._requests: deque[PrefetchRequest] = deque()
        self._fresh: dict[OffloadKey, float] = {}

    @property
    def waiting(self) -> int:
        """Blocks that wait or are on their way."""
        return sum(len(request.todo) + request.filling for request in self._requests)

    def __bool__(self) -> bool:
        """True if anything waits, or was brought up and not used yet."""
        return bool(self._requests or self._fresh)

    @property
    def busy(self) -> bool:
        """True if anything waits or is on its way."""
        return bool(self._requests)

    def add(self, keys: Sequence[OffloadKey], now: float) -> int:
        """Bring these distinct keys up, of which none is in the CPU tier. Returns how many of the first are taken."""
        taken = keys[: max(0, self.waiting_max - self.waiting)]
        if taken:
            self._requests.append(PrefetchRequest(self, taken, now + WAIT_SECONDS))
        return len(taken)

    def room(self, now: float) -> int:
        """How many blocks more may be on their way now."""
        taken = len(self._fresh) + self.filling
        cpu = self.promotions.control.cpu
        return min(IN_FLIGHT_MAX - self.filling, self.rows_max - taken, cpu.available)

    def advance(self, now: float, idle: bool) -> None:
        """Go on, if `idle`: nothing that was asked for waits for rows."""
        for key in list(islice(self._fresh, self.rows_max)):
            if self._fresh[key] + FRESH_SECONDS > now:
                break
            del self._fresh[key]
            self.unused += 1
        for request in list(self._requests):
            if now >= request.deadline:
                self.late += len(request.todo)
                request.todo.clear()
            elif idle and request.todo:
                request.advance(now)
        while self._requests and self._requests[0].over:
            self._requests.popleft()

    def next_at(self) -> float:
        """When something changes by time alone."""
        times = [request.deadline for request in self._requests if request.todo]
        times += [brought + FRESH_SECONDS for brought in islice(self._fresh.values(), 1)]
        return min(times, default=math.inf)

    def arrived(self, key: OffloadKey, now: float) -> None:
        """A block was brought up."""
        self.brought += 1
        self._fresh.pop(key, None)
        self._fresh[key] = now

    def loaded(self, keys: Sequence[OffloadKey]) -> None:
        """The engine loads these blocks."""
        for key in keys:
            if self._fresh.pop(key, None) is not None:
                self.used += 1

    def evicted(self, keys: Sequence[OffloadKey]) -> None:
        """The CPU tier has these blocks no more."""
        for key in keys:
            if self._fresh.pop(key, None) is not None:
                self.unused += 1

    def stop(self) -> None:
        """Nothing more is brought up; what is on its way arrives."""
        for request in self._requests:
            request.todo.clear()
        while self._requests and self._requests[0].over:
            self._requests.popleft()

    def reset(self) -> None:
        """After a reset what is on its way is worth nothing, and does not count."""
        self._requests.clear()
        self._fresh.clear()
        self.filling = 0
