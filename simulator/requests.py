"""The requests of a simulated process, where a policy follows them: prompts of one tree, ended in any order."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from kvtier.stack.request import StackRequest
from kvtier.stack.tier_stack import TierStack
from kvtier.types.keys import OffloadKey, RequestId, key_group

OUTPUTS = (None, 0, 5, 50, 5000)
OPEN_MAX = 3


def draw_prompts(rng: Random, keys: Sequence[OffloadKey]) -> tuple[tuple[OffloadKey, ...], ...]:
    """A tree over these keys, the same in each group: the way from a first block to each block is a prompt."""
    groups: dict[int, list[OffloadKey]] = {}
    for key in keys:
        groups.setdefault(key_group(key), []).append(key)
    ways: list[list[int]] = []
    for number in range(min(map(len, groups.values()))):
        above = rng.choice((number - 1, number - 1, number - 1, rng.randrange(-1, number) if number else -1))
        ways.append([*(ways[above] if above >= 0 else ()), number])
    return tuple(tuple(own[block] for own in groups.values() for block in way) for way in ways)


class RequestStream:
    """Announces one request after another to a stack. Its time jumps, stands still and goes back; some never end."""

    def __init__(self, stack: TierStack, prompts: Sequence[Sequence[OffloadKey]], rng: Random) -> None:
        self._stack = stack
        self._prompts = prompts
        self._rng = rng
        self._open: list[StackRequest] = []
        self._count = 0
        self._time: float | None = 1000.0 if prompts and rng.random() < 0.8 else None
        self.prompt: Sequence[OffloadKey] = ()

    def by_group(self, groups: int, most: int) -> list[list[OffloadKey]]:
        """The first blocks of the last prompt, at most so many, in the order of groups."""
        keys = self.prompt[:most]
        return [[key for key in keys if key_group(key) == group] for group in range(groups)]

    def step(self) -> None:
        """A request begins; perhaps others end, or the last one's blocks are used once more instead."""
        rng = self._rng
        if not self._prompts:
            return
        while len(self._open) > OPEN_MAX or (self._open and rng.random() < 0.3):
            ended = self._open.pop(rng.randrange(len(self._open)))
            if rng.random() < 0.9:
                ended.end(rng.choice(OUTPUTS))
        if rng.random() < 0.1:
            self._stack.request(RequestId("unannounced")).touch(self.prompt)
            return
        if self._open and rng.random() < 0.3:
            rng.choice(self._open).extend(rng.choice(self._prompts)[-rng.randrange(1, 4) :])
        if self._time is not None:
            self._time += rng.choice((0.0, 0.5, 40.0, 400.0, -5.0))
        self._count += 1
        self.prompt = rng.choice(self._prompts)
        self._open.append(self._stack.request(RequestId(f"prompt {self._count}"), self.prompt, time=self._time))
