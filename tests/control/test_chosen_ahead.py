"""Slots to evict are chosen ahead of need where a policy follows requests; until they are needed they still hit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support_control import World, cpu_setup, fs_setup, key
from support_following import FollowingLRU

from kvtier.control.tiers.owned_tier import OwnedTier
from kvtier.control.tiers.slot_table import FREE
from kvtier.policy.reuse.preselecting_policy import AHEAD_MAX, AHEAD_PART, CHOOSE_PART, FEW_PART
from kvtier.types.jobs import DropReason
from kvtier.types.keys import RequestId

ROWS = AHEAD_MAX * AHEAD_PART
LATER = AHEAD_MAX // CHOOSE_PART
"""More are chosen once so many have gone."""
FEW = AHEAD_MAX // FEW_PART
NEXT = range(1, AHEAD_MAX + 1)
"""The blocks that are chosen once block 0 was evicted."""


@pytest.fixture
def world() -> World:
    """A CPU tier of which every row had a block, and one was needed for block `ROWS`."""
    world = World(replace(cpu_setup(ROWS), policy=FollowingLRU), [])
    for number in range(ROWS):
        world.store(number)
        world.run_all()
    store(world, ROWS)
    assert not there(world, 0)
    return world


def store(world: World, *numbers: int) -> None:
    world.store(*numbers)
    world.run_all()
    world.check()


def there(world: World, number: int) -> bool:
    return world.plane.locate([key(number)], world.now) == ["cpu"]


def tier_of(world: World) -> OwnedTier:
    return world.plane.control.cpu


def chosen(world: World) -> list[int]:
    """The blocks that were chosen, the next to go first."""
    tier = tier_of(world)
    return [int.from_bytes(tier.table.keys[slot][:16], "big") for slot in tier.policy._ahead]


def test_they_hold_their_blocks_until_they_are_needed(world: World) -> None:
    tier = tier_of(world)
    assert chosen(world) == list(NEXT)
    assert tier.table.counts[FREE] == 0
    assert all(there(world, number) for number in NEXT)
    store(world, ROWS + 1, ROWS + 2)
    assert [there(world, number) for number in (1, 2, 3)] == [False, False, True]
    assert tier.evictions == 3


def test_more_are_chosen_as_they_go(world: World) -> None:
    for number in range(LATER - 1):
        store(world, ROWS + 1 + number)
    assert len(chosen(world)) == AHEAD_MAX - LATER + 1
    store(world, 2 * ROWS)
    assert chosen(world) == list(range(1 + LATER, 1 + LATER + AHEAD_MAX))


@pytest.mark.parametrize("announced", [True, False])
def test_one_that_is_used_is_the_most_recent_again(world: World, announced: bool) -> None:
    if announced:
        world.plane.uses.begin(RequestId("r"), [key(2), key(1)], world.now, None, info=None)
    else:
        world.plane.uses.on_touch([key(2), key(1)], world.now)
        world.plane.touch([key(2), key(1)])
    assert chosen(world) == list(NEXT)[2:]
    for number in range(AHEAD_MAX // 2):
        store(world, ROWS + 1 + number)
    assert there(world, 1)
    assert there(world, 2)
    last = list(tier_of(world).policy.coldest())
    ready = [int.from_bytes(tier_of(world).table.keys[slot][:16], "big") for slot in last]
    assert ready.index(1) > ready.index(ROWS - 1)
    assert ready.index(1) < ready.index(2)  # the leaf goes first


def test_a_request_that_begins_once_more_were_chosen_has_them_back(world: World) -> None:
    gone = LATER
    for number in range(gone):
        world.store(ROWS + 1 + number)
        world.run_all()
    ahead, to_be_chosen = NEXT[-1], NEXT[-1] + 2
    world.plane.uses.begin(RequestId("r"), [key(ahead), key(ROWS), key(to_be_chosen)], world.now, None, info=None)
    rest = [number for number in range(gone + 1, gone + 1 + AHEAD_MAX) if number not in (ahead, to_be_chosen)]
    assert chosen(world) == rest
    world.check()


def test_one_that_is_in_use_waits_and_those_after_it_go(world: World) -> None:
    tier = tier_of(world)
    slots = tier.slots([key(1), key(2)])
    tier.pin(slots)
    store(world, ROWS + 1)
    assert [there(world, number) for number in (1, 2, 3)] == [True, True, False]
    tier.unpin(slots)
    store(world, ROWS + 2)
    assert [there(world, number) for number in (1, 2, 4)] == [False, True, True]


def test_one_that_is_dropped_is_chosen_no_more(world: World) -> None:
    tier = tier_of(world)
    tier.remove(tier.slots([key(1)]))
    tier.drop(tier.slots([key(2)]))
    world.check()
    assert chosen(world) == list(NEXT)[2:]
    for number in range(LATER + 2):  # two of them into what is free now
        store(world, ROWS + 1 + number)
    assert len(chosen(world)) == AHEAD_MAX


def test_a_retained_block_is_chosen_no_more(world: World) -> None:
    tier = tier_of(world)
    tier.retained.max_bytes = 1 << 20
    tier.retain(key(1))
    assert chosen(world) == list(NEXT)[1:]
    tier.unretain([key(1)])
    assert list(tier.policy.coldest())[-1] == tier.slots([key(1)])[0]
    world.check()


def test_nothing_is_left_after_a_reset(world: World) -> None:
    world.plane.reset(world.now)
    world.run_all()
    world.check()
    assert chosen(world) == []


def test_when_more_are_needed_than_were_chosen_the_policy_is_asked(world: World) -> None:
    count = AHEAD_MAX + 8
    store(world, *range(ROWS + 1, ROWS + 1 + count))
    assert [there(world, number) for number in (count, count + 1)] == [False, True]
    assert chosen(world) == list(range(count + 1, count + 1 + AHEAD_MAX))


def test_if_all_but_too_few_are_in_use_nothing_is_evicted(world: World) -> None:
    tier = tier_of(world)
    kept = set(tier.slots([key(3), key(ROWS - 1)]))
    used = [slot for slot in range(ROWS) if slot not in kept]
    tier.pin(used)
    assert tier.evict(3) == 0
    assert chosen(world) == list(NEXT) or sorted(chosen(world)) == list(NEXT)
    world.check()
    assert tier.evict(2) == 2
    assert not there(world, 3)
    tier.unpin(used)
    world.check()


def test_a_lower_tier_chooses_too() -> None:
    slots = 4 * AHEAD_PART
    world = World(cpu_setup(8), [replace(fs_setup(slots), policy=FollowingLRU)])
    for number in range(0, slots + 4, 4):
        store(world, *range(number, number + 4))
    lower = world.plane.control.lowers[0].owned
    assert lower is not None
    assert len(lower.policy._ahead) == slots // AHEAD_PART
    assert lower.table.counts[FREE] == 0


def test_a_small_tier_chooses_when_it_must() -> None:
    world = World(replace(cpu_setup(AHEAD_PART - 1), policy=FollowingLRU), [])
    store(world, *reversed(range(AHEAD_PART - 1)))
    store(world, AHEAD_PART)
    assert chosen(world) == []
    assert not there(world, 0)


@pytest.mark.parametrize("count", [FEW, FEW + 1])
def test_few_blocks_are_placed_unasked(world: World, count: int) -> None:
    tier, fresh = tier_of(world), list(range(ROWS + 1, ROWS + 1 + count))
    tier.request_policy.policy.unwanted = {key(number) for number in fresh}
    store(world, *fresh)
    few = count <= FEW
    assert [there(world, number) for number in fresh] == [few] * count
    assert world.plane.control.counters(0).dropped == ({} if few else {DropReason.BYPASSED: count})
