"""How long loads of a tier take, from those that ended."""

from __future__ import annotations

import math

WEIGHT = 0.5
"""How much of what was known counts beside one more job."""


class LoadSpeed:
    """Seconds a block of the loads that ended, later ones counting more. Jobs count as served one after another.

    A job that was slower than the one before it counts as fast as that one: one that a busy machine has held up says
    nothing, two in a row do.
    """

    def __init__(self) -> None:
        self._blocks = 0.0
        self._seconds = 0.0
        self._ended_at = 0.0
        self._last = math.inf

    def ended(self, blocks: int, sent_at: float, now: float) -> None:
        """A load of so many blocks was sent and has ended, or is late."""
        each = max(0.0, now - max(sent_at, self._ended_at)) / blocks
        self._seconds = self._seconds * WEIGHT + min(each, self._last) * blocks
        self._blocks = self._blocks * WEIGHT + blocks
        self._ended_at, self._last = now, each

    def seconds(self, blocks: int) -> float:
        """How long so many blocks will take, those in flight included; 0 while nothing is known."""
        return blocks * self._seconds / self._blocks if self._blocks else 0.0
