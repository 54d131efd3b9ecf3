"""Blocks that requests announced and that are not placed yet: which segment each belongs to, and where in it.

The latest blocks are kept by key. What has waited longer, in a lower tier above all, is kept by the fingerprint of its
key in one sorted array: 16 bytes a block and 16 an announcement, where keys would take about 200 a block. A block's
number there is that of its announcement, and which of its blocks it is in the low bits. Two keys of one fingerprint
would count as one, once in about 2^64 / capacity lookups: a wrong guess about order, and never a wrong block.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import compress
from operator import attrgetter
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvtier.policy.reuse.prediction.segments import NONE, Segments
from kvtier.types.keys import OffloadKey

LATEST_FRACTION = 64
LATEST_LEAST = 1024
OLDER_FRACTION = 4
OLDER_LEAST = 4096
"""So many announced blocks are kept, of the slots of a tier and beyond; of the latest prompt all."""
UNSORTED_PACKS = 4
"""Older blocks are sorted once so many times `latest_max` of them are not."""
PLACE_BITS = 32
PLACE_MASK = (1 << PLACE_BITS) - 1

AnnouncedRun: TypeAlias = tuple[int, int, int, int]
"""(start, end, seg, position): the keys from `start` to before `end` are blocks of `seg` from `position` on. A `seg` of
NONE: it is not known."""


class Announcement:
    """Blocks of one segment, from a position on, in order. `whole`: all of `keys` wait still, and in no later one."""

    __slots__ = ("keys", "number", "position", "seg", "stamp", "whole")

    def __init__(self, number: int, seg: int, stamp: int, position: int, keys: list[OffloadKey]) -> None:
        self.number = number
        self.seg = seg
        self.stamp = stamp
        self.position = position
        self.keys = keys
        self.whole = True


class AnnouncedBlocks:
    """One for a tier. What is known of a block ends when it is taken, dropped as too old, or its segment lost it."""

    def __init__(self, num_slots: int, segments: Segments) -> None:
        self._num_slots = num_slots
        self._segments = segments
        self.latest_max = num_slots // LATEST_FRACTION + LATEST_LEAST
        self.older_max = num_slots // OLDER_FRACTION + OLDER_LEAST
        self._latest: dict[OffloadKey, Announcement] = {}
        self._announcements = 0
        self._lengths = array("i")
        self._segs = array("i")
        self._stamps = array("I")
        self._positions = array("i")
        self._older: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._numbers: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._unsorted: list[tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]] = []

    def __len__(self) -> int:
        self._sort_older()
        return len(self._latest) + len(self._older)

    def make_room(self) -> None:
        """Before the blocks of a request are added: those of one request are kept together, however many they are."""
        if len(self._latest) >= self.latest_max or self._announcements >= self.latest_max:
            self._pack_latest()
            if sum(len(numbers) for _, numbers in self._unsorted) > UNSORTED_PACKS * self.latest_max:
                self._sort_older()

    def add(self, seg: int, position: int, keys: Sequence[OffloadKey]) -> None:
        """These blocks of a segment, from this position on, may come. No more of a prompt than the tier can hold."""
        some, latest = list(keys[: max(0, self._num_slots - position)]), self._latest
        if not some:
            return
        if not latest.keys().isdisjoint(some):
            for key in some:
                if key in latest:
                    latest[key].whole = False
        announcement = Announcement(self._announcements, seg, self._segments.stamp[seg], position, some)
        self._announcements += 1
        for key in some:
            latest[key] = announcement

    def find(self, keys: Sequence[OffloadKey]) -> list[AnnouncedRun]:
        """Which segments these keys belong to, in their order."""
        return self._runs(list(keys), takes=False)

    def take(self, keys: list[OffloadKey]) -> list[AnnouncedRun]:
        """As `find`; the blocks are placed, so they are not kept any longer."""
        return self._runs(keys, takes=True)

    def _runs(self, keys: list[OffloadKey], takes: bool) -> list[AnnouncedRun]:
        latest, runs = self._latest, list[AnnouncedRun]()
        start, size = 0, len(keys)
        while start < size:
            found = latest.get(keys[start])
            if found is None:
                end = start + 1
                while end < size and keys[end] not in latest:
                    end += 1
                self._older_runs(runs, keys, start, end)
            else:
                known = found.keys
                place = 0 if known[0] == keys[start] else known.index(keys[start])
                end = min(size, start + len(known) - place)
                if not found.whole or keys[start:end] != known[place : place + end - start]:
                    end = self._agreed(found, place, keys, start, end)
                self._run(runs, start, end, found.seg, found.stamp, found.position + place)
                if takes:
                    for key in keys[start:end]:
                        del latest[key]
                    if place:
                        found.whole = False
                    elif end - start < len(known):
                        found.position += end - start
                        del known[: end - start]
            start = end
        return runs

    def _agreed(self, found: Announcement, place: int, keys: list[OffloadKey], start: int, end: int) -> int:
        """Where the keys leave an announcement that `start` is in, at the latest at `end`."""
        at = start + 1
        while at < end and keys[at] == found.keys[place + at - start] and self._latest.get(keys[at]) is found:
            at += 1
        return at

    def _run(self, runs: list[AnnouncedRun], start: int, end: int, seg: int, stamp: int, position: int) -> None:
        """Add a run of one announcement: as far as its segment still has those positions."""
        segments = self._segments
        first = segments.first[seg]
        if segments.stamp[seg] != stamp:
            runs.append((start, end, NONE, NONE))
        elif first <= position and position + end - start <= first + segments.length[seg]:
            runs.append((start, end, seg, position))
        else:
            runs += self._inside(seg, start, end, position)

    def _older_runs(self, runs: list[AnnouncedRun], keys: list[OffloadKey], start: int, stop: int) -> None:
        """Add the runs of keys that are none of the latest."""
        self._sort_older()
        if not len(self._older):
            runs.append((start, stop, NONE, NONE))
            return
        numbers = self._look_up(keys[start:stop])
        offset = start
        while start < stop:
            number, end = numbers[start - offset], start + 1
            if number < 0:
                while end < stop and numbers[end - offset] < 0:
                    end += 1
                runs.append((start, end, NONE, NONE))
            else:
                which, place = number >> PLACE_BITS, number & PLACE_MASK
                last = min(stop, start + self._lengths[which] - place)
                while end < last and numbers[end - offset] == number + end - start:
                    end += 1
                self._run(runs, start, end, self._segs[which], self._stamps[which], self._positions[which] + place)
            start = end

    def _inside(self, seg: int, start: int, end: int, position: int) -> list[AnnouncedRun]:
        """A run of one announcement, as far as its segment still has those positions."""
        first = self._segments.first[seg]
        last = first + self._segments.length[seg]
        if position + end - start <= first or position >= last:
            return [(start, end, NONE, NONE)]
        at, stop = start + max(0, first - position), min(end, start + last - position)
        parts = ((start, at, NONE, NONE), (at, stop, seg, position + at - start), (stop, end, NONE, NONE))
        return [part for part in parts if part[0] < part[1]]

    def _look_up(self, keys: Sequence[OffloadKey]) -> list[int]:
        """The numbers of older blocks, NONE where there is none."""
        wanted = np.fromiter(map(xxh3_64_intdigest, keys), np.uint64, len(keys))
        at = np.minimum(np.searchsorted(self._older, wanted), len(self._older) - 1)
        numbers: list[int] = np.where(self._older[at] == wanted, self._numbers[at], NONE).tolist()
        return numbers

    def _pack_latest(self) -> None:
        """The latest blocks become older ones, which are sorted when they are looked up or many."""
        names, places, latest = list[OffloadKey](), list[int](), self._latest
        for found in sorted(dict.fromkeys(latest.values()), key=attrgetter("number")):
            first, keys = len(self._segs) << PLACE_BITS, found.keys
            numbers: Iterable[int] = range(first, first + len(keys))
            if not found.whole:
                waits = [latest.get(key) is found for key in keys]
                keys, numbers = list(compress(keys, waits)), compress(numbers, waits)
            names += keys
            places += numbers
            self._lengths.append(len(found.keys))
            self._segs.append(found.seg)
            self._stamps.append(found.stamp)
            self._positions.append(found.position)
        prints = np.fromiter(map(xxh3_64_intdigest, names), np.uint64, len(names))
        self._unsorted.append((prints, np.array(places, np.int64)))
        self._latest, self._announcements = {}, 0

    def _sort_older(self) -> None:
        """Sort all older blocks by fingerprint, and drop the oldest. Announcements are numbered anew."""
        if not self._unsorted:
            return
        newest_first = [*reversed(self._unsorted), (self._older, self._numbers)]
        self._unsorted = []
        prints = np.concatenate([prints for prints, _ in newest_first])
        numbers = np.concatenate([numbers for _, numbers in newest_first])
        order = np.argsort(prints, kind="stable")
        prints, numbers = prints[order], numbers[order]
        # Of one fingerprint the first is the newest.
        kept = np.concatenate([np.ones(min(1, len(prints)), bool), prints[1:] != prints[:-1]])
        prints, numbers = prints[kept], numbers[kept]
        if len(numbers) > self.older_max:
            oldest = np.partition(numbers, len(numbers) - self.older_max)[len(numbers) - self.older_max]
            prints, numbers = prints[numbers >= oldest], numbers[numbers >= oldest]
        self._older, self._numbers = prints, numbers
        self._drop_announcements()

    def _drop_announcements(self) -> None:
        """Keep the announcements that older blocks belong to, numbered from 0 on."""
        which = self._numbers >> PLACE_BITS
        is_used = np.zeros(len(self._segs), bool)
        is_used[which] = True
        used = np.flatnonzero(is_used)
        self._numbers += (np.cumsum(is_used)[which] - 1 - which) << PLACE_BITS
        self._lengths = array("i", np.array(self._lengths)[used].tobytes())
        self._segs = array("i", np.array(self._segs)[used].tobytes())
        self._stamps = array("I", np.array(self._stamps)[used].tobytes())
        self._positions = array("i", np.array(self._positions)[used].tobytes())
