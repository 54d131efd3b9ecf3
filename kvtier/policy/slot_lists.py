"""Recency lists over slots as linked int arrays: no object for a slot, eight bytes each."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from kvtier.errors import IntegrityError

ABSENT = -1


class SlotLists:
    """Several lists over one set of slots, each from coldest to hottest; a slot is in one list at most.

    `next[s]` and `prev[s]` are the hotter and the colder neighbour of slot s, ABSENT when s is in no list. List i is
    closed into a ring by its sentinel `num_slots + i`, so nothing below needs a special case for an empty list.
    The arrays are public because the policies' loops are the hot path; only this module writes to them.
    """

    __slots__ = ("next", "num_slots", "prev")

    def __init__(self, num_slots: int, num_lists: int) -> None:
        self.num_slots = num_slots
        self.next = array("i", [ABSENT]) * (num_slots + num_lists)
        self.prev = array("i", [ABSENT]) * (num_slots + num_lists)
        for end in range(num_slots, num_slots + num_lists):
            self.next[end] = self.prev[end] = end

    def append(self, which: int, slots: Sequence[int]) -> None:
        """Put slots that are in no list at the hot end of a list, the last one hottest, as one chain."""
        after, before = self.next, self.prev
        end = self.num_slots + which
        last = before[end]
        for slot in slots:
            if after[slot] >= 0:
                raise IntegrityError(f"slot {slot} was inserted while it is known")
            # Closed after every slot: a slot named twice in one batch is refused like any other known slot.
            after[last] = slot
            after[slot] = end
            before[slot] = last
            last = slot
        before[end] = last

    def move_to_end(self, which: int, slots: Sequence[int]) -> None:
        """Move slots, whichever list they are in, to the hot end of a list, the last one hottest."""
        after, before = self.next, self.prev
        end = self.num_slots + which
        last = before[end]
        for slot in slots:
            if slot == last:
                continue
            hotter, colder = after[slot], before[slot]
            if hotter < 0:
                raise IntegrityError(f"slot {slot} was touched while it is not known")
            after[colder] = hotter
            before[hotter] = colder
            after[last] = slot
            after[slot] = end
            before[slot] = last
            before[end] = last = slot

    def unlink(self, slots: Sequence[int]) -> None:
        """Take slots out of the lists they are in."""
        after, before = self.next, self.prev
        for slot in slots:
            hotter, colder = after[slot], before[slot]
            if hotter < 0:
                raise IntegrityError(f"slot {slot} was removed while it is not known")
            after[colder] = hotter
            before[hotter] = colder
            after[slot] = ABSENT

    def take(self, which: int, count: int, pins: Sequence[int]) -> list[int] | None:
        """Take the `count` coldest slots that are not pinned out of a list, or change nothing and return None.

        Costs O(count + pinned slots passed over).
        """
        after, before = self.next, self.prev
        end = self.num_slots + which
        taken: list[int] = []
        passed: list[int] = []
        slot = after[end]
        while len(taken) < count:
            if slot == end:
                return None
            (passed if pins[slot] else taken).append(slot)
            slot = after[slot]
        for gone in taken:
            after[gone] = ABSENT
        # What was walked over is one chain at the cold end; it is spliced anew from the slots that stay.
        last = end
        for kept in passed:
            after[last] = kept
            before[kept] = last
            last = kept
        after[last] = slot
        before[slot] = last
        return taken

    def from_coldest(self, which: int) -> Iterator[int]:
        """The slots of a list from the coldest on."""
        end = self.num_slots + which
        slot = self.next[end]
        while slot != end:
            yield slot
            slot = self.next[slot]
