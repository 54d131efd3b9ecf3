"""Pending blocks: those that requests announced and that are not placed yet, with their segment and position in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from kvtier.policy.reuse.prediction.segments import NONE, Segments
from kvtier.types.keys import OffloadKey

KEPT_FRACTION = 4
KEPT_LEAST = 5120
"""Announced blocks that are kept: this fraction of the slots of a tier and this number; of the latest prompt all."""

PendingRun: TypeAlias = tuple[int, int, int, int]
"""(start, end, seg, position): the keys from `start` to before `end` are blocks of `seg` from `position` on. A `seg` of
NONE: none of them is pending."""


class Announcement:
    """Blocks of one segment, from a position on, in order. `waiting`: the number of them that are pending by it."""

    __slots__ = ("keys", "position", "seg", "stamp", "waiting")

    def __init__(self, seg: int, stamp: int, position: int, keys: list[OffloadKey]) -> None:
        self.seg = seg
        self.stamp = stamp
        self.position = position
        self.keys = keys
        self.waiting = 0


class PendingBlocks:
    """The pending blocks of one tier. A block is removed when it is taken, dropped as too old, or lost by its segment.

    About 180 bytes a block, most of them its key's.
    """

    def __init__(self, num_slots: int, segments: Segments) -> None:
        self._num_slots = num_slots
        self._segments = segments
        self.kept_max = num_slots // KEPT_FRACTION + KEPT_LEAST
        self._blocks: dict[OffloadKey, Announcement] = {}
        self._announcements: dict[Announcement, None] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def make_room(self) -> None:
        """Drop the oldest announcements. Before a request adds its blocks: they are kept together."""
        while len(self._blocks) > self.kept_max or len(self._announcements) > self.kept_max:
            oldest = next(iter(self._announcements))
            self._remove(oldest, [key for key in dict.fromkeys(oldest.keys) if self._blocks.get(key) is oldest])

    def add(self, seg: int, position: int, keys: Sequence[OffloadKey]) -> None:
        """Add blocks of a segment, from this position on. No more of a prompt than the tier can hold."""
        some, blocks = list(keys[: max(0, self._num_slots - position)]), self._blocks
        if not some:
            return
        if not blocks.keys().isdisjoint(some):
            for key in some:
                if key in blocks:
                    self._remove(blocks[key], (key,))
        announcement = Announcement(seg, self._segments.stamp[seg], position, some)
        fresh = dict.fromkeys(some, announcement)
        blocks.update(fresh)
        announcement.waiting = len(fresh)
        self._announcements[announcement] = None

    def find(self, keys: Sequence[OffloadKey]) -> list[PendingRun]:
        """The segments that these keys belong to, in their order."""
        return self._runs(list(keys), takes=False)

    def take(self, keys: list[OffloadKey]) -> list[PendingRun]:
        """The segments as by `find`; the blocks are placed, so they are not kept any longer."""
        return self._runs(keys, takes=True)

    def _runs(self, keys: list[OffloadKey], takes: bool) -> list[PendingRun]:
        blocks, runs = self._blocks, list[PendingRun]()
        start, size = 0, len(keys)
        while start < size:
            found = blocks.get(keys[start])
            if found is None:
                end = start + 1
                while end < size and keys[end] not in blocks:
                    end += 1
                runs.append((start, end, NONE, NONE))
            else:
                known = found.keys
                place = 0 if known[0] == keys[start] else known.index(keys[start])
                end = min(size, start + len(known) - place)
                if found.waiting < len(known) or keys[start:end] != known[place : place + end - start]:
                    end = self._agreed(found, place, keys, start, end)
                runs += self._inside(found, start, end, found.position + place)
                if takes:
                    self._remove(found, keys[start:end])
                    if not place:  # so that the rest is found by its first key
                        found.position += end - start
                        del known[: end - start]
            start = end
        return runs

    def _agreed(self, found: Announcement, place: int, keys: list[OffloadKey], start: int, end: int) -> int:
        """Position at which the keys leave an announcement that `start` is in, at the latest `end`."""
        at = start + 1
        while at < end and keys[at] == found.keys[place + at - start] and self._blocks.get(keys[at]) is found:
            at += 1
        return at

    def _inside(self, found: Announcement, start: int, end: int, position: int) -> list[PendingRun]:
        """Runs of one announcement: of its segment as far as that still has those positions, else of NONE."""
        seg, segments = found.seg, self._segments
        first, last = segments.first[seg], segments.first[seg] + segments.length[seg]
        if segments.stamp[seg] != found.stamp or position + end - start <= first or position >= last:
            return [(start, end, NONE, NONE)]
        if first <= position and position + end - start <= last:
            return [(start, end, seg, position)]
        at, stop = start + max(0, first - position), min(end, start + last - position)
        parts = ((start, at, NONE, NONE), (at, stop, seg, position + at - start), (stop, end, NONE, NONE))
        return [part for part in parts if part[0] < part[1]]

    def _remove(self, found: Announcement, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            del self._blocks[key]
        found.waiting -= len(keys)
        if not found.waiting:
            del self._announcements[found]
