"""Changes of what the tiers have, until they are taken."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.control.tiers.lower_tier import TierSpec
from kvtier.types.events import EventQueue, OffloadingEvent
from kvtier.types.keys import OffloadKey


class EventLog(EventQueue):
    """Blocks that became reachable in a tier or ceased to be; none are recorded if `events_max` is 0."""

    def record(self, spec: TierSpec, keys: Sequence[OffloadKey], removed: bool) -> None:
        """These keys became reachable in a tier, or were removed from it."""
        if self.events_max and keys:
            self.append(OffloadingEvent(tuple(keys), spec.medium, removed, spec.name))
