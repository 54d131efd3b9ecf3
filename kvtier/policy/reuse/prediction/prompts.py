"""The prompts of a stack by segments, whatever its tiers hold: the class of each block of the latest requests.

Admissions use it, and the life tables where no tier's policy keeps segments.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.policy.reuse.prediction.classes import class_of, first_use_of, new_level, output_level
from kvtier.policy.reuse.prediction.segments import NONE, Segments
from kvtier.types.keys import GroupIndex, OffloadKey, RequestId

SEGMENTS = 1 << 16
GHOST_BLOCKS_MAX = 1 << 30
RECENT_KEYS = 1 << 16
RECENT_KEYS_MAX = 1 << 17
"""Blocks of the latest prompts that are kept by key, twice at most. A prompt is not cut."""
REPEATS_MAX = 8
"""So many times these blocks are in the prompts that are kept, twice at most: prompts share most of theirs."""
OPEN_MAX = 4096
OUTPUT_BLOCKS_MAX = 1 << 16
"""Blocks of output of one request that are taken in."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The blocks of one group of a request; segment `segs[i]` ends before position `ends[i]`. Used at `time`.

    The numbers from `first` on are its blocks', at most `room` of them: it grows while its request computes output.
    """

    group: GroupIndex
    first: int
    room: int
    keys: list[OffloadKey]
    segs: list[int]
    ends: list[int]
    time: float


class Prompts:
    """Segments that hold no block of any tier, so all of them are ghosts; the ones used longest ago are dropped.

    Blocks of the latest prompts are numbered as they come: `_young` and `_old` have the number of each key, `_prompts`
    those that the numbers belong to. `ended` is called for a segment that is used again, `dropped` for a forgotten one.
    Memory: 30 MiB at most, and 60 MiB with `RECENT_KEYS_MAX`, as long as a prompt is far shorter than `RECENT_KEYS`.
    """

    def __init__(self, ended: Callable[[Segments, int, float], None], dropped: Callable[[Segments, int], None]) -> None:
        self._ended = ended
        self._dropped = dropped
        self.segments = Segments(SEGMENTS, GHOST_BLOCKS_MAX)
        self._kept = RECENT_KEYS
        self._young: dict[OffloadKey, int] = {}
        self._old: dict[OffloadKey, int] = {}
        self._prompts: list[Prompt] = []
        self._firsts: list[int] = []
        self._next = self._young_from = 0
        self._young_blocks = 0
        self._open: OrderedDict[RequestId, list[Prompt]] = OrderedDict()

    def keep(self, num_blocks: int) -> None:
        """Keep at least this many blocks of the latest prompts by key, within `RECENT_KEYS_MAX`."""
        self._kept = max(self._kept, min(RECENT_KEYS_MAX, num_blocks))

    def begin_request(self, name: RequestId, group: GroupIndex, keys: Sequence[OffloadKey], now: float) -> None:
        """Begin a request that uses these blocks of a group now."""
        segs, ends = self._walk(keys)
        known = ends[-1] if ends else 0
        level = new_level(len(keys) - known)
        gap = self.segments.use(segs, level, now, self._ended)
        if known < len(keys):
            segs.append(self._add(known, keys[known:], class_of(1, gap, level), now))
            ends.append(len(keys))
        prompt = Prompt(group, self._next, len(keys) + OUTPUT_BLOCKS_MAX, list(keys), segs, ends, now)
        self._remember(prompt)
        if group == 0 or name not in self._open:
            self._open.pop(name, None)
            self._open[name] = []
        self._open[name] = [*(one for one in self._open[name] if one.group != group), prompt]
        if len(self._open) > OPEN_MAX:
            self._open.popitem(last=False)

    def extend_request(self, name: RequestId, group: GroupIndex, keys: Sequence[OffloadKey]) -> None:
        """Extend a request by these blocks. Those that exist already, or are too many, change nothing."""
        prompt = next((one for one in self._open.get(name, ()) if one.group == group), None)
        if prompt is None:
            return
        end, last, segments = len(prompt.keys), prompt.segs[-1], self.segments
        known = segments.find(keys[0])
        if end + len(keys) > prompt.room or (known != NONE and segments.first[known] == end):
            self._open[name].remove(prompt)
            return
        if segments.extend(last, end, prompt.time, keys):
            prompt.ends[-1] += len(keys)
        else:
            seg = self._add(end, keys, first_use_of(segments.kind[last]), prompt.time)
            prompt.segs.append(seg)
            prompt.ends.append(end + len(keys))
        self._young.update(zip(keys, range(prompt.first + end, prompt.first + end + len(keys)), strict=True))
        prompt.keys.extend(keys)
        self._young_blocks += len(keys)

    def end_request(self, name: RequestId, output_tokens: int | None) -> None:
        """End a request, with its tokens of output unless None."""
        prompts = self._open.pop(name, [])
        if output_tokens is not None:
            for prompt in prompts:
                self.segments.set_output(prompt.segs, prompt.time, output_level(output_tokens))

    def find(self, key: OffloadKey) -> tuple[Prompt, int] | None:
        """The latest prompt that has this block, and the block's position in it; None if it was too long ago."""
        number = self._young.get(key)
        if number is None:
            number = self._old.get(key)
            if number is None:
                return None
        at = bisect_right(self._firsts, number) - 1
        if at < 0:  # output of a request that began before the prompts that are kept
            return None
        return self._prompts[at], number - self._firsts[at]

    def kinds(self, prompt: Prompt, position: int) -> set[int]:
        """The classes of the segments of a prompt from a block's on."""
        kind = self.segments.kind
        return {kind[seg] for seg in prompt.segs[bisect_right(prompt.ends, position) :]}

    # -- segments ------------------------------------------------------------------------------------------------

    def _walk(self, keys: Sequence[OffloadKey]) -> tuple[list[int], list[int]]:
        """The existing segments at the front of a prompt and where each ends. One that the prompt leaves is cut."""
        segments, segs, ends, position = self.segments, list[int](), list[int](), 0
        while position < len(keys):
            seg = segments.find(keys[position])
            if seg == NONE or segments.first[seg] != position:
                break
            end = position + segments.length[seg]
            if segments.agreed(seg, keys, position) < segments.length[seg]:
                end = position + self._agreed(seg, keys[position:end])
                segments.cut(seg, keys[position:end])
            segments.ghosts.move_to_end(0, (seg,))
            segs.append(seg)
            ends.append(end)
            position = end
        return segs, ends

    def _agreed(self, seg: int, keys: Sequence[OffloadKey]) -> int:
        """Number of keys at the front that are in the segment, as far as their prompts are kept; the first one is."""
        for count, key in enumerate(keys):
            found = self.find(key)
            if found is None or seg not in found[0].segs[bisect_right(found[0].ends, found[1]) :][:1]:
                return max(1, count)
        return len(keys)

    def _add(self, first: int, keys: Sequence[OffloadKey], kind: int, now: float) -> int:
        segments = self.segments
        seg = segments.add(NONE, first, keys)
        if seg == NONE:
            oldest = segments.oldest_ghost()
            self._dropped(segments, oldest)
            segments.drop(oldest)
            seg = segments.add(NONE, first, keys)
        segments.uses[seg] = segments.counts[seg] = 1
        segments.kind[seg], segments.touched[seg] = kind, now
        return seg

    def _remember(self, prompt: Prompt) -> None:
        if len(self._young) >= self._kept or self._young_blocks >= REPEATS_MAX * self._kept:
            gone = bisect_right(self._firsts, self._young_from - 1)
            del self._prompts[:gone], self._firsts[:gone]
            self._old, self._young, self._young_from = self._young, {}, self._next
            self._young_blocks = 0
        self._prompts.append(prompt)
        self._firsts.append(prompt.first)
        self._young.update(zip(prompt.keys, range(self._next, self._next + len(prompt.keys)), strict=True))
        self._young_blocks += len(prompt.keys) + REPEATS_MAX - 1  # a prompt of one block takes as much room as several
        self._next += prompt.room
