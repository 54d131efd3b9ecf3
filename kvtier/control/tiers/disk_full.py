"""Full disks: the slots of an owned tier that have no room on their disk yet, and when to try them again.

The control plane gives slots out by place, but a disk gives room only when a region is first formatted, some even only
when a slot is first written. Slots without room are kept apart for a while, and their root formats no new region.
So stores go where there is room: to the places of blocks that are evicted for them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator

PAUSE_SECONDS = 5.0


class FullDisks:
    """Free slots without room, by size and root, and the regions they lie in, with their roots.

    `until[root]`: when a full disk is tried again, -inf if it is not full.
    """

    def __init__(self, num_sizes: int, num_roots: int) -> None:
        self.slots = [[array("q") for _ in range(num_roots)] for _ in range(num_sizes)]
        self.regions: dict[int, int] = {}
        self.until = [-math.inf] * num_roots

    @property
    def any(self) -> bool:
        """True while some root's disk is full."""
        return max(self.until) > -math.inf

    def is_full(self, root: int) -> bool:
        return self.until[root] > -math.inf

    def found(self, region: int, root: int, now: float) -> None:
        """The disk of a root had no room just now for slots of a region."""
        self.regions[region] = root
        self.until[root] = now + PAUSE_SECONDS

    def count(self, size: int) -> int:
        """Slots of a size that are kept apart."""
        return sum(map(len, self.slots[size]))

    def take_due(self, now: float) -> Iterator[tuple[int, int, array[int]]]:
        """(size, root, slots) of the roots whose pause is over: they count as not full from here on."""
        for root, until in enumerate(self.until):
            if -math.inf < until <= now:
                self.until[root] = -math.inf
                self.regions = {region: other for region, other in self.regions.items() if other != root}
                for size, of_size in enumerate(self.slots):
                    stack, of_size[root] = of_size[root], array("q")
                    if stack:
                        yield size, root, stack
