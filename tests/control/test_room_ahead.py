"""Slots are freed ahead of need where a policy follows requests, so that it is told of new blocks and not asked."""

from __future__ import annotations

from dataclasses import replace

from support_control import World, cpu_setup, fs_setup
from support_following import FollowingLRU

from kvtier.control.tiers.owned_tier import OwnedTier
from kvtier.control.tiers.room_ahead import AHEAD_MAX, AHEAD_PART, FEW_BLOCKS, RoomAhead
from kvtier.control.tiers.slot_table import FREE

ROWS = 4 * AHEAD_PART
AHEAD = ROWS // AHEAD_PART


def filled(rows: int = ROWS, follows: bool = True) -> tuple[World, OwnedTier]:
    """A CPU tier of which every row has a block."""
    setup = cpu_setup(rows)
    world = World(replace(setup, policy=FollowingLRU) if follows else setup, [])
    world.store(*range(rows))
    world.run_all()
    assert world.plane.control.cpu.table.counts[FREE] == 0
    return world, world.plane.control.cpu


def test_rows_are_freed_when_fewer_than_half_of_them_are_left() -> None:
    world, tier = filled()
    world.store(ROWS)
    world.run_all()
    assert tier.table.counts[FREE] == AHEAD
    assert tier.evictions == 1 + AHEAD
    for number in range(AHEAD // 2):
        world.store(ROWS + 1 + number)
        world.run_all()
    assert (tier.evictions, tier.table.counts[FREE]) == (1 + AHEAD, AHEAD - AHEAD // 2)
    for number in range(2):
        world.store(2 * ROWS + number)
        world.run_all()
    assert tier.evictions == 1 + AHEAD + AHEAD // 2 + 1
    world.check()


def test_a_large_tier_frees_no_more_than_the_most() -> None:
    world, tier = filled(2 * AHEAD_MAX * AHEAD_PART)
    world.store(3 * AHEAD_MAX * AHEAD_PART)
    world.run_all()
    assert tier.table.counts[FREE] == AHEAD_MAX
    world.check()


def test_none_is_freed_while_most_rows_are_in_use_or_the_policy_follows_no_requests() -> None:
    world, tier = filled()
    used = [slot for slot in range(ROWS) if slot >= 2 * AHEAD]
    tier.pin(used)
    world.store(ROWS)
    world.run_all()
    assert tier.table.counts[FREE] == 0
    tier.unpin(used)
    world, tier = filled(follows=False)
    world.store(ROWS)
    world.run_all()
    assert (tier.evictions, tier.table.counts[FREE]) == (1, 0)


def test_a_lower_tier_frees_slots_too() -> None:
    world = World(cpu_setup(8), [replace(fs_setup(ROWS), policy=FollowingLRU)])
    for number in range(0, ROWS + 4, 4):
        world.store(*range(number, number + 4))
        world.run_all()
    lower = world.plane.control.lowers[0].owned
    assert lower is not None
    assert lower.table.counts[FREE] == AHEAD
    world.check()


def test_what_was_freed_ahead_counts_as_evicted_for_many_blocks_and_not_for_few() -> None:
    room = RoomAhead(AHEAD_MAX * AHEAD_PART)
    assert room.evictions(FEW_BLOCKS, AHEAD_MAX) <= 0
    assert room.evictions(FEW_BLOCKS + 1, AHEAD_MAX) == FEW_BLOCKS + 1
    assert room.evictions(FEW_BLOCKS + 1, AHEAD_MAX + 5) == FEW_BLOCKS + 1 - 5
    assert room.evictions(FEW_BLOCKS, 2) == FEW_BLOCKS - 2
