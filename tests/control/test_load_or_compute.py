"""A prefix in a tier that is slower than computing is not waited for, and is again once the tier is fast again."""

from __future__ import annotations

import math

import pytest
from support_control import World, cpu_setup, fs_setup, key, plane_settings, shared_setup

from kvtier.control.flow.load_or_compute import PROBE_BLOCKS, PROBE_SECONDS, PROBE_SHARE, PROMPTS
from kvtier.control.tiers.lower_tier import TierSpec
from kvtier.types.jobs import JobKind
from kvtier.types.keys import OffloadKey

BLOCK_SECONDS = 0.01


def keys(*numbers: int) -> list[OffloadKey]:
    return [key(number) for number in numbers]


def world_with(*lowers: TierSpec, block_seconds: float = BLOCK_SECONDS) -> World:
    """Blocks 1 to 48 are below, and 101 to 164 in the rows."""
    world = World(cpu_setup(64), list(lowers), 1, plane_settings(block_seconds=block_seconds))
    for numbers in (range(1, 49), range(101, 165)):
        world.store(*numbers)
        world.run_all()
    return world


def promote(world: World, seconds_each: float, *numbers: int) -> None:
    """Load blocks from below, at this speed."""
    world.load(*numbers)
    world.now += seconds_each * len(numbers)
    world.run_all()
    world.check()


@pytest.fixture(params=[fs_setup(256), shared_setup()], ids=["owned", "shared"])
def world(request: pytest.FixtureRequest) -> World:
    return world_with(request.param)


def probes(world: World) -> list[int]:
    world.step()
    return [len(world.numbers(job)) for job in world.under_way(1, JobKind.LOAD)]


def test_a_tier_of_which_nothing_is_known_is_worth_a_load(world: World) -> None:
    assert world.plane.choice.worth_loading(keys(*range(5, 13)), world.now) == 8


def test_a_fast_tier_loses_no_hit(world: World) -> None:
    for first in (1, 9, 17):
        promote(world, 0.9 * BLOCK_SECONDS, *range(first, first + 8))
    assert world.plane.choice.worth_loading(keys(*range(25, 41)), world.now) == 16
    assert world.plane.control.counters(1).computed_sooner == 0
    assert probes(world) == []


def test_what_a_slow_tier_has_is_not_waited_for_and_counted(world: World) -> None:
    promote(world, 5 * BLOCK_SECONDS, 1, 2, 3, 4)
    found = [*keys(1, 2, 3), *keys(*range(5, 13)), key(4)]
    assert world.plane.choice.worth_loading(found, world.now) == 3
    assert world.plane.control.counters(1).computed_sooner == 8
    assert world.plane.choice.worth_loading(keys(1, 2, 3, 4), world.now) == 4, "those are in rows"
    assert probes(world) == [8]
    world.check()


def test_loads_in_flight_count(world: World) -> None:
    promote(world, 0.4 * BLOCK_SECONDS, 1, 2, 3, 4)
    assert world.plane.choice.worth_loading(keys(5, 6, 7, 8), world.now) == 4
    world.load(*range(9, 21))
    assert world.plane.choice.worth_loading(keys(5, 6, 7, 8), world.now) == 0


def test_a_slow_tier_is_tried_out_now_and_then_and_found_fast_again(world: World) -> None:
    promote(world, 100 * BLOCK_SECONDS, 1, 2, 3, 4)
    tried, hits = 0, 0
    for _ in range(12):
        hits = world.plane.choice.worth_loading(keys(*range(5, 45)), world.now)
        if hits:
            break
        (count,) = probes(world)
        each = world.plane.control.lowers[0].speed.seconds(1)
        assert count == max(1, min(PROBE_BLOCKS, int(PROBE_SHARE * PROBE_SECONDS / each)))
        assert world.plane.choice.worth_loading(keys(*range(5, 45)), world.now) == 0
        assert probes(world) == [count], "one at a time"
        tried += 1
        world.now += 0.1 * BLOCK_SECONDS * count
        world.run_all()
        world.store(*range(200 + 64 * tried, 264 + 64 * tried))  # what was loaded is evicted again
        world.run_all()
        assert world.plane.choice.worth_loading(keys(*range(5, 45)), world.now) in (0, 40)
        assert probes(world) == [], "not before the time has come"
        world.pass_time(PROBE_SECONDS)
        world.check()
    assert hits == 40
    assert 1 < tried <= 8


def test_loads_that_fail_at_once_do_not_make_a_slow_tier_a_fast_one(world: World) -> None:
    promote(world, 5 * BLOCK_SECONDS, 1, 2, 3, 4)
    for first in (5, 13):
        world.load(*range(first, first + 8))
        for job in world.under_way(1, JobKind.LOAD):
            world.finish(job, "corrupt")
        world.run_all()
    assert world.plane.choice.worth_loading(keys(*range(21, 29)), world.now) == 0


def test_only_the_part_in_the_slow_tier_is_computed() -> None:
    world = world_with(fs_setup(256), shared_setup())
    fast, slow = world.plane.control.lowers
    fast.speed.on_end(8, 0.0, 8 * 0.1 * BLOCK_SECONDS)
    slow.speed.on_end(8, 0.0, 8 * 9 * BLOCK_SECONDS)
    assert fast.owned is not None
    for number in range(5, 9):
        slot = fast.owned.directory[key(number)]
        fast.owned.discard(slot, fast.owned.table.generation[slot])
    assert world.plane.choice.worth_loading(keys(101, 102, *range(1, 9)), world.now) == 6
    assert (fast.counters.computed_sooner, slow.counters.computed_sooner) == (0, 4)


def test_without_the_engines_speed_everything_is_worth_a_load() -> None:
    world = world_with(fs_setup(256), block_seconds=math.inf)
    promote(world, 1000.0 * BLOCK_SECONDS, 1, 2, 3, 4)
    assert world.plane.choice.worth_loading(keys(*range(5, 13)), world.now) == 8
    assert probes(world) == []


def test_the_engines_speed_may_be_that_of_the_prompts_that_it_computed() -> None:
    world = world_with(fs_setup(256), block_seconds=math.inf)
    promote(world, 5 * BLOCK_SECONDS, 1, 2, 3, 4)
    choice = world.plane.choice
    assert choice.worth_loading(keys(*range(5, 13)), world.now) == 8
    choice.on_compute(8, world.now, world.now + 8 * BLOCK_SECONDS)
    assert choice.worth_loading(keys(*range(5, 13)), world.now) == 0
    for _ in range(PROMPTS - 1):
        choice.on_compute(8, world.now, world.now + 8 * 100 * BLOCK_SECONDS)
    assert choice.worth_loading(keys(*range(5, 13)), world.now) == 0, "the fastest of the last prompts counts"
    choice.on_compute(8, world.now, world.now + 8 * 100 * BLOCK_SECONDS)
    assert choice.worth_loading(keys(*range(5, 13)), world.now) == 8, "the engine is slower than the tier by now"


def test_one_load_that_a_busy_machine_has_held_up_loses_no_hit_and_two_do(world: World) -> None:
    promote(world, 0.1 * BLOCK_SECONDS, *range(1, 9))
    promote(world, 50 * BLOCK_SECONDS, *range(9, 17))
    assert world.plane.choice.worth_loading(keys(*range(25, 41)), world.now) == 16
    promote(world, 50 * BLOCK_SECONDS, *range(17, 25))
    assert world.plane.choice.worth_loading(keys(*range(25, 41)), world.now) == 0


def test_a_load_that_is_late_says_that_the_tier_is_slow(world: World) -> None:
    world.load(1, 2, 3, 4)
    (job,) = world.under_way(1, JobKind.LOAD)
    world.now += 30.0
    world.make_late(job)
    assert world.plane.choice.worth_loading(keys(*range(5, 13)), world.now) == 0
    world.end_late(job, landed=True)
    world.check()
