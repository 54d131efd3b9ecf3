"""How much is done in a turn of an event loop, and whether another thread of the process keeps the GIL.

Beside a thread that is busy in Python the loop gets the GIL back only every switch interval (5 ms), each time it looked
for events. So then it does more in each turn.
"""

from __future__ import annotations

import math
import time

TURN_SECONDS = 0.00025
"""About how long each kind of work (telling, submitting, beginning blocks) goes on in a turn of the loop."""
LATE_TURN_SECONDS = 0.0015
"""The same while the loop is late."""
LATE_SECONDS = 0.002
LATE_FOR_SECONDS = 0.25


class Turns:
    """Knows from delays that were noted whether the loop is late: for LATE_FOR_SECONDS after one of LATE_SECONDS."""

    def __init__(self) -> None:
        self._late_until = -math.inf

    @property
    def late(self) -> bool:
        """True while another thread seems to keep the GIL."""
        return time.perf_counter() < self._late_until

    @property
    def seconds(self) -> float:
        """How long a kind of work may go on in a turn."""
        return LATE_TURN_SECONDS if self.late else TURN_SECONDS

    def note(self, delay_seconds: float) -> None:
        """Something came so long after it could have come."""
        if delay_seconds > LATE_SECONDS:
            self._late_until = time.perf_counter() + LATE_FOR_SECONDS
