"""Roots of one tier are judged one by one: what hangs in one keeps nothing from the others."""

from __future__ import annotations

import random

import pytest
from support_control import World, cpu_setup, fs_setup, key

from kvtier.control.tiers.breaker import BreakerState
from kvtier.tier.contract import LookupResult
from kvtier.types.jobs import JobKind

STORE, LOAD = JobKind.STORE, JobKind.LOAD


def root_of(world: World, job_id) -> int:
    """The root of a job's slots: all of them lie in one."""
    roots = world.plane.control.lowers[0].roots
    slots = [slot for group in world.running[job_id].job.groups for slot in group.slots]
    (root,) = {roots.of(slot) for slot in slots}
    return root


def two_roots(rows: int = 32, slots: int = 128) -> World:
    return World(cpu_setup(rows), [fs_setup(slots, regions=4, roots=2)])


def freeze(world: World, frozen: int, *numbers: int) -> None:
    """Store keys below; what goes to one root is late, the rest ends well."""
    world.store(*numbers)
    world.run_tier(0)
    for job in world.under_way(1, STORE):
        world.make_late(job) if root_of(world, job) == frozen else world.finish(job)


@pytest.mark.parametrize("frozen", [0, 1])
def test_beside_a_silent_root_the_others_take_every_store(frozen):
    world = two_roots(slots=64)
    freeze(world, frozen, *range(8))
    lower = world.plane.control.lowers[0]
    assert lower.roots.late[frozen] == lower.rows_late > 0
    for first in range(100, 196, 4):
        world.store(*range(first, first + 4))
        world.run_tier(0)
        jobs = world.under_way(1, STORE)
        assert jobs
        assert {root_of(world, job) for job in jobs} == {1 - frozen}
        world.run_all()
    assert lower.owned.evictions > 0, "also once it is full"
    assert not lower.counters.dropped
    assert lower.store_breaker.state is BreakerState.CLOSED
    world.check()


def test_what_a_silent_root_holds_is_a_miss_until_its_late_transfer_has_ended():
    world = two_roots()
    world.store(*range(8))
    world.run_all()
    lower = world.plane.control.lowers[0]
    of = {n: lower.roots.of(lower.owned.directory[key(n)]) for n in range(8)}
    for first in range(1000, 1032, 4):  # other keys take the rows
        freeze(world, 0, *range(first, first + 4))
    found = world.plane.lookup([key(n) for n in range(8)], world.now)
    assert found == [LookupResult.HIT_PENDING if of[n] else LookupResult.MISS for n in range(8)]
    load = world.load(*range(8))
    world.run_all()
    assert world.statuses(load) == ["loaded" if of[n] else "missing" for n in range(8)]
    for job in list(world.late):
        world.end_late(job, True)
    load = world.load(*range(8))
    world.run_all()
    assert world.statuses(load) == ["loaded"] * 8
    world.check()


def test_a_root_that_hangs_holds_no_more_rows_than_its_share():
    world = two_roots(rows=32)
    for number in range(60):
        world.store(number)
        world.run_tier(0)
        for job in world.under_way(1, STORE):
            if root_of(world, job):
                world.finish(job)
    lower = world.plane.control.lowers[0]
    assert lower.rows_in_flight == lower.roots.held[0] == lower.rows_max // 2
    assert lower.counters.stored > 40, "the other root has taken the rest"
    world.check()


def test_when_every_root_is_late_the_tier_is():
    world = two_roots()
    lower = world.plane.control.lowers[0]
    lower.store_breaker.threshold = 1
    freeze(world, 0, 1, 2)
    assert lower.store_breaker.state is BreakerState.CLOSED
    freeze(world, 1, 3, 4)
    assert lower.store_breaker.state is BreakerState.OPEN


@pytest.mark.parametrize("kind", [STORE, LOAD])
def test_after_a_probe_that_is_late_in_one_root_another_root_is_tried(kind):
    world = two_roots()
    world.store(*range(8))
    world.run_all()
    for first in range(1000, 1032, 4):  # other keys take the rows
        world.store(*range(first, first + 4))
        world.run_all()
    lower = world.plane.control.lowers[0]
    breaker = lower.store_breaker if kind is STORE else lower.load_breaker
    for _ in range(breaker.threshold):
        breaker.on_failure(world.now)
    probed = []
    for wanted in ([n for n in range(8) if lower.roots.of(lower.owned.directory[key(n)]) == 0], range(8)):
        world.pass_time(breaker.pause_seconds)
        if kind is STORE:
            world.store(2000 + len(probed))
            world.run_tier(0)
        else:
            world.load(*wanted)
        (probe,) = world.under_way(1, kind)
        probed.append(root_of(world, probe))
        if len(probed) == 1:
            world.make_late(probe)
            assert breaker.state is BreakerState.OPEN
    world.finish(probe)
    assert set(probed) == {0, 1}
    assert breaker.state is BreakerState.CLOSED
    world.check()


def test_random_hangs_never_break_the_sums(seed):
    rng = random.Random(seed)
    for _ in range(20):
        policy = rng.choice(["write_through", "on_evict"])
        rows, roots = rng.choice([8, 32]), rng.choice([2, 4])
        world = World(cpu_setup(rows), [fs_setup(64, regions=8, roots=roots, write_policy=policy)])
        for _ in range(80):
            names = sorted({rng.randrange(100) for _ in range(rng.randrange(1, 5))})
            world.submit(rng.choice([STORE, STORE, LOAD]), [key(name) for name in names], timeout=5.0)
            for job in list(world.running):
                if job in world.running and rng.random() < 0.8:
                    below = world.running[job].position == 1
                    world.make_late(job) if below and rng.random() < 0.2 else world.finish(job)
            for job in list(world.late):
                if rng.random() < 0.1:
                    world.end_late(job, rng.random() < 0.5)
            world.pass_time(rng.random())
            world.check()
        for job in list(world.late):
            world.end_late(job, True)
        world.pass_time(60.0)
        world.run_all()
        world.check()
        assert world.plane.idle, f"replay with --seed {seed}"
