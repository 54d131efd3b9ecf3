"""The roots of one lower tier: the CPU rows that transfers of each hold, and which of them are left alone.

Several roots share the rows their tier may hold, so that one that hangs never takes those of the others. A root with a
late transfer is *silent* until that has really ended: nothing is stored there, and what it holds counts as not there.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.tier.contract import SlotSpace


class Roots:
    """Rows held and late by root. A tier with one root, or without slots, has one that is never silent."""

    def __init__(self, space: SlotSpace | None, rows_max: int) -> None:
        counts = space.regions_by_root if space is not None else (1,)
        self._per_region = space.slots_per_region if space is not None else 1
        self._root_of_region = [root for root, count in enumerate(counts) for _ in range(count)]
        self.several = len(counts) > 1
        self.share = max(1, rows_max // len(counts))
        self.held = [0] * len(counts)
        self.late = [0] * len(counts)
        self.any_silent = False

    def of(self, slot: int) -> int:
        """The root a slot lies in."""
        return self._root_of_region[slot // self._per_region] if self.several else 0

    def silent(self, slot: int) -> bool:
        """True if the root of this slot is left alone."""
        return self.any_silent and self.late[self.of(slot)] > 0

    @property
    def speaks(self) -> bool:
        """True if lateness in one root says nothing about the tier: another root is not silent."""
        return self.several and not all(self.late)

    def rooms(self) -> list[int]:
        """How many more rows transfers of each root may hold."""
        return [0 if late else self.share - held for late, held in zip(self.late, self.held, strict=True)]

    @property
    def room(self) -> int:
        """How many more rows transfers of all roots may hold."""
        return sum(self.rooms())

    def limits(self, count: int) -> list[int] | None:
        """The rooms of the roots if they keep any of `count` blocks from going to any root, else None."""
        if not self.several:
            return None
        rooms = self.rooms()
        return rooms if min(rooms) < count else None

    def split(self, slots: Sequence[int]) -> list[list[int]]:
        """Positions of slots by root, without the roots that have none: a transfer is one root's alone."""
        if not self.several:
            return [list(range(len(slots)))]
        parts: list[list[int]] = [[] for _ in self.held]
        for i, slot in enumerate(slots):
            parts[self.of(slot)].append(i)
        return [part for part in parts if part]

    def begin(self, root: int, count: int) -> None:
        """A transfer holds rows."""
        self.held[root] += count

    def end(self, root: int, count: int) -> None:
        """A transfer no longer holds its rows."""
        self.held[root] -= count

    def begin_late(self, root: int, count: int) -> None:
        """A transfer is late."""
        self.late[root] += count
        self.any_silent = self.several

    def end_late(self, root: int, count: int) -> None:
        """A late transfer has really ended."""
        self.late[root] -= count
        self.any_silent = self.several and any(self.late)
