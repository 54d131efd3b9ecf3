"""Gaps between uses and ages at eviction: in seconds, of every owned tier, whatever its policy."""

from __future__ import annotations

import pytest
from support_control import World, cpu_setup, fs_setup, key
from support_following import FollowingLRU

from kvtier.control.tiers.histogram import HistogramFigures
from kvtier.control.tiers.reuse_times import SAMPLED_SLOTS, ReuseTimes
from kvtier.types.keys import RequestId
from kvtier.types.requests import NO_INFO


def values(figures: HistogramFigures) -> list[float]:
    """What was counted; values of one bucket must be alike."""
    return list(figures.values_since(None))


def gaps(world: World, tier: int = 0) -> list[float]:
    return values(world.plane.control.owned_tiers[tier].uses.reuse_gaps.figures())


def ages(world: World, tier: int = 0) -> list[float]:
    return values(world.plane.control.owned_tiers[tier].uses.eviction_ages.figures())


def load(world: World, *numbers: int) -> None:
    world.load(*numbers)
    world.run_all()


def store(world: World, *numbers: int) -> None:
    world.store(*numbers)
    world.run_all()


@pytest.mark.parametrize("policy", ["lru", "arc", "reuse"])
def test_the_gap_is_from_one_use_to_the_next(policy: str) -> None:
    world = World(cpu_setup(8, policy), [])
    store(world, 1, 2)
    assert gaps(world) == []
    world.pass_time(20)
    load(world, 1, 2)
    assert gaps(world) == [20, 20]
    world.pass_time(100)
    load(world, 1)
    assert gaps(world) == [20, 20, 100]


def test_uses_of_one_request_are_one_use() -> None:
    world = World(cpu_setup(8), [fs_setup(16)])
    store(world, 1, 2)
    store(world, *range(10, 18))
    world.pass_time(0.5)
    load(world, 1, 2, 10)
    assert gaps(world) == gaps(world, 1) == []


def test_the_age_at_eviction_is_since_the_last_use() -> None:
    world = World(cpu_setup(4), [])
    store(world, 1, 2, 3, 4)
    world.pass_time(60)
    load(world, 3, 4)
    world.pass_time(30)
    store(world, 5, 6)
    assert ages(world) == [90, 90]
    world.pass_time(1000)
    store(world, 7, 8, 9)
    figures = world.plane.control.cpu.uses.eviction_ages.figures()
    assert (figures.count, figures.sum) == (5, 2 * 90 + 2 * 1030 + 1000)


def test_a_use_of_a_row_is_one_of_the_slot_on_disk() -> None:
    world = World(cpu_setup(8), [fs_setup(16)])
    store(world, 1)
    world.pass_time(40)
    load(world, 1)
    assert gaps(world, 1) == [40]


def test_time_passes_while_nothing_is_pumped() -> None:
    world = World(cpu_setup(4), [])
    store(world, 1, 2, 3, 4)
    world.now += 600
    store(world, 5)
    assert ages(world) == [600]


def test_requests_that_a_policy_follows_are_uses() -> None:
    world = World(cpu_setup(8, FollowingLRU), [])  # type: ignore[arg-type]
    store(world, 1, 2)
    world.pass_time(25)
    assert world.plane.uses is not None
    world.plane.uses.begin(RequestId("a"), [key(1), key(2), key(3)], world.now, None, NO_INFO)
    assert gaps(world) == [25, 25]


def test_the_coldest_block_is_the_one_unused_for_longest_now() -> None:
    world = World(cpu_setup(4), [])
    (tier,) = world.plane.control.owned_tiers
    assert tier.uses.coldest_seconds(tier.table.state, world.now) == 0
    world.pass_time(5)
    store(world, 1)
    world.pass_time(10)
    store(world, 2)
    assert tier.uses.coldest_seconds(tier.table.state, world.now) == 10
    assert tier.uses.coldest_seconds(tier.table.state, world.now + 7.5) == 17.5
    load(world, 1)
    assert tier.uses.coldest_seconds(tier.table.state, world.now + 7.5) == 7.5


def test_of_a_large_tier_some_slots_are_looked_at_from_its_beginning_to_its_end() -> None:
    count = 3 * SAMPLED_SLOTS + 7
    uses = ReuseTimes(count)
    uses.time.advance(0.0)
    uses.time.advance(1000.0)
    uses.use(range(count))
    uses.time.advance(1500.0)
    uses.use(range(count // 2, count))
    assert uses.coldest_seconds(bytearray([3]) * count, 1500.0) == 500
    assert uses.coldest_seconds(bytearray(count // 2) + bytearray([3]) * (count - count // 2), 1500.0) == 0


def test_nothing_used_and_nothing_evicted_is_nothing() -> None:
    uses = ReuseTimes(4)
    uses.use([])
    uses.evict([])
    assert (uses.reuse_gaps.figures().count, uses.eviction_ages.figures().count) == (0, 0)
