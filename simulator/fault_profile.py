"""Fault rates of one process: probabilities of faults, and how long requests and calls take."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class FaultProfile:
    """Probabilities for each request or call; all zero means no faults. `slow` requests take seconds."""

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

    def request_seconds(self, rng: Random) -> float:
        """How long a request takes."""
        if self.slow and rng.random() < self.slow:
            return rng.uniform(0.2, 8.0)
        return rng.random() * self.pace_seconds

    def thread_seconds(self, rng: Random) -> float:
        """How long a call on a thread takes."""
        if self.slow and rng.random() < self.slow / 2:
            return rng.uniform(0.1, 3.0)
        return rng.random() * self.pace_seconds


def draw_fault_profile(rng: Random) -> FaultProfile:
    """Rates for one process. Each kind of fault is often absent; see the table in docs/simulator.md for the maxima."""

    def chance(most: float) -> float:
        return rng.choice((0.0, 0.0, 0.2, 0.5, 1.0)) * most

    return FaultProfile(
        fails=chance(0.1),
        short=chance(0.1),
        misreads=chance(0.3),
        miswrites=chance(0.2),
        lost=chance(0.2),
        slow=chance(0.3),
        call_fails=chance(0.02),
        disk_full=chance(0.1),
        copy_fails=chance(0.05),
        pace_seconds=rng.choice((0.0001, 0.001, 0.02)),
    )
