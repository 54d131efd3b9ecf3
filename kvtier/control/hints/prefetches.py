"""Blocks that are promoted before they are asked for: after all that is asked for, and a bounded number at once."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import islice

from kvtier.control.flow.promotions import Promotions
from kvtier.control.flow.row_request import RowRequest
from kvtier.types.keys import OffloadKey

IN_FLIGHT_MAX = 32
"""Blocks on their way up at once, at most: a load that comes meanwhile waits behind no more of one tier."""
REST_SECONDS = 0.001
WAIT_SECONDS = 30.0
"""What has not been promoted by then is not wanted any more."""
PART_BLOCKS = 64
"""A hint of more blocks is several requests."""
LOOKED_AT_ONCE = 256
"""Blocks that one step looks at, at most."""
FRESH_SECONDS = 60.0
"""For so long a block that was promoted and not used counts against the rows that prefetches may take."""


class PrefetchRequest(RowRequest):
    """Blocks of one hint, at most `PART_BLOCKS`."""

    def __init__(self, owner: Prefetches, keys: Sequence[OffloadKey], deadline: float) -> None:
        super().__init__(owner.promotions)
        self.owner = owner
        self.keys = list(keys)
        self.todo = deque(range(len(keys)))
        self.deadline = deadline

    def advance(self, now: float) -> int:
        """A prefetch waits for rows that are free or cold, and makes nothing else wait."""
        room = self.owner.room(now)
        if room > 0:
            self.promote(room, self.promotions.quota(now, room), now)
        return 0

    def on_fills(self, fills: Sequence[tuple[int, int]], success: bool, position: int, now: float) -> None:
        self.owner.filling -= len(fills)
        indices = [index for index, _ in fills]
        if position and not success:
            self._on_load_failure(indices, position)
        for index in indices:
            if not success:
                self.todo.append(index)
                self.owner.again(self, self.keys[index])
            elif position:
                self.owner.on_arrival(self.keys[index], now)

    def _hold(self, ready: dict[int, int]) -> None:
        """They are in rows already."""
        self.owner.forget(self.keys[index] for index in ready)

    def _wait(self, indices: Sequence[int]) -> None:
        self.owner.filling += len(indices)
        self.owner.forget(map(self.keys.__getitem__, indices))

    def _miss(self, index: int) -> None:
        self.owner.missing += 1
        self.owner.forget((self.keys[index],))


class Prefetches:
    """All prefetches, the oldest first. `waiting` are the blocks that have yet to be promoted, each once.

    Of the blocks that were promoted, `used` were loaded by then and `unused` were evicted, or not loaded in
    `FRESH_SECONDS`; `missing` were in no tier, `late` were not promoted in time.
    """

    def __init__(self, promotions: Promotions, waiting_max: int) -> None:
        self.promotions = promotions
        self.waiting_max = waiting_max
        self.rows_max = max(1, promotions.control.num_rows // 4)
        self.filling = 0
        self.brought = self.used = self.unused = self.missing = self.late = 0
        self._requests: OrderedDict[PrefetchRequest, None] = OrderedDict()
        self._wanted: dict[OffloadKey, None] = {}
        self._fresh: OrderedDict[OffloadKey, float] = OrderedDict()
        self._advanced_at = -math.inf

    @property
    def waiting(self) -> int:
        """Blocks that wait or are on their way."""
        return len(self._wanted) + self.filling

    def __bool__(self) -> bool:
        """True if anything waits, or was promoted and not used yet."""
        return bool(self._wanted or self.filling or self._fresh)

    @property
    def busy(self) -> bool:
        """True if anything waits or is on its way."""
        return bool(self._wanted or self.filling)

    def add(self, keys: Iterable[OffloadKey], now: float) -> int:
        """Bring these keys up, except those in the CPU tier and those that wait already.

        Returns how many of the first are followed: the queue is full for the next one.
        """
        directory, wanted = self.promotions.control.cpu.directory, self._wanted
        room, taken, count = self.waiting_max - self.waiting, list[OffloadKey](), 0
        for key in keys:
            if key not in directory and key not in wanted:
                if len(taken) >= room:
                    break
                taken.append(key)
                wanted[key] = None
            count += 1
        for start in range(0, len(taken), PART_BLOCKS):
            part = taken[start : start + PART_BLOCKS]
            self._requests[PrefetchRequest(self, part, now + WAIT_SECONDS)] = None
        return count

    def room(self, now: float) -> int:
        """The number of blocks that may yet be on their way now."""
        taken = len(self._fresh) + self.filling
        cpu = self.promotions.control.cpu
        return min(IN_FLIGHT_MAX - self.filling, self.rows_max - taken, cpu.available)

    def advance(self, now: float, idle: bool) -> None:
        """Go on, if `idle`: nothing that was asked for waits for rows."""
        self._advanced_at = now
        self._end_fresh(now)
        looked = 0
        for request in list(islice(self._requests, LOOKED_AT_ONCE)):
            if looked >= LOOKED_AT_ONCE or (now < request.deadline and not (idle and self.room(now) > 0)):
                break
            looked += len(request.todo)
            if now >= request.deadline:
                self._give_up(request)
            else:
                request.advance(now)
            if not request.todo:
                del self._requests[request]

    def _end_fresh(self, now: float) -> None:
        for _ in range(LOOKED_AT_ONCE):
            if not self._fresh or next(iter(self._fresh.values())) + FRESH_SECONDS > now:
                break
            self._fresh.popitem(last=False)
            self.unused += 1

    def _give_up(self, request: PrefetchRequest) -> None:
        """Blocks that a request has not promoted by now are late."""
        self.late += len(request.todo)
        self.forget(request.keys[index] for index in request.todo)
        request.todo.clear()

    def next_at(self) -> float:
        """The time at which something changes by time alone; soon, if one step was not enough for what is due."""
        times = [request.deadline for request in islice(self._requests, 1)]
        if self._fresh:
            times.append(next(iter(self._fresh.values())) + FRESH_SECONDS)
        return max(min(times, default=math.inf), self._advanced_at + REST_SECONDS)

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """These blocks wait no more."""
        for key in keys:
            self._wanted.pop(key, None)

    def again(self, request: PrefetchRequest, key: OffloadKey) -> None:
        """A block of a request could not be loaded from where it was asked for."""
        if self.promotions.demotions.closing:
            return
        self._wanted[key] = None
        self._requests[request] = None
        self._requests.move_to_end(request, last=False)

    def on_arrival(self, key: OffloadKey, now: float) -> None:
        """A block was promoted."""
        self.brought += 1
        self._fresh.pop(key, None)
        self._fresh[key] = now

    def on_load(self, keys: Sequence[OffloadKey]) -> None:
        """The engine loads these blocks."""
        for key in keys:
            if self._fresh.pop(key, None) is not None:
                self.used += 1

    def on_evict(self, keys: Sequence[OffloadKey]) -> None:
        """The CPU tier has these blocks no more."""
        for key in keys:
            if self._fresh.pop(key, None) is not None:
                self.unused += 1

    def stop(self) -> None:
        """Nothing more is promoted; what is on its way arrives."""
        for request in self._requests:
            request.todo.clear()
        self._requests.clear()
        self._wanted.clear()

    def reset(self) -> None:
        """After a reset what is on its way is worth nothing, and does not count."""
        self._requests.clear()
        self._wanted.clear()
        self._fresh.clear()
        self.filling = 0
