"""Events of a pool for one engine: kept until they are sent, within a bound."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from kvtier.service import wire
from kvtier.service.namespaces import KeySpace
from kvtier.types.events import OffloadingEvent

EVENTS_MAX = 4096
"""Events that are kept for an engine; the keys of one are kept once for all engines."""
KEYS_AT_ONCE, PAUSE_SECONDS = 1024, 0.01
"""Keys of events that are sent to an engine at once, and the time until there may be more: its thread reads them."""


class EventFeed:
    """The events that an engine has yet to be sent, the oldest first. `lost` counts keys of those that were dropped."""

    def __init__(self) -> None:
        self.lost = 0
        self.due_at = -math.inf
        self._left = 0
        self._events: deque[OffloadingEvent] = deque()
        self._at = 0

    def __bool__(self) -> bool:
        return bool(self._events)

    def add(self, events: Sequence[OffloadingEvent]) -> None:
        """Keep these events; the oldest are dropped where there are too many."""
        self._events.extend(events)
        while len(self._events) > EVENTS_MAX:
            self.lost += len(self._events.popleft().keys) - self._at
            self._at = 0

    def refill(self, now: float) -> None:
        """It may be time for more of them."""
        if now >= self.due_at:
            self._left, self.due_at = KEYS_AT_ONCE, now + PAUSE_SECONDS

    def take(self, space: KeySpace) -> list[wire.Events]:
        """The next of them that are due, as far as they are of the engine's namespace."""
        items: list[wire.Events] = []
        while self._events and self._left > 0:
            event = self._events[0]
            some = event.keys[self._at : self._at + self._left]
            self._left -= len(some)
            self._at += len(some)
            if self._at >= len(event.keys):
                self._events.popleft()
                self._at = 0
            for _, part in wire.split(space.of_engine(some)):
                items.append(wire.Events([(event.tier, event.medium, event.removed, wire.Keys.of(part))]))
        return items
