"""Blocks that requests announced and that are not placed yet: which segment each belongs to, and where in it.

A block's number is that of its announcement, and which of its blocks it is in the low bits. The latest blocks are kept
by key. What has waited longer, in a lower tier above all, is kept by the fingerprint of its key in one sorted array: 16
bytes a block and 16 an announcement, where keys would take about 200 a block. Two keys of one fingerprint
would count as one, once in about 2^64 / capacity lookups: a wrong guess about order, and never a wrong block.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import repeat
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvtier.control.policies.prediction.segments import NONE, Segments
from kvtier.types.keys import OffloadKey

LATEST_FRACTION = 64
LATEST_LEAST = 1024
OLDER_FRACTION = 4
OLDER_LEAST = 4096
"""So many announced blocks are kept, of the slots of a tier and beyond; of the latest prompt all."""
PLACE_BITS = 32
PLACE_MASK = (1 << PLACE_BITS) - 1

AnnouncedRun: TypeAlias = tuple[int, int, int, int]
"""(start, end, seg, position): the keys from `start` to before `end` are blocks of `seg` from `position` on. A `seg` of
NONE: it is not known."""


class AnnouncedBlocks:
    """One for a tier. What is known of a block ends when it is taken, dropped as too old, or its segment lost it."""

    def __init__(self, num_slots: int, segments: Segments) -> None:
        self._num_slots = num_slots
        self._segments = segments
        self.latest_max = num_slots // LATEST_FRACTION + LATEST_LEAST
        self.older_max = num_slots // OLDER_FRACTION + OLDER_LEAST
        self._latest: dict[OffloadKey, int] = {}
        self._announcements_max = self.latest_max
        self._lengths = array("i")
        self._segs = array("i")
        self._stamps = array("I")
        self._positions = array("i")
        self._older: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._numbers: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self._latest) + len(self._older)

    def make_room(self) -> None:
        """Before the blocks of a request are added: those of one request are kept together, however many they are."""
        if len(self._latest) >= self.latest_max or len(self._segs) >= self._announcements_max:
            self._pack_latest()

    def add(self, seg: int, position: int, keys: Sequence[OffloadKey]) -> None:
        """These blocks of a segment, from this position on, may come. No more of a prompt than the tier can hold."""
        keys = keys[: max(0, self._num_slots - position)]
        if not keys:
            return
        number, size = len(self._segs) << PLACE_BITS, len(keys)
        if size == 1:
            self._latest[keys[0]] = number
        else:
            self._latest.update(zip(keys, range(number, number + size), strict=True))
        self._lengths.append(size)
        self._segs.append(seg)
        self._stamps.append(self._segments.stamp[seg])
        self._positions.append(position)

    def find(self, keys: Sequence[OffloadKey]) -> list[AnnouncedRun]:
        """Which segments these keys belong to, in their order."""
        return self._runs(keys, list(map(self._latest.get, keys)))

    def take(self, keys: Sequence[OffloadKey]) -> list[AnnouncedRun]:
        """As `find`; the blocks are placed, so they are not kept any longer."""
        return self._runs(keys, list(map(self._latest.pop, keys, repeat(None))))

    def _runs(self, keys: Sequence[OffloadKey], numbers: list[int | None]) -> list[AnnouncedRun]:
        if len(self._older) and None in numbers:
            self._look_up(keys, numbers)
        segments, runs = self._segments, list[AnnouncedRun]()
        first, length, stamp = segments.first, segments.length, segments.stamp
        start, size = 0, len(numbers)
        while start < size:
            number, end = numbers[start], start + 1
            if number is None:
                while end < size and numbers[end] is None:
                    end += 1
                runs.append((start, end, NONE, NONE))
                start = end
                continue
            which, place = number >> PLACE_BITS, number & PLACE_MASK
            if end < size and numbers[end] == number + 1:
                end = min(size, start + self._lengths[which] - place)
                if numbers[start:end] != list(range(number, number + end - start)):
                    end = start + 2
                    while numbers[end] == number + end - start:
                        end += 1
            seg, position = self._segs[which], self._positions[which] + place
            if stamp[seg] != self._stamps[which]:
                runs.append((start, end, NONE, NONE))
            elif first[seg] <= position and position + end - start <= first[seg] + length[seg]:
                runs.append((start, end, seg, position))
            else:
                runs += self._inside(seg, start, end, position)
            start = end
        return runs

    def _inside(self, seg: int, start: int, end: int, position: int) -> list[AnnouncedRun]:
        """A run of one announcement, as far as its segment still has those positions."""
        first = self._segments.first[seg]
        last = first + self._segments.length[seg]
        if position + end - start <= first or position >= last:
            return [(start, end, NONE, NONE)]
        at, stop = start + max(0, first - position), min(end, start + last - position)
        parts = ((start, at, NONE, NONE), (at, stop, seg, position + at - start), (stop, end, NONE, NONE))
        return [part for part in parts if part[0] < part[1]]

    def _look_up(self, keys: Sequence[OffloadKey], numbers: list[int | None]) -> None:
        """Fill in the numbers of the older blocks."""
        missing = [index for index, number in enumerate(numbers) if number is None]
        wanted = np.array([xxh3_64_intdigest(keys[index]) for index in missing], np.uint64)
        at = np.minimum(np.searchsorted(self._older, wanted), len(self._older) - 1)
        for found in np.flatnonzero(self._older[at] == wanted).tolist():
            numbers[missing[found]] = int(self._numbers[at[found]])

    def _pack_latest(self) -> None:
        """The latest blocks become older ones, and the oldest are dropped. Announcements are numbered anew."""
        fresh = np.array(list(map(xxh3_64_intdigest, self._latest)), np.uint64)
        prints = np.concatenate([fresh, self._older])
        numbers = np.concatenate([np.array(list(self._latest.values()), np.int64), self._numbers])
        self._latest = {}
        order = np.argsort(prints, kind="stable")
        prints, numbers = prints[order], numbers[order]
        # Of one fingerprint the first is the newest: the latest were put before the older ones.
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
        self._announcements_max = len(used) + self.latest_max
