"""The policies are the textbook ones: their hit rates on a real trace, in a tier of n blocks.

A request hits its longest prefix of resident blocks; then its blocks are used from leaf to root.
"""

from __future__ import annotations

import json
from random import Random

import pytest
from support_counts import full_alone
from support_paths import TRACES

from kvtier.policy import make_policy
from kvtier.types.keys import OffloadKey, make_key

TRACE = TRACES / "conversation.jsonl"
LRU_HITS = ((8_000, 0.17805199), (16_000, 0.26270710), (32_000, 0.33199653))
ARC_HITS = ((8_000, 0.191), (16_000, 0.271))
"""Slots, and the share of the references that hit."""
pytestmark = [
    pytest.mark.trace,
    pytest.mark.skipif(not TRACE.is_file(), reason="no trace: put conversation.jsonl into ../shared/traces"),
]


@pytest.fixture(scope="module")
def requests() -> list[list[OffloadKey]]:
    with TRACE.open() as lines:
        return [[make_key(i.to_bytes(16, "big"), 0) for i in json.loads(line)["hash_ids"]] for line in lines]


class Tier:
    """One full tier: a directory, slots, and a policy."""

    def __init__(self, name: str, num_slots: int) -> None:
        self.keys: list = [None] * num_slots
        self.policy = make_policy(name, num_slots, self.keys)
        self.slots: dict[OffloadKey, int] = {}
        self.free = list(range(num_slots))
        self.holds = bytearray(num_slots)

    def hits(self, keys: list[OffloadKey]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.slots), len(keys))

    def place(self, keys: list[OffloadKey]) -> None:
        self.policy.admit(keys)
        if len(keys) > len(self.free):
            evicted = self.policy.evict(len(keys) - len(self.free), self.holds)
            for slot in evicted:
                del self.slots[self.keys[slot]]
            self.free += evicted
        slots = [self.free.pop() for _ in keys]
        for slot, key in zip(slots, keys, strict=True):
            self.keys[slot] = key
            self.slots[key] = slot
        self.policy.insert(slots)

    def use_one_by_one(self, keys: list[OffloadKey]) -> None:
        for key in reversed(keys):
            slot = self.slots.get(key)
            if slot is None:
                self.place([key])
            else:
                self.policy.touch([slot])

    def use_in_batches(self, keys: list[OffloadKey]) -> None:
        """As the stack does: hits are protected, misses placed in one batch, hits made the most recent again.

        Only what was there before is touched again: a block that has just come has been used once.
        """
        hits = [key for key in reversed(keys) if key in self.slots]
        self.policy.touch([self.slots[key] for key in hits])
        self.place([key for key in reversed(keys) if key not in self.slots])
        self.policy.touch([self.slots[key] for key in hits if key in self.slots])


def hit_rate(requests: list[list[OffloadKey]], name: str, num_slots: int, use) -> float:
    tier = Tier(name, num_slots)
    hits = 0
    for keys in requests:
        hits += tier.hits(keys)
        use(tier, keys)
    references = sum(map(len, requests))
    assert references == 288_500
    return hits / references


@pytest.mark.parametrize("use", [pytest.param(Tier.use_one_by_one, marks=full_alone()), Tier.use_in_batches])
def test_lru_hits_what_lru_hits(requests, use, dial, seed):
    """A quick run draws one of the sizes."""
    for num_slots, expected in Random(seed).sample(LRU_HITS, dial(len(LRU_HITS), 1)):
        assert hit_rate(requests, "lru", num_slots, use) == pytest.approx(expected, abs=1e-8), num_slots


@pytest.mark.parametrize("use", [pytest.param(Tier.use_one_by_one, marks=full_alone()), Tier.use_in_batches])
def test_arc_hits_what_arc_hits(requests, use, dial, seed):
    """A quick run draws one of the sizes."""
    for num_slots, expected in Random(seed).sample(ARC_HITS, dial(len(ARC_HITS), 1)):
        assert hit_rate(requests, "arc", num_slots, use) == pytest.approx(expected, abs=0.005), num_slots
