"""Which requests for rows are to be looked at in a step: those for which something has changed, in order of age.

A load that cannot go on waits for one thing. So a step takes as long beside ten thousand waiting loads as beside ten.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from kvtier.control.flow.loads import LoadRequest
from kvtier.control.flow.promotions import Promotions

NEVER = 1 << 62
"""An age that no request reaches."""


class Ages:
    """Ages of requests in order, each once. Every call takes O(log n) steps and one move of memory."""

    def __init__(self) -> None:
        self.in_order: list[int] = []

    def __bool__(self) -> bool:
        return bool(self.in_order)

    def add(self, age: int) -> None:
        """One more, if it is not here."""
        at = bisect_left(self.in_order, age)
        if at == len(self.in_order) or self.in_order[at] != age:
            self.in_order.insert(at, age)

    def discard(self, age: int) -> None:
        """One less, if it is here."""
        at = bisect_left(self.in_order, age)
        if at < len(self.in_order) and self.in_order[at] == age:
            del self.in_order[at]

    def after(self, age: int) -> int:
        """The first that is above this one, or `NEVER`."""
        at = bisect_right(self.in_order, age)
        return self.in_order[at] if at < len(self.in_order) else NEVER


class WaitingLoads:
    """Loads that lack blocks of which no transfer is under way: those that are due, and those that wait.

    A load waits for room in the tier that has its next block, in one root of it, or for transfers of its own
    (`LoadRequest.full`). It is due again when there is room, when something became of that block (`AwaitedKeys`), when
    the health of any tier changed, and on `add`, which follows the end of its transfers.
    """

    def __init__(self, promotions: Promotions) -> None:
        self._promotions = promotions
        self._control = promotions.control
        self._due = Ages()
        self._in_root: dict[tuple[int, int], Ages] = {}
        self._waiting: dict[int, Ages | None] = {}
        self._health: list[object] = []

    def __bool__(self) -> bool:
        return bool(self._due or self._waiting)

    def add(self, age: int) -> None:
        """A load is due: it is new, or one of its transfers has ended."""
        self._end_wait(age)
        self._due.add(age)

    def remove(self, age: int) -> None:
        """A load is looked at now, or has ended."""
        self._end_wait(age)
        self._due.discard(age)

    def wait(self, load: LoadRequest, now: float) -> None:
        """Nothing can be done for a load at the moment."""
        key = load.next_key
        place = None
        if not load.full:
            lower = self._promotions.source(key, load.tried.get(load.todo[0], 0), now)
            if lower is None:
                self._due.add(load.age)
                return
            root = lower.roots.of(*lower.index.slots((key,))) if lower.roots.several else 0
            place = self._in_root.setdefault((lower.position, root), Ages())
            place.add(load.age)
        self._waiting[load.age] = place
        self._control.awaited.add(key, load.age)

    def _end_wait(self, age: int) -> None:
        if age in self._waiting:
            place = self._waiting.pop(age)
            self._control.awaited.discard(age)
            if place is not None:
                place.discard(age)

    def next(self, last: int, now: float) -> int:
        """The oldest load above the age `last` that is to be looked at, or `NEVER`."""
        if self._waiting:
            self._look_at_tiers(now)
        first = self._due.after(last)
        if self._waiting:
            rooms = self._promotions.rooms(now)
            short = bool(rooms) and not self._control.cpu.available  # the oldest may make rows free for itself
            for (position, root), ages in self._in_root.items():
                if ages and (short or rooms.has(position, root)):
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
            for age in list(self._waiting):
                self.add(age)
        for age in self._control.awaited.take_changed():
            self.add(age)
