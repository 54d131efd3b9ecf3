"""A circuit breaker without a clock of its own: closed, open after repeated errors, half-open after a pause.

A tier that is held back has breakers in a fourth state, which they do not leave.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    HELD_BACK = "held_back"


class Breaker:
    """Opens after `threshold` failed jobs in a row; after `pause_seconds` lets one job through to probe.

    `failures` are those in a row. While it is closed without any, a job that is sent or succeeds changes nothing.
    `after_failure` is called after each failure, also one that does not count, for what shows the tier's health.
    """

    def __init__(self, threshold: int = 5, pause_seconds: float = 5.0) -> None:
        self.threshold = threshold
        self.pause_seconds = pause_seconds
        self.state = BreakerState.CLOSED
        self.entered = dict.fromkeys(BreakerState, 0)
        """How often each state was entered."""
        self.failures = 0
        self._retry_at = 0.0
        self._probing = False
        self.after_failure: Callable[[], None] = _ignore

    @property
    def opened(self) -> int:
        """The number of times it opened."""
        return self.entered[BreakerState.OPEN]

    def _enter(self, state: BreakerState) -> None:
        if state is not self.state:
            self.state = state
            self.entered[state] += 1

    def allows(self, now: float) -> bool:
        """True if a job may be sent. In the half-open state that is one job, until its outcome is recorded."""
        if self.state is BreakerState.OPEN and now >= self._retry_at:
            self._enter(BreakerState.HALF_OPEN)
            self._probing = False
        return self.state is BreakerState.CLOSED or (self.state is BreakerState.HALF_OPEN and not self._probing)

    def on_send(self) -> None:
        """A job was sent; in the half-open state it is the probe."""
        self._probing = self.state is BreakerState.HALF_OPEN

    def on_success(self) -> None:
        """A job did what it should: close."""
        if self.state is BreakerState.HELD_BACK:
            return
        self.failures = 0
        self._probing = False
        if self.state is not BreakerState.CLOSED:
            self._enter(BreakerState.CLOSED)

    def on_failure(self, now: float) -> None:
        """A job erred or was late."""
        if self.state is BreakerState.HELD_BACK:
            return
        self.failures += 1
        if self.state is BreakerState.HALF_OPEN or self.failures >= self.threshold:
            self.trip(now)
        else:
            self.after_failure()

    def trip(self, now: float) -> None:
        """The tier is known not to answer: open, however few jobs have failed."""
        if self.state is BreakerState.HELD_BACK:
            return
        self._enter(BreakerState.OPEN)
        self._retry_at = now + self.pause_seconds
        self._probing = False
        self.after_failure()

    def hold_back(self) -> None:
        """No job may be sent any more, whatever becomes of those in flight."""
        self._enter(BreakerState.HELD_BACK)


def _ignore() -> None:
    """For breakers that nothing shows."""
