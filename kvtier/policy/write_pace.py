"""How much may be written to a tier in a day, and how good a block must be for that.

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
"""What was free and not taken so long ago may be taken at once."""

LEFT_SHARE = 0.02
LEFT_MAX = 0.04
"""Of a budget. While no more than `LEFT_MAX` is left the threshold is lower, down to 0 where `LEFT_SHARE` is."""


class DayWindow:
    """Bytes by the minute, of the last 24 hours and a minute: any 24 hours that end now lie within them."""

    def __init__(self) -> None:
        self._minutes = [0] * (MINUTES + 1)
        self.total = 0

    def add(self, minute: int, num_bytes: int) -> None:
        """So many bytes in a minute that the window holds."""
        self._minutes[minute % len(self._minutes)] += num_bytes
        self.total += num_bytes

    def ages(self, minute: int) -> list[int]:
        """The bytes of this minute, the latest, and of those before it."""
        return [self._minutes[(minute - ago) % len(self._minutes)] for ago in range(len(self._minutes))]

    def pass_to(self, minute: int, last: int) -> None:
        """The minutes after `last` have come, up to this one."""
        for later in range(last + 1, last + 1 + min(minute - last, len(self._minutes))):
            place = later % len(self._minutes)
            self.total -= self._minutes[place]
            self._minutes[place] = 0


class WritePace:
    """At most `bytes_per_day` in any 24 hours of the time that is handed in, which may stand still but not go back.

    What is admitted is counted, and what is sent, which may be long after: no more is admitted than could be sent now.
    It begins as if the budget had been used evenly before: a process that starts anew does not get it all at once. With
    `allow` no more is sent than is on record, so that a process that starts later knows of it.
    """

    def __init__(self, bytes_per_day: int) -> None:
        self.bytes_per_day = self._limit = bytes_per_day
        self.sent_bytes = 0
        self._allowed: int | None = None
        self._before = self._evenly
        self._written = DayWindow()
        self._admitted = DayWindow()
        self._promised = 0
        self._minute: int | None = None
        self._time = 0.0
        self._offers = [0.0] * LEVELS
        self._level = 0
        self._at_worst = 0.0
        self._tokens = 0.0
        self._rate = bytes_per_day / DAY_SECONDS

    def advance(self, time: float) -> bool:
        """Time has passed up to here. True if another minute has begun."""
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

    def admits(self, expected_hits: float, num_bytes: int, before_bytes: int = 0) -> bool:
        """True if a block of so many bytes is to be written for the hits that it is expected to bring, 0 to 1.

        It is not if those before it, which are written with it, need more than is left. Call `admitted` for each then.
        """
        return self.wants(expected_hits, num_bytes) and self.free >= num_bytes + before_bytes

    def wants(self, expected_hits: float, num_bytes: int) -> bool:
        """As `admits`, if there were room."""
        level = min(LEVELS - 1, int(min(expected_hits, 1.0) * LEVELS))
        self._offers[level] += num_bytes
        return level > self._level or (level >= self._at_worst and self._tokens > 0)

    def admitted(self, num_bytes: int) -> None:
        """So many bytes are to be written, whatever they bring."""
        assert self._minute is not None
        self._tokens = max(self._tokens - num_bytes, -self._rate * TOKEN_SECONDS)
        self._admitted.add(self._minute, num_bytes)

    def give_back(self, num_bytes: int) -> None:
        """So many bytes that were admitted in the last minutes are not written after all."""
        assert self._minute is not None
        self._tokens += num_bytes
        self._admitted.add(self._minute, -num_bytes)

    def promise(self, num_bytes: int) -> None:
        """So many bytes of `room` are for blocks that are sent soon; a negative number gives them back."""
        self._promised += num_bytes

    @property
    def free(self) -> int:
        """The bytes that may be admitted now."""
        return min(self.room - self._promised, self._limit - self._admitted.total)

    @property
    def room(self) -> int:
        """The bytes that may be sent now, those that are promised among them."""
        return self.left_of_day if self._allowed is None else min(self.left_of_day, self.allowed)

    @property
    def left_of_day(self) -> int:
        """What was not written of the budget of the last 24 hours."""
        return self._limit - self._written.total

    @property
    def allowed(self) -> int:
        """The bytes that may be sent until more are allowed, if there is such a limit."""
        return (self._allowed or 0) - self.sent_bytes

    def allow(self, num_bytes: int) -> None:
        """So many bytes may be sent in all, from the first one on."""
        self._allowed = num_bytes

    def minutes(self) -> list[int]:
        """What was sent in this minute and in those before it, 24 hours and a minute."""
        return self._before() if self._minute is None else self._written.ages(self._minute)

    def begin_with(self, before: Callable[[], list[int]]) -> None:
        """`before` says what was sent up to when it is called, as `minutes` does: when time is handed in first."""
        self._before = before

    def wrote(self, num_bytes: int) -> None:
        """So many bytes, within `room`, are being written."""
        assert self._minute is not None
        self._written.add(self._minute, num_bytes)
        self.sent_bytes += num_bytes

    @property
    def threshold(self) -> float:
        """The expected hits from which on a block is written, some of those at it perhaps not."""
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
        self._written.pass_to(minute, self._minute)
        self._admitted.pass_to(minute, self._minute)
        self._minute = minute
        kept = math.exp(-passed * MINUTE_SECONDS / HOUR_SECONDS)
        self._offers = [offered * kept for offered in self._offers]
        left = min(self.left_of_day - self._promised, self._limit - self._admitted.total)
        self._rate = self._limit / DAY_SECONDS + max(0, left) / HOUR_SECONDS
        self._level = _level_within(self._offers, self._rate * HOUR_SECONDS)
        share = left / max(1, self._limit)
        self._at_worst = self._level * (max(0.0, 1.0 - share / LEFT_SHARE) if 0 < share < LEFT_MAX else 1.0)


def _level_within(offers: Sequence[float], num_bytes: float) -> int:
    """The level at which the offers from the highest one down come to more than so many bytes; 0 if they do not."""
    total = 0.0
    for level in range(len(offers) - 1, 0, -1):
        total += offers[level]
        if total > num_bytes:
            return level
    return 0
