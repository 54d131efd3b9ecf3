"""Write budget of a tier: the bytes of a day, and how good a block must be to be written.

The threshold follows what is offered: the least for which the offers of the last hour would come to no more than the
bytes that are free. Those are the budget's even share, and what was left unused in the last 24 hours, over an hour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

DAY_SECONDS = 86_400.0
HOUR_SECONDS = 3600.0
MINUTE_SECONDS = 60.0
MINUTES = 1440
LEVELS = 64
TOKEN_SECONDS = 1800.0
"""Bytes that were free and not taken in this time may be taken at once."""

LEFT_SHARE = 0.02
LEFT_MAX = 0.04
"""Shares of a budget. While at most `LEFT_MAX` is left the threshold is lower, down to 0 where `LEFT_SHARE` is."""


class BudgetWindow:
    """Bytes by the minute, of the last 24 hours and a minute: any 24 hours that end now lie within them."""

    def __init__(self) -> None:
        self._minutes = [0] * (MINUTES + 1)
        self.total = 0

    def add(self, minute: int, num_bytes: int) -> None:
        """Count bytes in a minute that the window holds."""
        self._minutes[minute % len(self._minutes)] += num_bytes
        self.total += num_bytes

    def ages(self, minute: int) -> list[int]:
        """Bytes of this minute, the latest, and of those before it."""
        return [self._minutes[(minute - ago) % len(self._minutes)] for ago in range(len(self._minutes))]

    def advance(self, minute: int, last: int) -> None:
        """Begin the minutes after `last`, up to this one."""
        for later in range(last + 1, last + 1 + min(minute - last, len(self._minutes))):
            place = later % len(self._minutes)
            self.total -= self._minutes[place]
            self._minutes[place] = 0


class WriteBudget:
    """Budget of at most `bytes_per_day` in any 24 hours. Time is handed in; it may stand still but not go back.

    Bytes count when they are admitted, and when they are sent, which may be long after: no more is admitted than could
    be sent now. It begins as if the budget had been used evenly before: a process that starts does not get it all at
    once. With a durable limit no more is sent than is on record, so that it counts in a process that starts later.
    """

    def __init__(self, bytes_per_day: int, block_bytes: int = 1) -> None:
        self.bytes_per_day = self._limit = bytes_per_day
        self.block_bytes = block_bytes
        self.sent_bytes = 0
        self._durable_limit: int | None = None
        self._before = self._evenly
        self._written = BudgetWindow()
        self._admitted = BudgetWindow()
        self.promised_bytes = 0
        self._minute: int | None = None
        self._time = 0.0
        self._offers = [0.0] * LEVELS
        self._level = 0
        self._at_worst = 0.0
        self._tokens = 0.0
        self._rate = bytes_per_day / DAY_SECONDS

    def advance(self, time: float) -> bool:
        """Let time pass up to here. True if another minute has begun."""
        minute, began = math.floor(time / MINUTE_SECONDS), False
        if self._minute is None:
            self._start(minute, time)
        elif minute > self._minute:
            self._pass_minutes(minute)
            began = True
        if time > self._time:
            most = self._rate * TOKEN_SECONDS
            self._tokens = min(most, self._tokens + self._rate * (time - self._time))
            self._time = time
        return began

    def can_admit(self, expected_hits: float, num_bytes: int, before_bytes: int = 0) -> bool:
        """True if a block of this size is to be written for its expected hits, 0 to 1, as far as there is room.

        It is not if those before it, which are written with it, need more than is left. Call `record_admitted` for
        each that is.
        """
        return self.meets_threshold(expected_hits, num_bytes) and self.free >= num_bytes + before_bytes

    def meets_threshold(self, expected_hits: float, num_bytes: int) -> bool:
        """True if a block is good enough, whether there is room or not. It counts as offered."""
        level = min(LEVELS - 1, int(min(expected_hits, 1.0) * LEVELS))
        self._offers[level] += num_bytes
        return level > self._level or (level >= self._at_worst and self._tokens > 0)

    def record_admitted(self, num_bytes: int) -> None:
        """Count bytes that are to be written, whatever they bring."""
        assert self._minute is not None
        self._tokens = max(self._tokens - num_bytes, -self._rate * TOKEN_SECONDS)
        self._admitted.add(self._minute, num_bytes)

    def give_back(self, num_bytes: int) -> None:
        """Free bytes that were admitted in the last minutes and are not written after all."""
        assert self._minute is not None
        self._tokens += num_bytes
        self._admitted.add(self._minute, -num_bytes)

    def promise(self, num_bytes: int) -> None:
        """Keep bytes of `room` for blocks that are sent soon; a negative number gives them back."""
        self.promised_bytes += num_bytes

    @property
    def free(self) -> int:
        """Bytes that may be admitted now."""
        return min(self.room - self.promised_bytes, self._limit - self._admitted.total)

    @property
    def room(self) -> int:
        """Bytes that may be sent now, those that are promised among them."""
        return self.left_of_day if self._durable_limit is None else min(self.left_of_day, self.durable_left)

    @property
    def left_of_day(self) -> int:
        """Bytes of the budget that were not written in the last 24 hours."""
        return self._limit - self._written.total

    @property
    def durable_left(self) -> int:
        """Bytes that may be sent until the durable limit is raised, if there is one."""
        return (self._durable_limit or 0) - self.sent_bytes

    def set_durable_limit(self, num_bytes: int) -> None:
        """Set how many bytes may be sent in all, from the first one on: those that are on record."""
        self._durable_limit = num_bytes

    def minutes(self) -> list[int]:
        """Bytes sent in this minute and in those before it, 24 hours and a minute."""
        return self._before() if self._minute is None else self._written.ages(self._minute)

    def begin_with(self, before: Callable[[], list[int]]) -> None:
        """Begin with what `before` returns, as `minutes` does, when it is called: when time is handed in first."""
        self._before = before

    def record_sent(self, num_bytes: int) -> None:
        """Count bytes, within `room`, that are being written."""
        assert self._minute is not None
        self._written.add(self._minute, num_bytes)
        self.sent_bytes += num_bytes

    @property
    def threshold(self) -> float:
        """Expected hits from which on a block is written, some of those at it perhaps not."""
        return self._level / LEVELS

    def _evenly(self) -> list[int]:
        limit = self._limit
        return [0, *((ago + 1) * limit // MINUTES - ago * limit // MINUTES for ago in range(MINUTES))]

    def _start(self, minute: int, time: float) -> None:
        self._minute, self._time = minute, time
        for ago, num_bytes in enumerate(self._before()):
            self._written.add(minute - ago, num_bytes)
            self._admitted.add(minute - ago, num_bytes)

    def _pass_minutes(self, minute: int) -> None:
        assert self._minute is not None
        passed = minute - self._minute
        self._written.advance(minute, self._minute)
        self._admitted.advance(minute, self._minute)
        self._minute = minute
        kept = math.exp(-passed * MINUTE_SECONDS / HOUR_SECONDS)
        self._offers = [offered * kept for offered in self._offers]
        left = min(self.left_of_day - self.promised_bytes, self._limit - self._admitted.total)
        self._rate = self._limit / DAY_SECONDS + max(0, left) / HOUR_SECONDS
        self._level = _level_within(self._offers, self._rate * HOUR_SECONDS)
        share = left / max(1, self._limit)
        self._at_worst = self._level * (max(0.0, 1.0 - share / LEFT_SHARE) if 0 < share < LEFT_MAX else 1.0)


def _level_within(offers: Sequence[float], num_bytes: float) -> int:
    """Level at which the offers from the highest one down come to more than these bytes; 0 if they do not."""
    total = 0.0
    for level in range(len(offers) - 1, 0, -1):
        total += offers[level]
        if total > num_bytes:
            return level
    return 0
