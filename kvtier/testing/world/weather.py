"""How bad a disk and its surroundings are: probabilities of faults, and how long things take."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Weather:
    """Probabilities for each request or call; all zero is a calm day. `slow` requests take seconds."""

    fails: float = 0.0
    short: float = 0.0
    misreads: float = 0.0
    miswrites: float = 0.0
    lost: float = 0.0
    slow: float = 0.0
    call_fails: float = 0.0
    disk_full: float = 0.0
    copy_fails: float = 0.0
    pace_seconds: float = 0.001

    def request_seconds(self, dice: Random) -> float:
        """How long a request takes."""
        if self.slow and dice.random() < self.slow:
            return dice.uniform(0.2, 8.0)
        return dice.random() * self.pace_seconds

    def thread_seconds(self, dice: Random) -> float:
        """How long a call on a thread takes."""
        if self.slow and dice.random() < self.slow / 2:
            return dice.uniform(0.1, 3.0)
        return dice.random() * self.pace_seconds


def draw_weather(dice: Random) -> Weather:
    """The weather of one life: some kinds of fault, often none of a kind: up to 10 % errors, more lies and delays."""

    def chance(most: float) -> float:
        return dice.choice((0.0, 0.0, 0.2, 0.5, 1.0)) * most

    return Weather(
        fails=chance(0.1),
        short=chance(0.1),
        misreads=chance(0.3),
        miswrites=chance(0.2),
        lost=chance(0.2),
        slow=chance(0.3),
        call_fails=chance(0.02),
        disk_full=chance(0.1),
        copy_fails=chance(0.05),
        pace_seconds=dice.choice((0.0001, 0.001, 0.02)),
    )
