"""Base of loads and reservations: they bring keys into rows, from the tiers that have them."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence

from kvtier.control.flow.promotions import PromotionQuota, PromotionRequest, Promotions
from kvtier.control.state import FillWaiter
from kvtier.control.tiers.slot_table import READY
from kvtier.types.keys import OffloadKey


class RowRequest(FillWaiter):
    """A request that wants keys in rows. `todo` are the indices of the keys that are not there nor on their way.

    `age` orders the requests. `tried` has for some keys a mask of the lower tiers that could not load them.
    `short_since` is when the request last found too few rows.
    """

    keys: list[OffloadKey]
    todo: deque[int]

    def __init__(self, promotions: Promotions, age: int = 0) -> None:
        self.promotions = promotions
        self.age = age
        self.tried: dict[int, int] = {}
        self.walked = False
        self.short_since: float | None = None

    @abstractmethod
    def advance(self, now: float) -> int:
        """Bring keys into rows, as far as there are rows. Returns how many rows it could use at once and did not get.

        That is 0 also when what is left waits for nothing but lower tiers or transfers of its own.
        """

    def usable(self, now: float) -> int:
        """The rows for which there is room in the tier of the next block, after an `advance` that found too few."""
        index = self.todo[0]
        lower = self.promotions.source(self.keys[index], self.tried.get(index, 0), now)
        return len(self.todo) if lower is None else self.promotions.quota(now).left(lower, self.keys[index])

    @abstractmethod
    def _hold(self, ready: dict[int, int]) -> None:
        """These keys, by index, are in these ready rows: pin them."""

    @abstractmethod
    def _wait(self, indices: Sequence[int]) -> None:
        """The rows of these keys are being filled; `on_fills` is called when that has ended."""

    @abstractmethod
    def _miss(self, index: int) -> None:
        """No tier has this key."""

    def _on_load_failure(self, indices: Iterable[int], position: int) -> None:
        """The tier at `position` could not load these keys: it is not tried again for them."""
        bit = self.promotions.control.lowers[position - 1].bit
        self.tried |= {index: self.tried.get(index, 0) | bit for index in indices}

    def promote(self, room: int, quota: PromotionQuota | None, now: float) -> int:
        """Hold the keys that are in rows, wait for those on their way, promote up to `room` others; returns how many.

        `quota` says how many each lower tier may be asked for, and is used up. Without it, only rows are looked at.
        """
        requests = self._collect(room, quota, now)
        started = self.promotions.start(requests, now, self) if requests else 0
        self._wait([request.index for request in requests[:started]])
        self.todo.extendleft([request.index for request in reversed(requests[started:])])
        return started

    def _collect(self, room: int, quota: PromotionQuota | None, now: float) -> list[PromotionRequest]:
        """The keys to promote.

        The first walk goes over all keys, so that what is in rows already is pinned before anything is evicted for
        the rest. Later walks stop at the first key without room, so that waiting costs O(1).
        """
        table, directory = self.promotions.control.cpu.table, self.promotions.control.cpu.directory
        ready: dict[int, int] = {}
        requests: dict[OffloadKey, PromotionRequest] = {}
        skipped: list[int] = []
        filling: dict[int, int] = {}
        while self.todo and not (self.walked and skipped):
            index = self.todo.popleft()
            key = self.keys[index]
            row = directory.get(key)
            if row is None and quota is not None and key not in requests:
                lower = self.promotions.source(key, self.tried.get(index, 0), now)
                if lower is None:
                    self._miss(index)
                elif len(requests) < room and quota.take(lower, key):
                    requests[key] = PromotionRequest(key, lower, index)
                else:
                    skipped.append(index)
            elif row is None:
                skipped.append(index)
            elif table.state[row] == READY:
                room -= not table.pins[row]
                ready[index] = row
            else:
                filling[index] = row
        if filling:
            self.promotions.control.wait_for_fills(self, filling.items())
            self._wait(list(filling))
        if ready:
            self._hold(ready)
        self.walked = True
        self.todo.extendleft(reversed(skipped))
        return list(requests.values())
