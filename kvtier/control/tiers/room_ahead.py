"""How many slots a tier whose policy follows requests frees ahead of need: most steps of an engine then ask it nothing.

To tell such a policy of requests and new blocks costs little, as it takes that in later (`policies.journal`). To ask it
what to evict, or whether a block is worth that, costs an engine's step more.
"""

from __future__ import annotations

AHEAD_MAX = 32
AHEAD_PART = 48
"""Slots that are freed ahead, at most, and as which part of the tier."""
FEW_BLOCKS = 16
"""So many blocks at once are placed in free slots without a look at what they are worth."""


class RoomAhead:
    """`slots` are freed ahead of need once fewer than half of that are free, but not while most slots are in use."""

    __slots__ = ("slots",)

    def __init__(self, num_slots: int) -> None:
        self.slots = min(AHEAD_MAX, num_slots // AHEAD_PART)

    def wanted(self, free: int, evictable: int) -> int:
        """How many slots to free now."""
        return self.slots - free if 2 * free < self.slots and evictable >= 2 * self.slots else 0

    def evictions(self, blocks: int, free: int) -> int:
        """How many evictions so many new blocks cost: where they are not few, those that were made ahead count."""
        return blocks - free if blocks <= FEW_BLOCKS else blocks - max(0, free - self.slots)
