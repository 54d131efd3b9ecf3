"""Blocks that a policy would rather not place: they are not stored, unless another tier wants them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support_control import ROW_BYTES, World, cpu_setup, fs_setup, key, shared_setup
from support_following import FollowingLRU

from kvtier.control.tiers.lower_tier import TierSpec
from kvtier.types.jobs import DropReason, JobKind, SkipReason


def following(setup: TierSpec) -> TierSpec:
    return replace(setup, policy=FollowingLRU)


def refuse(world: World, *numbers: int, position: int) -> None:
    request_policy = world.plane.control.owned_tiers[position].request_policy
    assert request_policy is not None
    assert isinstance(request_policy.policy, FollowingLRU)
    request_policy.policy.unwanted = {key(n) for n in numbers}


def store(world: World, *numbers: int) -> list[str]:
    job = world.store(*numbers)
    world.run_all()
    world.check()
    return world.statuses(job)


def places(world: World, *numbers: int) -> list[str | None]:
    return world.plane.locate([key(n) for n in numbers], world.now)


def test_what_is_worth_less_than_what_it_would_evict_is_not_stored() -> None:
    world = World(following(cpu_setup(4)), [])
    assert store(world, 1, 2, 3, 4) == ["stored"] * 4
    refuse(world, 6, position=0)
    assert store(world, 5, 6, 2) == ["stored", "dropped", "present"]
    assert places(world, 1, 2, 3, 4, 5, 6).count(None) == 2
    assert places(world, 5, 6) == ["cpu", None]
    assert world.plane.control.counters(0).dropped == {DropReason.BYPASSED: 1}


def test_while_there_is_room_everything_is_stored() -> None:
    world = World(following(cpu_setup(4)), [])
    refuse(world, 1, 2, position=0)
    assert store(world, 1, 2) == ["stored"] * 2


@pytest.mark.parametrize("below", [fs_setup(64), shared_setup()], ids=["owned", "shared"])
def test_a_tier_below_that_takes_every_block_gets_it_through_a_row(below: TierSpec) -> None:
    world = World(following(cpu_setup(4)), [below])
    store(world, 1, 2, 3, 4)
    refuse(world, 5, position=0)
    assert store(world, 5) == ["stored"]
    assert world.plane.control.counters(1).stored == 5


def test_what_the_tier_below_has_already_needs_no_row() -> None:
    world = World(following(cpu_setup(4)), [fs_setup(64)])
    store(world, 1, 2, 3, 4)
    store(world, 5, 6, 7, 8)
    refuse(world, 1, position=0)
    assert places(world, 1) == ["fs"]
    assert store(world, 1) == ["dropped"]
    assert places(world, 1) == ["fs"]


def test_a_lower_tier_bypasses_for_itself_and_is_asked_again_at_the_next_use() -> None:
    world = World(cpu_setup(8), [following(fs_setup(4))])
    store(world, 1, 2, 3, 4)
    refuse(world, 5, 7, position=1)
    assert store(world, 5, 6, 7) == ["stored"] * 3
    assert places(world, 5, 6, 7) == ["cpu"] * 3
    counters = world.plane.control.counters(1)
    assert (counters.stored, counters.skipped) == (5, {SkipReason.BYPASSED: 2})
    assert world.plane.dirty_rows == 0
    refuse(world, position=1)
    world.load(5)
    world.run_all()
    world.check()
    assert counters.stored == 6


def test_no_tier_wants_it() -> None:
    world = World(following(cpu_setup(4)), [following(fs_setup(4))])
    store(world, 1, 2, 3, 4)
    refuse(world, 5, 6, position=0)
    refuse(world, 5, position=1)
    assert store(world, 5, 6) == ["dropped", "stored"]
    assert places(world, 5) == [None]


def test_a_size_of_slots_with_room_bypasses_nothing() -> None:
    world = World(cpu_setup(64, groups=2), [following(fs_setup(24, 2, (ROW_BYTES, 3 * ROW_BYTES)))])
    owned = world.plane.control.lowers[0].owned
    assert owned is not None
    world.submit(JobKind.STORE, [*(key(n) for n in range(36)), key(0, 1)])
    world.run_all()
    assert not owned.placement.has_unformatted
    assert owned.request_policy is not None
    assert isinstance(owned.request_policy.policy, FollowingLRU)
    owned.request_policy.policy.unwanted = {key(99, 0), key(99, 1)}
    assert owned.keys_to_bypass([key(99, 0), key(99, 1)]) == [key(99, 0)]


def test_a_prompt_goes_to_a_tier_that_follows_requests_from_its_root_on() -> None:
    """So that what it takes of a prompt longer than one job is the front, and the end of it goes first."""
    world = World(cpu_setup(16), [replace(following(fs_setup(16)), inflight_blocks=2)])
    job = world.store(1, 2, 3, 4, 5)
    world.run_tier(0)
    sent: list[list[int]] = []
    while jobs := world.under_way(1, JobKind.STORE):
        sent += map(world.numbers, jobs)
        world.finish(jobs[0])
    assert sent == [[2, 1], [4, 3], [5]]
    assert world.statuses(job) == ["stored"] * 5
    world.check()


def test_what_such_a_tier_evicted_is_offered_again_once_it_is_used() -> None:
    world = World(cpu_setup(8), [following(fs_setup(4))])
    store(world, 1, 2, 3, 4)
    store(world, 5)
    index, counters = world.plane.control.lowers[0].index, world.plane.control.counters(1)
    [gone] = [n for n in (1, 2, 3, 4) if not index.presence(key(n), world.now)]
    assert (counters.stored, world.plane.dirty_rows) == (5, 0)
    world.load(gone)
    world.run_all()
    world.check()
    assert counters.stored == 6
    assert index.presence(key(gone), world.now)


def test_what_such_a_tier_evicted_is_not_written_again_on_eviction_unless_it_is_used() -> None:
    world = World(cpu_setup(4), [replace(following(fs_setup(4)), write_policy="on_evict")])
    store(world, 1, 2, 3, 4)
    store(world, 5, 6, 7, 8)
    world.load(1, 2)
    world.run_all()
    owned, dirty = world.plane.control.lowers[0].owned, world.plane.dirty_rows
    assert owned is not None
    owned.evict(owned.table.evictable)
    world.step()
    assert places(world, 1, 2) == ["cpu", "cpu"]
    assert world.plane.dirty_rows == dirty
    world.load(1)
    world.run_all()
    world.check()
    assert world.plane.dirty_rows == dirty + 1
