"""Blocks that requests announced and that are not placed yet: which segment each belongs to, and where in it.

Blocks are numbered as they are announced, and `_firsts` has the first number of each announcement. The latest blocks
are kept by key. What has waited longer, in a lower tier above all, is kept by the fingerprint of its key in one sorted
array: 16 bytes a block and 20 an announcement, where keys would take about 200 a block. Two keys of one fingerprint
would count as one, once in about 2^64 / capacity lookups: a wrong guess about order, and never a wrong block.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

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


class AnnouncedRun(NamedTuple):
    """The keys from `start` to before `end` of some keys: blocks of `seg` from `position` on. `seg` NONE: not known."""

    start: int
    end: int
    seg: int
    position: int


class AnnouncedBlocks:
    """One for a tier. What is known of a block ends when it is taken, dropped as too old, or its segment lost it."""

    def __init__(self, num_slots: int, segments: Segments) -> None:
        self._num_slots = num_slots
        self._segments = segments
        self.latest_max = num_slots // LATEST_FRACTION + LATEST_LEAST
        self.older_max = num_slots // OLDER_FRACTION + OLDER_LEAST
        self._latest: dict[OffloadKey, int] = {}
        self._next = 0
        self._firsts = array("q")
        self._firsts_max = self.latest_max
        self._segs = array("i")
        self._stamps = array("I")
        self._positions = array("i")
        self._older: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._numbers: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self._latest) + len(self._older)

    def make_room(self) -> None:
        """Before the blocks of a request are added: those of one request are kept together, however many they are."""
        if len(self._latest) >= self.latest_max or len(self._firsts) >= self._firsts_max:
            self._pack_latest()

    def add(self, seg: int, position: int, keys: Sequence[OffloadKey]) -> None:
        """These blocks of a segment, from this position on, may come. No more of a prompt than the tier can hold."""
        keys = keys[: max(0, self._num_slots - position)]
        if not keys:
            return
        number = self._next
        self._latest.update(zip(keys, range(number, number + len(keys)), strict=True))
        self._firsts.append(number)
        self._segs.append(seg)
        self._stamps.append(self._segments.stamp[seg])
        self._positions.append(position)
        self._next = number + len(keys)

    def find(self, keys: Sequence[OffloadKey]) -> list[AnnouncedRun]:
        """Which segments these keys belong to, in their order."""
        return self._runs(keys, list(map(self._latest.get, keys)))

    def take(self, keys: Sequence[OffloadKey]) -> list[AnnouncedRun]:
        """As `find`; the blocks are placed, so they are not kept any longer."""
        return self._runs(keys, list(map(self._latest.pop, keys, repeat(None))))

    def _runs(self, keys: Sequence[OffloadKey], numbers: list[int | None]) -> list[AnnouncedRun]:
        if len(self._older) and None in numbers:
            self._look_up(keys, numbers)
        runs: list[AnnouncedRun] = []
        start, size, firsts = 0, len(numbers), self._firsts
        while start < size:
            number, end = numbers[start], start + 1
            if number is None:
                while end < size and numbers[end] is None:
                    end += 1
                runs.append(AnnouncedRun(start, end, NONE, NONE))
            else:
                which = bisect_right(firsts, number) - 1
                upto = firsts[which + 1] if which + 1 < len(firsts) else self._next
                end = min(size, start + upto - number)
                if numbers[start:end] != list(range(number, number + end - start)):
                    end = start + 1
                    while numbers[end] == number + end - start:
                        end += 1
                runs += self._of_segment(which, start, end, self._positions[which] + number - firsts[which])
            start = end
        return runs

    def _of_segment(self, which: int, start: int, end: int, position: int) -> list[AnnouncedRun]:
        """A run of one announcement, as far as its segment still has those positions."""
        segments, seg = self._segments, self._segs[which]
        first = segments.first[seg]
        last = first + segments.length[seg]
        if segments.stamp[seg] != self._stamps[which] or position + end - start <= first or position >= last:
            return [AnnouncedRun(start, end, NONE, NONE)]
        if first <= position and position + end - start <= last:
            return [AnnouncedRun(start, end, seg, position)]
        at, stop = start + max(0, first - position), min(end, start + last - position)
        inside = AnnouncedRun(at, stop, seg, position + at - start)
        parts = (AnnouncedRun(start, at, NONE, NONE), inside, AnnouncedRun(stop, end, NONE, NONE))
        return [part for part in parts if part.start < part.end]

    def _look_up(self, keys: Sequence[OffloadKey], numbers: list[int | None]) -> None:
        """Fill in the numbers of the older blocks."""
        missing = [index for index, number in enumerate(numbers) if number is None]
        wanted = np.array([xxh3_64_intdigest(keys[index]) for index in missing], np.uint64)
        at = np.minimum(np.searchsorted(self._older, wanted), len(self._older) - 1)
        for found in np.flatnonzero(self._older[at] == wanted).tolist():
            numbers[missing[found]] = int(self._numbers[at[found]])

    def _pack_latest(self) -> None:
        """The latest blocks become older ones, and the oldest are dropped. Numbers begin anew, so they stay small."""
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
        """Keep the announcements that older blocks belong to, and number their blocks from 0 on without gaps."""
        firsts = np.array(self._firsts)
        which = np.searchsorted(firsts, self._numbers, "right") - 1
        is_used = np.zeros(len(firsts), bool)
        is_used[which] = True
        used = np.flatnonzero(is_used)
        begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.diff(firsts, append=self._next)[used])])
        self._numbers += begins[np.cumsum(is_used)[which] - 1] - firsts[which]
        self._next = int(begins[-1])
        self._firsts = array("q", begins[:-1].tobytes())
        self._segs = array("i", np.array(self._segs)[used].tobytes())
        self._stamps = array("I", np.array(self._stamps)[used].tobytes())
        self._positions = array("i", np.array(self._positions)[used].tobytes())
        self._firsts_max = len(used) + self.latest_max
