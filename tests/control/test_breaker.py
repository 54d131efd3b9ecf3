"""A dead tier degrades to misses and drops: the breaker, for loads and for stores, and what entries survive."""

from __future__ import annotations

import pytest
from support_control import World, below, key

from kvtier.control.tiers.breaker import Breaker, BreakerState
from kvtier.tier.contract import LookupResult
from kvtier.types.jobs import CANCELLED, CORRUPT, LATE, MISSING, STORED, DropReason, JobKind, dropped, failed

STORE, LOAD = JobKind.STORE, JobKind.LOAD


def test_a_breaker_opens_half_opens_for_one_probe_and_closes():
    breaker = Breaker(threshold=3, pause_seconds=5.0)
    for _ in range(2):
        breaker.on_failure(1.0)
    breaker.on_success()
    for _ in range(2):
        breaker.on_failure(1.0)
    assert breaker.allows(1.0), "only failures in a row count"
    breaker.on_failure(1.0)
    assert not breaker.allows(5.9)
    assert breaker.allows(6.0)
    breaker.on_send()
    assert not breaker.allows(6.0), "one probe at a time"
    breaker.on_failure(7.0)
    assert not breaker.allows(11.9)
    assert breaker.allows(12.0)
    breaker.on_send()
    breaker.on_success()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.allows(12.0)
    assert breaker.opened == 2


def fail_stores(world: World, numbers: range) -> None:
    for number in numbers:
        world.store(number)
        world.run_tier(0)
        for job in world.under_way(1, STORE):
            world.finish(job, "failed")


def test_with_the_store_breaker_open_rows_go_without_and_loads_go_on():
    world = below(4)
    lower = world.plane.control.lowers[0]
    fail_stores(world, range(10, 15))
    assert lower.store_breaker.state is BreakerState.OPEN
    world.store(20)
    world.run_tier(0)
    assert not world.under_way(1, STORE)
    assert lower.counters.dropped == {DropReason.TIER_DOWN: 1}
    assert world.plane.dirty_rows == 0
    assert world.plane.idle, "nothing is left in line"
    assert lower.load_breaker.state is BreakerState.CLOSED
    job = world.load(1, 2)
    world.run_all()
    assert world.statuses(job) == ["loaded", "loaded"]


def test_a_store_breaker_closes_after_one_probe_that_went_well():
    world = below(1)
    lower = world.plane.control.lowers[0]
    fail_stores(world, range(10, 15))
    world.now += lower.store_breaker.pause_seconds
    world.store(20)
    world.run_tier(0)
    (probe,) = world.under_way(1, STORE)
    world.finish(probe)
    assert lower.store_breaker.state is BreakerState.CLOSED
    assert lower.owned.ready(key(20)) is not None


def test_with_the_load_breaker_open_a_lower_tier_counts_as_empty_until_a_probe():
    world = below(8)
    lower = world.plane.control.lowers[0]
    for number in range(1, 6):
        job = world.load(number)
        world.finish(*world.under_way(1, LOAD), "failed")
        assert world.statuses(job) == ["missing"]
    assert lower.load_breaker.state is BreakerState.OPEN
    assert world.plane.lookup([key(6)], world.now) == [LookupResult.MISS]
    job = world.load(6)
    assert not world.running
    assert world.statuses(job) == ["missing"]
    assert lower.store_breaker.state is BreakerState.CLOSED
    world.pass_time(lower.load_breaker.pause_seconds)
    assert world.plane.lookup([key(6)], world.now) == [LookupResult.HIT_PENDING]
    probe, other = world.load(6), world.load(7)
    assert world.plane.lookup([key(8)], world.now) == [LookupResult.MISS], "the probe is under way"
    world.run_all()
    assert (world.statuses(probe), world.statuses(other)) == (["loaded"], ["missing"])
    assert lower.load_breaker.state is BreakerState.CLOSED
    assert world.plane.lookup([key(8)], world.now) == [LookupResult.HIT_PENDING]


@pytest.mark.parametrize("kind", [STORE, LOAD])
def test_a_half_open_breaker_lets_one_job_through_however_much_there_is_to_do(kind):
    world = below(250, rows=1024, slots=4096)
    lower = world.plane.control.lowers[0]
    breaker = lower.store_breaker if kind is STORE else lower.load_breaker
    for _ in range(breaker.threshold):
        breaker.on_failure(world.now)
    world.now += breaker.pause_seconds
    if kind is STORE:
        world.store(*range(2000, 2250))
        world.run_tier(0)
    else:
        world.load(*range(1, 251))
    assert len(world.under_way(1, kind)) == 1
    world.run_all()
    assert breaker.state is BreakerState.CLOSED
    world.check()


@pytest.mark.parametrize("outcome", [LATE, CANCELLED, dropped(DropReason.CLOSING)])
def test_an_entry_whose_promotion_never_ran_stays(outcome):
    """A job that was late while it still waited in line says nothing about the bytes below."""
    world = below(2)
    job = world.load(1)
    world.end(*world.under_way(1, LOAD), outcome)
    assert world.statuses(job) == ["missing"]
    assert world.plane.locate([key(1)], world.now) == ["fs"]
    again = world.load(1)
    world.run_all()
    assert world.statuses(again) == ["loaded"]


@pytest.mark.parametrize("outcome", [CORRUPT, MISSING, failed(5)])
def test_an_entry_that_could_not_be_read_is_missing_from_then_on(outcome):
    world = below(2)
    job = world.load(1, 2)
    (promotion,) = world.under_way(1, LOAD)
    world.end(promotion, outcome, STORED)
    world.run_all()
    assert world.statuses(job) == ["missing", "loaded"]
    assert world.plane.lookup([key(1)], world.now) == [LookupResult.MISS]


@pytest.mark.parametrize("kind", [STORE, LOAD])
def test_jobs_that_are_late_while_they_wait_in_line_open_the_breaker(kind):
    world = below(8)
    lower = world.plane.control.lowers[0]
    breaker = lower.store_breaker if kind is STORE else lower.load_breaker
    for number in range(1, 6):
        if kind is STORE:
            world.store(100 + number)
            world.run_tier(0)
        else:
            world.load(number)
        world.end(*world.under_way(1, kind), LATE)
    assert breaker.state is BreakerState.OPEN
