"""ARC, the adaptive replacement cache (Megiddo and Modha, FAST 2003), on slots that are filled asynchronously.

T1 holds blocks that were used once since they came, T2 those used again; B1 and B2 remember what left them. A ghost hit
in B1 means that T1 was too small, one in B2 that T2 was. `p`, a real number of slots, is the size T1 should have.

Called key by key (admit, evict when full, insert) it goes through the states of the paper's figure 4. The paper makes
room among the ghosts before it replaces. Here room is made when a ghost or a slot needs it, which ends in the same
state and costs no ghost when a fill is aborted. Always: |T1| + |B1| <= c, |B1| + |B2| <= c, |T1| + |T2| <= c.

Memory: 34 bytes a slot (9 for T1 and T2, 25 for the ghosts), allocated at once, and the keys that hit a ghost and
whose fill has not ended, at most `num_slots` of them, usually a handful.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from kvtier.errors import IntegrityError
from kvtier.policy.base import EvictionPolicy
from kvtier.policy.ghosts import NONE, GhostLists
from kvtier.policy.slot_lists import SlotLists
from kvtier.types.keys import OffloadKey

ONCE, AGAIN = 0, 1


class ARC(EvictionPolicy):
    """Adaptive replacement: recency and frequency, balanced by the ghosts that come again.

    A key whose fill is aborted after `admit` stays promised to T2 until it is filled, or until `num_slots` younger
    promises have been made; nothing else remembers it.
    """

    __slots__ = ("_capacity", "_ghosts", "_keys", "_lists", "_p", "_promised", "_sizes", "_tie_to_once", "_where")

    def __init__(self, num_slots: int, keys: Sequence[OffloadKey | None]) -> None:
        self._capacity = num_slots
        self._keys = keys
        self._lists = SlotLists(num_slots, 2)
        self._where = bytearray(num_slots)
        self._sizes = [0, 0]
        self._ghosts = GhostLists(num_slots, 2)
        self._promised: OrderedDict[OffloadKey, None] = OrderedDict()
        self._p = 0.0
        self._tie_to_once = False

    @property
    def target(self) -> float:
        """Slots that T1 should have: the paper's p, between 0 and `num_slots`."""
        return self._p

    def admit(self, keys: Sequence[OffloadKey]) -> None:
        """Adapt `p` by the keys that are ghosts and promise them to T2."""
        sizes, pop = self._ghosts.sizes, self._ghosts.pop
        found = NONE
        for key in keys:
            once, again = sizes
            found = pop(key)
            if found == NONE:
                continue
            if found == ONCE:
                self._p = min(float(self._capacity), self._p + max(1.0, again / once))
            else:
                self._p = max(0.0, self._p - max(1.0, once / again))
            self._promised[key] = None
            if len(self._promised) > self._capacity:
                self._promised.popitem(last=False)
        if keys:
            self._tie_to_once = found == AGAIN

    def insert(self, slots: Sequence[int]) -> None:
        """Slots of promised keys enter T2, others T1."""
        if not self._promised:
            self._enter(ONCE, slots)
            return
        keys, promised = self._keys, self._promised
        for slot in slots:
            key = keys[slot]
            if key is not None and key in promised:
                del promised[key]
                self._enter(AGAIN, (slot,))
            else:
                self._enter(ONCE, (slot,))

    def touch(self, slots: Sequence[int]) -> None:
        """Whatever is used again belongs to T2."""
        self._lists.move_to_end(AGAIN, slots)
        where, promoted = self._where, 0
        for slot in slots:
            if where[slot] == ONCE:
                where[slot] = AGAIN
                promoted += 1
        self._sizes[ONCE] -= promoted
        self._sizes[AGAIN] += promoted

    def renew(self, slots: Sequence[int]) -> None:
        """Each stays in the list it is in."""
        for slot in slots:
            self._lists.move_to_end(self._where[slot], (slot,))

    def remove(self, slots: Sequence[int]) -> None:
        self._lists.unlink(slots)
        for slot in slots:
            self._sizes[self._where[slot]] -= 1

    def evict(self, count: int, pins: Sequence[int]) -> list[int] | None:
        """The paper's REPLACE, `count` times. Where only held slots are left in one list, the other one gives."""
        chosen: list[int] = []
        if count > 0:
            for slot in self._victims(pins):
                chosen.append(slot)
                if len(chosen) == count:
                    break
        if len(chosen) < count:
            return None
        self.forget(chosen)
        return chosen

    def forget(self, slots: Sequence[int]) -> None:
        self._lists.unlink(slots)
        for slot in slots:
            self._become_ghost(slot)

    def coldest(self) -> Iterator[int]:
        return self._victims(None)

    def _victims(self, pins: Sequence[int] | None) -> Iterator[int]:
        """Slots that are not pinned, in the order of REPLACE as long as nothing changes."""
        after = self._lists.next
        ends = (self._capacity + ONCE, self._capacity + AGAIN)
        cold = [after[ends[ONCE]], after[ends[AGAIN]]]
        once, tie = self._sizes[ONCE], self._tie_to_once
        while True:
            if pins is not None:
                for which in (ONCE, AGAIN):
                    while cold[which] != ends[which] and pins[cold[which]]:
                        cold[which] = after[cold[which]]
            wanted = ONCE if once > self._p or (tie and once == self._p) else AGAIN
            if cold[wanted] == ends[wanted]:
                wanted = AGAIN - wanted
                if cold[wanted] == ends[wanted]:
                    return
            slot = cold[wanted]
            cold[wanted] = after[slot]
            once -= wanted == ONCE
            yield slot

    def _enter(self, which: int, slots: Sequence[int]) -> None:
        self._lists.append(which, slots)
        self._sizes[which] += len(slots)
        where = self._where
        for slot in slots:
            where[slot] = which
        if which == ONCE:
            while self._ghosts.sizes[ONCE] and self._sizes[ONCE] + self._ghosts.sizes[ONCE] > self._capacity:
                self._ghosts.pop_oldest(ONCE)

    def _become_ghost(self, slot: int) -> None:
        which = self._where[slot]
        key = self._keys[slot]
        if key is None:
            raise IntegrityError(f"slot {slot} is ready but has no key")
        ghosts, sizes = self._ghosts, self._sizes
        if ghosts.sizes[ONCE] + ghosts.sizes[AGAIN] == self._capacity:
            # Case IV of the paper: B1 gives way when T1 and B1 fill the capacity, else B2.
            full = sizes[ONCE] + ghosts.sizes[ONCE] >= self._capacity
            if full and not ghosts.sizes[ONCE]:
                sizes[which] -= 1
                return
            ghosts.pop_oldest(ONCE if full else AGAIN)
        ghosts.push(which, key)
        sizes[which] -= 1
