"""Reuse: evicts the blocks that are least likely to be used again soon, by statistics of the requests themselves.

Blocks are kept by the segments of a prefix tree (`prediction.segments`). Life tables (`prediction.life_tables`) give
the worth of a segment by its class and age. Blocks are evicted from the leaf end of the leaf of the lowest worth; new
blocks that are worth less than what would go for them are not placed.

Where LRU would hit more, its order holds instead: `lru_guard`.

Memory: 55 bytes a slot and about 2 MB a tier, 1.5 MB a stack for the tables, allocated at once; and up to 52 bytes a
slot while many blocks are pending.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import inf
from typing import ClassVar

from kvtier.policy.base import RequestModel, RequestPolicy
from kvtier.policy.reuse.order import Entry, EvictionOrder
from kvtier.policy.reuse.pending_blocks import PendingBlocks, PendingRun
from kvtier.policy.reuse.prediction.classes import class_of, first_use_of, new_level, output_level
from kvtier.policy.reuse.prediction.model import ReuseModel
from kvtier.policy.reuse.prediction.segments import NONE
from kvtier.policy.reuse.tree import LONE, UNTRACKED, TierTree
from kvtier.types.keys import GroupIndex, OffloadKey, RequestId
from kvtier.types.requests import RequestUse

OPEN_MAX = 4096


@dataclass(slots=True)
class OpenUse:
    """A request in flight: the time it began, its segments from the root, and how many blocks it has in them.

    `end` is -1 once the segment that its next block follows is unknown.
    """

    time: float
    path: list[int]
    end: int


class Reuse(RequestPolicy):
    """Eviction by predicted worth, from class and age. A block that no request announced is a segment of its own.

    `_pending` are the blocks that may still be placed here: a lower tier gets them when their request has ended, or
    later. `_open` are the requests in flight. Both are bounded. `_admitted` are the keys that `admit` was given last,
    `_compared` those of the last `bypass`, with the segments that must not go for them.
    """

    MODEL: ClassVar[type[RequestModel]] = ReuseModel

    def __init__(self, num_slots: int, keys: Sequence[OffloadKey | None], model: RequestModel) -> None:
        assert isinstance(model, ReuseModel)
        self._keys = keys
        self._model = model
        self._tree = TierTree(num_slots, keys, model)
        self._order = EvictionOrder(num_slots, self._tree, model)
        self._pending = PendingBlocks(num_slots, self._tree.segments)
        self._open: OrderedDict[tuple[RequestId, int], OpenUse] = OrderedDict()
        self._groups = 1
        self._admitted: Sequence[OffloadKey] = ()
        self._compared: tuple[Sequence[OffloadKey], set[int]] = ((), set())

    # -- requests ------------------------------------------------------------------------------------------------

    def recover(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._tree.leave_untracked(slot)

    def begin_request(self, use: RequestUse, slots: Sequence[int]) -> None:
        keys, segments = use.keys, self._tree.segments
        self._model.count_lives(segments)
        if self._tree.num_untracked and segments.is_full():
            self._free_id({self._tree.owner[slot] for slot in slots if slot >= 0})
        path, known = self._tree.walk(keys, slots)
        level = new_level(len(keys) - known)
        gap = self._use(path, level)
        self._pending.make_room()
        self._expect(path, keys, slots)
        if known < len(keys):
            fresh = keys[known:]
            seg = self._add(path[-1] if path else NONE, known, fresh, class_of(1, gap, level))
            if seg != NONE:
                path.append(seg)
                self._pending.add(seg, known, fresh)
                known = len(keys)
        self._groups = max(self._groups, use.group + 1)
        name = use.request_id, use.group
        self._open.pop(name, None)
        self._open[name] = OpenUse(self._model.now, path, known if path and known == len(keys) else -1)
        if len(self._open) > OPEN_MAX:
            self._open.popitem(last=False)
        self._order.on_request(slots.count(-1))

    def extend_request(
        self, request_id: RequestId, group: GroupIndex, keys: Sequence[OffloadKey], slots: Sequence[int]
    ) -> None:
        use = self._open.get((request_id, group))
        if use is None or use.end < 0:
            return
        seg, end, pending = use.path[-1], use.end, self._pending
        if max(slots) >= 0:
            seg = NONE
        elif not self._tree.segments.extend(seg, end, use.time, keys):
            seg = self._grow_below(use, keys)
        if seg == NONE:
            use.end = -1
            return
        pending.make_room()
        pending.add(seg, end, keys)
        use.end = end + len(keys)

    def _grow_below(self, use: OpenUse, keys: Sequence[OffloadKey]) -> int:
        """A new segment below those of a request, as old as they are; NONE if it may exist, or there is no id."""
        parent, segments = use.path[-1], self._tree.segments
        known = segments.find(keys[0])
        if segments.first[parent] + segments.length[parent] != use.end or (
            known != NONE and segments.first[known] == use.end
        ):
            return NONE
        seg = self._add(parent, use.end, keys, first_use_of(segments.kind[parent]))
        if seg != NONE:
            segments.touched[seg] = use.time
            use.path.append(seg)
        return seg

    def end_request(self, request_id: RequestId, output_tokens: int | None) -> None:
        for group in range(self._groups):
            use = self._open.pop((request_id, group), None)
            if use is not None and output_tokens is not None:
                for seg in self._tree.segments.set_output(use.path, use.time, output_level(output_tokens)):
                    self._order.offer(seg)

    def advance(self, time: float) -> None:
        pass

    def _add(self, parent: int, position: int, keys: Sequence[OffloadKey], kind: int) -> int:
        """A new segment. Where no id is left, the slots of the leaf of the lowest worth give up theirs."""
        tree = self._tree
        seg = tree.add(parent, position, keys, kind)
        if seg == NONE and self._free_id({parent}):
            seg = tree.add(parent, position, keys, kind)
        return seg

    def _free_id(self, skip: set[int]) -> bool:
        """The slots of the leaf of the lowest worth that is not skipped give up its id. False if none has one."""
        tree, aside = self._tree, list[Entry]()
        least = self._order.take(skip, aside)[2]
        if least != NONE:
            slots = list(tree.slots_of(least))
            self._detach(slots)
            for slot in slots:
                tree.leave_untracked(slot)
        self._order.give_back(aside)
        return least != NONE

    def _use(self, path: Sequence[int], level: int) -> float:
        """Use these segments now. Returns the gap since the last use of the deepest, negative if there is none."""
        self._order.guard.on_use(path)
        gap = self._tree.segments.use(path, level, self._model.now, self._model.count_ended)
        for seg in path:
            self._order.offer(seg)
        return gap

    def _expect(self, path: Sequence[int], keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        """Remember the segments of those blocks in the tree that this tier lacks."""
        segments, parent, position = self._tree.segments, NONE, 0
        for seg in path:
            end = position + segments.length[seg]
            if segments.held[seg] < end - position:
                if not segments.held[seg]:
                    segments.parent[seg] = parent
                while position < end:
                    lacks, upto = slots[position] < 0, position + 1
                    while upto < end and (slots[upto] < 0) is lacks:
                        upto += 1
                    if lacks:
                        self._pending.add(seg, position, keys[position:upto])
                    position = upto
            parent, position = seg, end

    # -- slots ---------------------------------------------------------------------------------------------------

    def admit(self, keys: Sequence[OffloadKey]) -> None:
        self._admitted = keys

    def insert(self, slots: Sequence[int]) -> None:
        names, attach, offer = self._keys, self._tree.attach, self._order.offer
        slots = slots[::-1]
        keys: list[OffloadKey] = list(map(names.__getitem__, slots))  # type: ignore[arg-type]  # ready: it has a key
        runs = self._pending.take(keys)
        for start, end, seg, position in runs:
            if seg != NONE:
                attach(slots[start:end], seg, position)
        for start, end, seg, _ in runs:  # after the others: ghosts go for new segments
            if seg == NONE:
                self._insert_lone(keys[start:end], slots[start:end])
            else:
                offer(seg)

    def _insert_lone(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        """Blocks that no request announced: each is a segment of its own, or none while there is no id left for it."""
        tree = self._tree
        for key, slot in zip(keys, slots, strict=True):
            seg = self._add(NONE, LONE, (key,), class_of(1, -1.0, 1))
            if seg == NONE:
                tree.leave_untracked(slot)
            else:
                tree.attach((slot,), seg, LONE)
                self._order.offer(seg)

    def touch(self, slots: Sequence[int]) -> None:
        owner = self._tree.owner
        used = dict.fromkeys(owner[slot] for slot in reversed(slots))
        self._use([seg for seg in used if seg not in (NONE, UNTRACKED)], 0)

    def renew(self, slots: Sequence[int]) -> None:
        """Do nothing: the order of commits is none of uses."""

    def remove(self, slots: Sequence[int]) -> None:
        for seg in self._detach(slots):
            if not self._tree.segments.held[seg] and not self._tree.segments.kids[seg]:
                self._tree.segments.drop(seg)

    def forget(self, slots: Sequence[int]) -> None:
        self._detach(slots)

    def evict(self, count: int, pins: Sequence[int]) -> list[int] | None:
        admitted, (compared, protected) = self._admitted[::-1], self._compared
        if admitted != compared:
            protected = self._prefixes(self._pending.find(admitted))
        self._admitted, self._compared = (), ((), set())
        chosen, untracked, parts = self._take(count, pins, protected)
        if len(chosen) < count:
            # Pinned leaves are in the way, or what is about to grow: any block that is not pinned.
            others = list(islice((slot for slot in self.coldest() if not pins[slot]), count - len(chosen)))
            if len(chosen) + len(others) < count:
                self._put_back(untracked, parts)
                return None
            self._detach(others)
            chosen += others
        return chosen

    def preselect(self, count: int, pins: Sequence[int]) -> list[int]:
        return self._take(count, pins, set())[0]

    @property
    def admits_everything(self) -> bool:
        return not self._order.guard.follows_model

    def bypass(self, keys: Sequence[OffloadKey], evictions: int, pins: Sequence[int]) -> Sequence[int]:
        order, held, room = self._order, self._tree.segments.held, self._tree.num_untracked
        if evictions <= room or self.admits_everything:
            return ()
        runs = self._pending.find(keys)
        prefixes = self._prefixes(runs)
        self._compared = keys, prefixes
        worths = [order.value(seg) if seg != NONE else inf for _, _, seg, _ in runs]
        lowest = order.lowest(prefixes, pins)
        theirs, _, victim = lowest
        if victim == NONE or (evictions <= room + held[victim] and min(worths) >= theirs):
            return ()
        upcoming, kept = order.upcoming(prefixes, pins), len(keys)
        is_lowest = order.is_first(lowest)
        for (start, _, seg, _), worth in zip(reversed(runs), reversed(worths), strict=True):
            if seg == NONE or evictions <= 0:
                break
            while evictions > 0 and kept > start:
                if room <= 0 and not (is_lowest and worth < theirs):
                    theirs, victim = next(upcoming, (0.0, NONE))
                    if victim == NONE:
                        evictions = 0
                        break
                    room, is_lowest = held[victim], False
                if worth < theirs:
                    left_out = min(evictions, kept - start)
                    kept -= left_out
                    evictions -= left_out
                else:
                    fits = min(room, evictions)
                    evictions -= fits
                    room -= fits
        upcoming.close()
        return range(kept, len(keys))

    def coldest(self) -> Iterator[int]:
        yield from self._tree.untracked_slots()
        for seg in self._order.coldest_first():
            yield from self._tree.slots_of(seg)

    def _prefixes(self, runs: Sequence[PendingRun]) -> set[int]:
        """The segments that hold what is right before these blocks, which must not go for them."""
        parent, segs = self._tree.segments.parent, set[int]()
        for _, _, seg, _ in runs:
            if seg != NONE:
                segs.add(seg)
                segs.add(parent[seg])
        return segs

    def _take(
        self, count: int, pins: Sequence[int], protected: set[int]
    ) -> tuple[list[int], list[int], list[tuple[int, list[int]]]]:
        """Take up to `count` slots: untracked ones, then those of the leaves of the lowest worth, and both apart."""
        untracked = self._take_untracked(count, pins) if self._tree.num_untracked else []
        parts = self._take_leaves(count - len(untracked), pins, protected)
        return list(chain(untracked, *[slots for _, slots in parts])), untracked, parts

    def _take_untracked(self, count: int, pins: Sequence[int]) -> list[int]:
        tree = self._tree
        slots = list(islice((slot for slot in tree.untracked_slots() if not pins[slot]), count))
        for slot in slots:
            tree.leave_list(slot)
        return slots

    def _take_leaves(self, count: int, pins: Sequence[int], protected: set[int]) -> list[tuple[int, list[int]]]:
        """Take up to `count` slots from the leaves of the lowest worth, by segment."""
        tree, order, aside, parts = self._tree, self._order, list[Entry](), list[tuple[int, list[int]]]()
        held = tree.segments.held
        while count > 0:
            seg = order.take(protected, aside, pins)[2]
            if seg == NONE:
                break
            slots = tree.pop(seg, count, pins)
            parts.append((seg, slots))
            count -= len(slots)
            if held[seg]:
                order.offer(seg)
            else:
                parent = tree.on_empty(seg)
                if parent != NONE:
                    order.offer(parent)
        order.give_back(aside)
        return parts

    def _put_back(self, untracked: Sequence[int], parts: Sequence[tuple[int, Sequence[int]]]) -> None:
        for slot in untracked:
            self._tree.leave_untracked(slot)
        for seg, slots in reversed(parts):
            for slot in reversed(slots):
                self._tree.attach((slot,), seg, self._tree.position[slot])
                self._order.offer(seg)

    def _detach(self, slots: Sequence[int]) -> list[int]:
        segs = self._tree.detach(slots)
        for seg in segs:
            if self._tree.segments.held[seg]:
                self._order.offer(seg)
            else:
                parent = self._tree.on_empty(seg)
                if parent != NONE:
                    self._order.offer(parent)
        return segs
