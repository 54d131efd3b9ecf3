"""Gathered demotions: one job for the rows of several engine steps, and what does not wait for that."""

from __future__ import annotations

import pytest
from support_control import World, cpu_setup, fs_setup, key, plane_settings

from kvtier.control.flow.demotions import GATHER_BLOCKS
from kvtier.control.tiers.breaker import BreakerState
from kvtier.types.jobs import JobKind, failed
from kvtier.types.keys import RequestId

STORE = JobKind.STORE
GATHER_SECONDS = 2.0


def gathering(rows: int = 256, watermark_rows: int = 0, **more: object) -> World:
    limits = plane_settings(watermark_rows=watermark_rows, gather_seconds=GATHER_SECONDS)
    return World(cpu_setup(rows), [fs_setup(512, **more)], limits=limits)


def store(world: World, *numbers: int) -> None:
    """The blocks are in rows when this returns."""
    world.store(*numbers)
    world.run_tier(0)


def below(world: World) -> list[list[int]]:
    return [world.numbers(job) for job in world.under_way(1, STORE)]


def test_the_rows_of_several_steps_are_one_job():
    world = gathering()
    for number in (1, 2, 3):
        store(world, number)
        world.pass_time(0.5)
        assert below(world) == []
    assert world.plane.next_deadline(world.now) == GATHER_SECONDS
    world.pass_time(0.5)
    assert below(world) == [[1, 2, 3]]
    assert world.plane.next_deadline(world.now) is None
    world.run_all()
    assert world.plane.dirty_rows == 0
    world.check()


def test_gathered_rows_are_work_that_is_pending():
    world = gathering()
    store(world, 1)
    assert (world.plane.idle, world.plane.backlog, world.plane.dirty_rows) == (False, 1, 1)


def test_the_next_rows_wait_anew():
    world = gathering()
    store(world, 1)
    world.pass_time(GATHER_SECONDS)
    world.run_all()
    store(world, 2)
    assert below(world) == []
    assert world.plane.next_deadline(world.now) == 2 * GATHER_SECONDS


def test_enough_rows_for_a_job_do_not_wait():
    world = gathering(rows=16 * GATHER_BLOCKS)
    store(world, *range(GATHER_BLOCKS - 1))
    assert below(world) == []
    store(world, GATHER_BLOCKS)
    assert [len(job) for job in below(world)] == [GATHER_BLOCKS]


def test_few_rows_are_enough_where_there_are_few():
    world = gathering(rows=16)
    store(world, 1)
    assert below(world) == []
    store(world, 2)
    assert below(world) == [[1, 2]]


def test_rows_do_not_wait_below_the_watermark():
    world = gathering(rows=64, watermark_rows=63)
    store(world, 1)
    assert below(world) == []
    world.store(2)
    assert below(world) == [[1]]


def test_rows_do_not_wait_while_a_store_waits_for_rows():
    world = gathering(rows=64)
    leased = list(range(100, 156))
    store(world, *leased)
    world.run_all()
    assert world.plane.reserve(RequestId("r"), [key(number) for number in leased], world.now).served
    store(world, 1, 2)
    waiting = world.store(3, 4, 5, 6, 7, 8)
    assert below(world) == []
    more = world.store(9)
    assert below(world) == [[2, 1]]
    world.run_all()
    assert [world.statuses(job) for job in (waiting, more)] == [["stored"] * 6, ["stored"]]
    world.check()


def test_a_flush_and_closing_send_what_was_gathered():
    for send in (World.step, lambda world: world.plane.flush(world.now), lambda world: world.plane.close(world.now)):
        world = gathering()
        store(world, 1)
        send(world)
        world.collect()
        assert below(world) == ([] if send is World.step else [[1]])
        world.pass_time(GATHER_SECONDS)
        world.run_all()
        assert world.plane.dirty_rows == 0
        world.check()


def test_what_a_full_root_put_off_is_not_gathered_again():
    world = gathering(inflight_blocks=1)
    store(world, 1)
    store(world, 2)
    world.pass_time(GATHER_SECONDS)
    assert below(world) == [[1]]
    world.run_all()
    assert world.plane.dirty_rows == 0
    world.check()


@pytest.mark.parametrize("seconds", [0.0, GATHER_SECONDS])
def test_a_breaker_with_nothing_to_store_is_half_open_after_its_pause(seconds):
    world = World(cpu_setup(64), [fs_setup(64)], limits=plane_settings(gather_seconds=seconds))
    breaker = world.plane.control.lowers[0].store_breaker
    for number in range(breaker.threshold):
        store(world, number)
        world.pass_time(seconds)
        world.end(world.under_way(1, STORE)[0], failed(5))
    assert (breaker.state, world.plane.backlog) == (BreakerState.OPEN, 0)
    world.pass_time(breaker.pause_seconds)
    assert breaker.state is BreakerState.HALF_OPEN
    store(world, 100)
    world.pass_time(seconds)
    world.run_all()
    assert breaker.state is BreakerState.CLOSED
    assert world.plane.locate([key(100)], world.now) == ["cpu"]
