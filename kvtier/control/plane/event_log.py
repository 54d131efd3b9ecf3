"""Changes of what the tiers have, until they are taken."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvtier.control.tiers.lower_tier import TierSpec
from kvtier.types.events import OffloadingEvent
from kvtier.types.keys import OffloadKey

EVENT_KEYS = 16
"""The keys of so many full events are kept; most events have few."""


class EventLog:
    """Blocks that became reachable in a tier or ceased to be, in order, until they are taken.

    At most `events_max` of them are `waiting`, none if that is 0, with `EVENT_KEYS * events_max` keys. If there are
    more, the oldest is discarded, and its keys count as `lost`. An event counts for `events_max` keys at most: what a
    tier held when it was opened is one, however much that is.
    """

    def __init__(self, events_max: int) -> None:
        self.events_max = events_max
        self.lost = 0
        self.waiting: deque[OffloadingEvent] = deque()
        self._keys = 0

    def record(self, spec: TierSpec, keys: Sequence[OffloadKey], removed: bool) -> None:
        """These keys became reachable in a tier, or were removed from it."""
        if self.events_max and keys:
            self.waiting.append(OffloadingEvent(tuple(keys), spec.medium, removed, spec.name))
            self._keys += min(len(keys), self.events_max)
            while len(self.waiting) > self.events_max or self._keys > EVENT_KEYS * self.events_max:
                count = len(self.waiting.popleft().keys)
                self._keys -= min(count, self.events_max)
                self.lost += count

    def take(self) -> list[OffloadingEvent]:
        """The events that were not taken before, the oldest first."""
        events = list(self.waiting)
        self.waiting.clear()
        self._keys = 0
        return events
