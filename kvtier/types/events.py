"""Events for routers and indexes about a stack's contents."""

from __future__ import annotations

from collections import deque

from kvtier.types.keys import Medium, OffloadKey
from kvtier.types.values import compared_value

FULL_EVENTS = 16
"""The keys of so many full events are kept; most events have few."""


@compared_value
class OffloadingEvent:
    """Blocks became reachable in a tier of this engine, or ceased to be. `medium` is the tier's kind, `tier` its name.

    There is no block size: one event may mix groups of different sizes, for removals as well.
    """

    keys: tuple[OffloadKey, ...]
    medium: Medium
    removed: bool
    tier: str


class EventQueue:
    """Events in order until they are taken: at most `events_max`, with `FULL_EVENTS * events_max` keys.

    If there are more, the oldest is discarded, and its keys count as `lost`. An event counts for `events_max` keys at
    most: what a tier held when it was opened is one, however much that is.
    """

    def __init__(self, events_max: int) -> None:
        self.events_max = events_max
        self.lost = 0
        self.waiting: deque[OffloadingEvent] = deque()
        self._keys = 0

    def append(self, event: OffloadingEvent) -> None:
        """Keep an event, the newest."""
        self.waiting.append(event)
        self._keys += min(len(event.keys), self.events_max)
        while len(self.waiting) > self.events_max or self._keys > FULL_EVENTS * self.events_max:
            count = len(self.waiting.popleft().keys)
            self._keys -= min(count, self.events_max)
            self.lost += count

    def take(self) -> list[OffloadingEvent]:
        """The events that were not taken before, the oldest first."""
        events = list(self.waiting)
        self.waiting.clear()
        self._keys = 0
        return events
