"""The blocks of one tier in the segments of their prompts: which segment a slot belongs to, in which order it goes.

Slots of no prompt so far, recovered ones above all, are `UNTRACKED` until a request uses them. A block that came
without a request is a segment of its own, at no position (`LONE`), until then.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

from kvtier.errors import IntegrityError
from kvtier.policy.reuse.prediction.model import ReuseModel
from kvtier.policy.reuse.prediction.segments import NONE, Segments
from kvtier.types.keys import OffloadKey

GHOST_CAPACITIES = 4
SEGMENTS_PERCENT = 64
"""Segments for each hundred slots, ghosts among them."""
UNTRACKED = -2
LONE = -1


class TierTree:
    """Slots by segment: `deepest[s]` is the slot at the leaf end of segment s, `above[slot]` the next one to its root.

    `position[slot]` is the block's in its prompt. Untracked slots are a list from `untracked`, the next to go, on, to
    `untracked_end`: for them `above` is the slot after, and `position` the one before.
    """

    def __init__(self, num_slots: int, keys: Sequence[OffloadKey | None], model: ReuseModel) -> None:
        self.segments = Segments(num_slots * SEGMENTS_PERCENT // 100 + 64, GHOST_CAPACITIES * num_slots)
        self.owner = array("i", [NONE]) * num_slots
        self.above = array("i", [NONE]) * num_slots
        self.position = array("i", [NONE]) * num_slots
        self.deepest = array("i", [NONE]) * self.segments.capacity
        self.untracked = self.untracked_end = NONE
        self.num_untracked = 0
        self._keys = keys
        self._model = model

    # -- requests ------------------------------------------------------------------------------------------------

    def walk(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> tuple[list[int], int]:
        """The segments at the front of a prompt, and how many blocks they are. Splits one that it leaves."""
        segments, owner = self.segments, self.owner
        length, first, held = segments.length, segments.first, segments.held
        path: list[int] = []
        position, size = 0, len(keys)
        while position < size:
            slot = slots[position]
            if slot < 0:
                seg = segments.find(keys[position])
            elif self._is_loose(slot):
                seg = self._adopt(path[-1] if path else NONE, position, keys, slots)
            else:
                seg = owner[slot]
            if seg == NONE or not length[seg] or first[seg] != position:
                break
            end = position + length[seg]
            if not self._has_all(seg, position, keys, slots):
                seg = self._split(seg, position, keys, slots)
                if seg == NONE:
                    break
                end = position + length[seg]
            if not held[seg]:
                segments.ghosts.move_to_end(0, (seg,))
            path.append(seg)
            position = end
        return path, position

    def add(self, parent: int, position: int, keys: Sequence[OffloadKey], kind: int) -> int:
        """A new segment, used once, now; NONE if there is no id for it. Old ghosts go for it."""
        segments = self.segments
        while segments.ghost_blocks > segments.ghost_blocks_max and self._drop_ghost():
            pass
        seg = segments.add(parent, position, keys)
        if seg == NONE and self._drop_ghost():
            seg = segments.add(parent, position, keys)
        if seg != NONE:
            if parent == seg or (parent != NONE and not segments.length[parent]):
                segments.parent[seg] = NONE
            segments.uses[seg] = 1
            segments.kind[seg] = kind
            segments.touched[seg] = self._model.now
            segments.counts[seg] = 1
        return seg

    def _has_all(self, seg: int, position: int, keys: Sequence[OffloadKey], slots: Sequence[int]) -> bool:
        """True if a prompt that has the first block of a segment, at this position, has the others as well."""
        length = self.segments.length[seg]
        end = position + length
        if end <= len(keys) and slots[end - 1] >= 0:
            return self.owner[slots[end - 1]] == seg
        return self.segments.agreed(seg, keys, position) == length

    def _drop_ghost(self) -> bool:
        seg = self.segments.oldest_ghost()
        if seg == NONE:
            return False
        self._model.count_cut(self.segments, seg)
        self.segments.drop(seg)
        return True

    def _adopt(self, parent: int, position: int, keys: Sequence[OffloadKey], slots: Sequence[int]) -> int:
        """A segment for the slots of no prompt that this one has from `position` on."""
        end = position
        while end < len(keys) and slots[end] >= 0 and self._is_loose(slots[end]):
            end += 1
        seg = self.add(parent, position, keys[position:end], 0)
        if seg != NONE:
            self.segments.counts[seg] = 0
            run = slots[position:end]
            for lone in self.detach(run):
                self.segments.drop(lone)
            self.attach(run, seg, position)
        return seg

    def _is_loose(self, slot: int) -> bool:
        seg = self.owner[slot]
        return seg == UNTRACKED or (seg != NONE and self.segments.first[seg] == LONE)

    def _split(self, seg: int, position: int, keys: Sequence[OffloadKey], slots: Sequence[int]) -> int:
        """The front of a segment, as far as it agrees with a prompt that leaves it; NONE if that cannot be found."""
        segments, owner = self.segments, self.owner
        end, agreed = min(position + segments.length[seg], len(keys)), position
        while agreed < end and slots[agreed] >= 0 and owner[slots[agreed]] == seg:
            agreed += 1
        moved = slots[position:agreed]
        if segments.held[seg] <= len(moved):
            # What lies behind is a ghost whose first key is not known.
            known = position + min(segments.agreed(seg, keys, position), segments.length[seg] - 1)
            segments.cut(seg, keys[position : max(agreed, known, position + 1)])
            return seg
        if not moved:
            return NONE
        among = set(moved)
        kept = [slot for slot in self.slots_of(seg) if slot not in among]
        rest = self._keys[kept[-1]]
        if rest is None:
            raise IntegrityError(f"slot {kept[-1]} is ready but has no key")
        front = segments.split_front(seg, keys[position:agreed], rest)
        if front != NONE:
            self._chain(seg, kept)
            self._chain(front, moved[::-1])
            for slot in moved:
                owner[slot] = front
            segments.kids[front] = 1
        return front

    # -- slots ---------------------------------------------------------------------------------------------------

    def attach(self, slots: Sequence[int], seg: int, position: int) -> None:
        """Slots, in prefix order, become blocks of a segment: from this position on."""
        segments, owner, above, where = self.segments, self.owner, self.above, self.position
        if not segments.held[seg]:
            self._arrive(seg)
        last = self.deepest[seg]
        late = last != NONE and where[last] > position
        for at, slot in enumerate(slots, position):
            if owner[slot] != NONE:
                raise IntegrityError(f"slot {slot} was inserted while it is known")
            owner[slot] = seg
            above[slot] = last
            where[slot] = at
            last = slot
        self.deepest[seg] = last
        segments.held[seg] += len(slots)
        if late:
            self._chain(seg, sorted(self.slots_of(seg), key=where.__getitem__, reverse=True))

    def leave_untracked(self, slot: int) -> None:
        """A slot belongs to no segment; it goes after those that belong to none already."""
        if self.owner[slot] != NONE:
            raise IntegrityError(f"slot {slot} was inserted while it is known")
        before = self.untracked_end
        self.owner[slot], self.above[slot], self.position[slot] = UNTRACKED, NONE, before
        if before == NONE:
            self.untracked = slot
        else:
            self.above[before] = slot
        self.untracked_end = slot
        self.num_untracked += 1

    def leave_list(self, slot: int) -> None:
        """An untracked slot goes, or gets a segment."""
        before, after = self.position[slot], self.above[slot]
        if before == NONE:
            self.untracked = after
        else:
            self.above[before] = after
        if after == NONE:
            self.untracked_end = before
        else:
            self.position[after] = before
        self.owner[slot] = NONE
        self.num_untracked -= 1

    def untracked_slots(self) -> Iterator[int]:
        """The untracked slots, the next to go first. One that was given may leave the list."""
        slot = self.untracked
        while slot != NONE:
            after = self.above[slot]
            yield slot
            slot = after

    def slots_of(self, seg: int) -> Iterator[int]:
        """The slots of a segment from its leaf end on."""
        slot = self.deepest[seg]
        while slot != NONE:
            yield slot
            slot = self.above[slot]

    def pop(self, seg: int, count: int, pins: Sequence[int]) -> list[int]:
        """Take slots from the leaf end, at most `count`, up to the first that is pinned."""
        above, owner, slot = self.above, self.owner, self.deepest[seg]
        taken: list[int] = []
        for _ in range(min(count, self.segments.held[seg])):
            if pins[slot]:
                break
            taken.append(slot)
            owner[slot] = NONE
            slot = above[slot]
        self.deepest[seg] = slot
        self.segments.held[seg] -= len(taken)
        return taken

    def detach(self, slots: Iterable[int]) -> list[int]:
        """Take slots out, wherever they are. Returns the segments that they were in, in order."""
        gone: dict[int, set[int]] = {}
        for slot in slots:
            seg = self.owner[slot]
            if seg == NONE:
                raise IntegrityError(f"slot {slot} was removed while it is not known")
            if seg == UNTRACKED:
                self.leave_list(slot)
            else:
                self.owner[slot] = NONE
                gone.setdefault(seg, set()).add(slot)
        for seg, some in gone.items():
            self._chain(seg, [slot for slot in self.slots_of(seg) if slot not in some])
        return list(gone)

    def on_empty(self, seg: int) -> int:
        """Make a segment that lost its last block a ghost. Returns its parent if that is a leaf now, else NONE."""
        segments = self.segments
        segments.bury(seg)
        parent = segments.parent[seg]
        if parent == NONE:
            return NONE
        segments.kids[parent] -= 1
        return parent if segments.held[parent] and not segments.kids[parent] else NONE

    def _arrive(self, seg: int) -> None:
        segments = self.segments
        segments.revive(seg)
        self.deepest[seg] = NONE
        parent = segments.parent[seg]
        if parent != NONE:
            if segments.is_parent(parent, seg):
                segments.kids[parent] += 1
            else:
                segments.parent[seg] = NONE

    def _chain(self, seg: int, deepest_first: Sequence[int]) -> None:
        """Link these slots, and no others, into a segment."""
        above, deeper = self.above, NONE
        self.deepest[seg] = deepest_first[0] if deepest_first else NONE
        for slot in deepest_first:
            if deeper != NONE:
                above[deeper] = slot
            deeper = slot
        if deeper != NONE:
            above[deeper] = NONE
        self.segments.held[seg] = len(deepest_first)
