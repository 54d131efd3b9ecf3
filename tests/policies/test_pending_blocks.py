"""Pending blocks are found as if each were kept by its key alone, whichever were announced again or taken."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvtier.policy.reuse.pending_blocks import PendingBlocks, PendingRun
from kvtier.policy.reuse.prediction.segments import NONE, Segments
from kvtier.types.keys import OffloadKey, make_key

SLOTS = 100
PROMPT_BLOCKS = 30


class EachByItsKey:
    """(segment, position) by key."""

    def __init__(self, segments: Segments) -> None:
        self.segments = segments
        self.blocks: dict[OffloadKey, tuple[int, int, int]] = {}

    def add(self, seg: int, position: int, keys: Sequence[OffloadKey]) -> None:
        for at, key in enumerate(keys, position):
            self.blocks[key] = (seg, self.segments.stamp[seg], at)

    def find(self, key: OffloadKey) -> tuple[int, int]:
        seg, stamp, at = self.blocks.get(key, (NONE, 0, NONE))
        first = self.segments.first[seg]
        known = seg != NONE and self.segments.stamp[seg] == stamp
        return (seg, at) if known and first <= at < first + self.segments.length[seg] else (NONE, NONE)


def each(runs: Sequence[PendingRun]) -> list[tuple[int, int]]:
    """(segment, position) of each key, from runs that follow one another."""
    found: list[tuple[int, int]] = []
    for start, end, seg, position in runs:
        assert start == len(found) < end
        found += [(seg, position + at if seg != NONE else NONE) for at in range(end - start)]
    return found


@pytest.mark.parametrize("seed", range(20))
def test_what_is_found_is_what_was_announced_last_and_not_taken(seed: int) -> None:
    rng = random.Random(seed)
    prompts = [[make_key(f"{name}/{at}".encode(), 0) for at in range(PROMPT_BLOCKS)] for name in range(8)]
    segments = Segments(64, 10_000)
    announced, expected = PendingBlocks(SLOTS, segments), EachByItsKey(segments)
    segs = [segments.add(NONE, 0, keys) for keys in prompts]
    for _ in range(600):
        name = rng.randrange(len(prompts))
        start = rng.randrange(PROMPT_BLOCKS)
        keys = prompts[name][start : rng.randrange(start, PROMPT_BLOCKS) + 1]
        if (drawn := rng.random()) < 0.45:
            announced.add(segs[name], start, keys)
            expected.add(segs[name], start, keys)
        elif drawn < 0.5:  # another segment has the id, or it lost its end
            segments.cut(segs[name], prompts[name][: rng.randrange(10, PROMPT_BLOCKS)])
        else:
            asked = keys + prompts[name - 1][: rng.randrange(5)]
            if rng.random() < 0.2:
                rng.shuffle(asked)
            assert each(announced.find(asked)) == [expected.find(key) for key in asked]
            if rng.random() < 0.5:
                assert each(announced.take(asked)) == [expected.find(key) for key in asked]
                for key in asked:
                    expected.blocks.pop(key, None)
        assert len(announced) == len(expected.blocks)
