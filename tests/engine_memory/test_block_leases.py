"""A block that was found stays for its load, and no longer than it may."""

from __future__ import annotations

import pytest

from kvtier.control.tiers.owned_tier import OwnedTier
from kvtier.engines.engine_memory.plane import BlockLeases
from kvtier.tier.contract import SlotSpace
from kvtier.types.keys import OffloadKey, make_key

SLOTS = 4


def key(number: int) -> OffloadKey:
    return make_key(number.to_bytes(8, "big"), 0)


@pytest.fixture
def tier() -> OwnedTier:
    """Four slots, all of them with a block, the first one the coldest."""
    tier = OwnedTier("tier", SlotSpace(SLOTS * 4096, (1,), (4096,)), "lru")
    tier.commit(tier.reserve([key(number) for number in range(SLOTS)]))
    return tier


def fill(tier: OwnedTier, first: int, count: int) -> int:
    """How many of so many new blocks find a slot."""
    return len(tier.reserve([key(number) for number in range(first, first + count)]))


def test_a_leased_block_is_not_evicted_until_it_is_released(tier):
    leases = BlockLeases(tier, 10.0, SLOTS)
    leases.take(key(0), now=0.0)
    leases.take(key(0), now=1.0)
    leases.release([key(0), key(9)])
    assert fill(tier, 10, SLOTS) == SLOTS - 1
    assert tier.presence(key(0), 1.0)
    leases.release([key(0)])
    assert fill(tier, 20, 1) == 1
    assert not tier.presence(key(0), 1.0)
    tier.check()


def test_a_lease_ends_when_its_time_has_passed(tier):
    leases = BlockLeases(tier, 10.0, SLOTS)
    for number in range(SLOTS):
        leases.take(key(number), now=float(number))
    assert fill(tier, 10, 1) == 0
    leases.expire(11.0)
    assert fill(tier, 10, SLOTS) == 2
    assert not leases.release([key(0)])
    tier.check()


def test_a_further_lease_than_there_may_be_ends_the_oldest(tier):
    leases = BlockLeases(tier, 10.0, 2)
    for number in range(SLOTS):
        leases.take(key(number), now=0.0)
    assert fill(tier, 10, SLOTS) == SLOTS - 2
    leases.release_all()
    assert fill(tier, 20, 2) == 2
    tier.check()
