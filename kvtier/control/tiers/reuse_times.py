"""Times of the last use of each slot of a tier, and how long ago that was when it was used again or evicted.

A tier is large enough if the blocks that it evicts have not been used for longer than blocks that come back have to
wait for their next use. So both times have the same buckets.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from kvtier.control.tiers.histogram import Histogram
from kvtier.control.tiers.slot_table import READY

TICKS_PER_SECOND = 10
ONE_USE_TICKS = 10
"""Uses that are less than a second apart are one: a request touches a block several times."""
SAMPLED_SLOTS = 1 << 16
"""Slots that `ReuseTimes.coldest_seconds` considers, at most."""
AGE_BOUNDS = (
    *(1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0),
    *(14_400.0, 43_200.0, 86_400.0, 259_200.0, 604_800.0, 2_592_000.0),
)
"""Seconds of ages of blocks and of gaps between their uses: up to 30 days."""


class TickClock:
    """A coarse clock that the tiers of a stack share: ticks since its first `advance`. 4 bytes last for 13 years."""

    __slots__ = ("_began", "tick")

    def __init__(self) -> None:
        self._began: float | None = None
        self.tick = 0

    def advance(self, now: float) -> float:
        """Let time pass up to `now`; returns when to call this again."""
        if self._began is None:
            self._began = now
        self.tick = max(self.tick, self._tick_of(now))
        return now + 1 / TICKS_PER_SECOND

    def ticks_at(self, now: float) -> int:
        """The ticks at a time that `advance` has not seen yet. From any thread."""
        return max(self.tick, self._tick_of(now))

    def _tick_of(self, now: float) -> int:
        return 0 if self._began is None else int((now - self._began) * TICKS_PER_SECOND)


class ReuseTimes:
    """Reuse times of an owned tier, four bytes a slot. Recovered blocks were last used when the stack began.

    Becoming ready is a use. `reuse_gaps` are the seconds between two uses of a block, `eviction_ages` those from the
    last use to the eviction. One thread counts; histograms and `coldest_seconds` are for any.
    """

    __slots__ = ("eviction_ages", "last", "reuse_gaps", "time")

    def __init__(self, num_slots: int) -> None:
        self.time = TickClock()
        self.last = array("I", bytes(4 * num_slots))
        self.reuse_gaps = Histogram(AGE_BOUNDS)
        self.eviction_ages = Histogram(AGE_BOUNDS)

    def use(self, slots: Sequence[int]) -> None:
        """Count a use of these slots."""
        if slots:
            last, tick = self.last, self.time.tick
            first, others = last[slots[0]], []
            for slot in slots:
                before = last[slot]
                if before != first:
                    others.append(before)
                last[slot] = tick
            if others or tick - first >= ONE_USE_TICKS:
                others += [first] * (len(slots) - len(others))
                self._observe(self.reuse_gaps, others, ONE_USE_TICKS)

    def evict(self, slots: Sequence[int]) -> None:
        """Count the eviction of these slots."""
        if slots:
            before = list(map(self.last.__getitem__, slots))
            if before.count(before[0]) == len(before):  # as mostly: what was used together leaves together
                self.eviction_ages.observe((self.time.tick - before[0]) / TICKS_PER_SECOND, len(before))
            else:
                self._observe(self.eviction_ages, before, 0)

    def _observe(self, histogram: Histogram, before: list[int], least: int) -> None:
        """Count how long ago these times were, those of at least `least` ticks."""
        tick = self.time.tick
        counts: dict[int, int] = {}
        for each in before:
            counts[each] = counts.get(each, 0) + 1
        for each, count in counts.items():
            if tick - each >= least:
                histogram.observe((tick - each) / TICKS_PER_SECOND, count)

    def coldest_seconds(self, state: bytearray, now: float) -> float:
        """Seconds since the last use of the ready slot that has not been used for longest; 0 without one.

        Of a large tier it considers some slots, evenly spread. From any thread: a slot that changes meanwhile counts as
        it was or as it is.
        """
        step = -(-len(state) // SAMPLED_SLOTS)
        last = np.frombuffer(self.last, np.uint32)[::step]
        ready = np.frombuffer(state, np.uint8)[::step] == READY
        oldest = int(last.min(where=ready, initial=np.iinfo(np.uint32).max))
        return max(0, self.time.ticks_at(now) - oldest) / TICKS_PER_SECOND if ready.any() else 0.0
