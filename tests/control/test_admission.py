"""Admission: what a tier with `admit: second_use` is sent, when, and what is counted for the rest."""

from __future__ import annotations

import pytest
from support_control import World, cpu_setup, fs_setup, key, shared_setup

from kvtier.options import ADMISSION_BYTES
from kvtier.policy import RequestModels, make_admission
from kvtier.policy.admission import WAYS, SecondUse
from kvtier.types.jobs import JobKind, SkipReason

STORE = JobKind.STORE
NOT_ADMITTED = SkipReason.NOT_ADMITTED
BOTH = pytest.mark.parametrize("kind", ["owned", "shared"])


def absent(key: object) -> bool:
    return False


def choosy(kind: str = "owned", rows: int = 8, **more: object) -> World:
    setup = fs_setup(64) if kind == "owned" else shared_setup()
    fields = {name: getattr(setup, name) for name in setup.__dataclass_fields__} | {"admit": "second_use"} | more
    return World(cpu_setup(rows), [type(setup)(**fields)])


def in_rows(world: World, *numbers: int) -> None:
    """Store what is not sent further down."""
    world.store(*numbers)
    world.run_tier(0)
    assert not world.running


def counted(world: World) -> tuple[int, int, int]:
    """Stored below, not admitted, lost."""
    counters = world.plane.control.counters(1)
    return counters.stored, counters.skipped.get(NOT_ADMITTED, 0), sum(counters.dropped.values())


@BOTH
def test_a_block_that_was_used_once_is_neither_written_nor_dirty_nor_lost(kind):
    world = choosy(kind)
    in_rows(world, 1, 2, 3)
    assert counted(world) == (0, 3, 0)
    assert (world.plane.dirty_rows, world.plane.backlog, world.plane.idle) == (0, 0, True)
    world.check()


@BOTH
def test_a_load_from_a_row_is_a_second_use(kind):
    world = choosy(kind)
    in_rows(world, 1, 2, 3)
    world.load(1, 2)
    (job,) = world.under_way(1, STORE)
    assert world.numbers(job) == [2, 1], "the leaf first"
    world.run_all()
    assert counted(world) == (2, 3, 0)
    world.check()


@BOTH
def test_a_store_of_what_is_in_a_row_is_a_second_use(kind):
    world = choosy(kind)
    in_rows(world, 1, 2)
    again = world.store(1)
    world.run_all()
    assert world.statuses(again) == ["present"]
    assert counted(world) == (1, 2, 0)


@BOTH
@pytest.mark.parametrize("kind_of_use", ["load", "store"])
def test_a_block_that_a_job_names_twice_is_written_once(kind, kind_of_use):
    world = choosy(kind)
    in_rows(world, 1)
    getattr(world, kind_of_use)(1, 1)
    world.run_all()
    assert counted(world) == (1, 1, 0)
    world.check()


def test_two_stores_of_a_block_at_once_are_two_uses():
    world = choosy()
    world.store(1)
    world.store(1)
    world.run_all()
    assert counted(world) == (1, 1, 0)


@BOTH
def test_a_block_that_comes_back_after_its_eviction_is_written(kind):
    world = choosy(kind, rows=4)
    in_rows(world, 1, 2, 3, 4)
    in_rows(world, 5, 6, 7, 8)
    world.store(1, 9)
    world.run_all()
    assert counted(world) == (1, 9, 0)
    assert world.plane.control.lowers[0].index.presence(key(1), world.now)


@BOTH
def test_a_block_is_written_once_however_often_it_is_used(kind):
    """Also when nothing is known any more of what the tier holds."""
    world = choosy(kind)
    in_rows(world, 1)
    for _ in range(5):
        world.load(1)
        world.run_all()
        world.now += 100.0
    assert counted(world)[0] == 1


def test_only_blocks_with_a_second_use_are_written_when_they_are_evicted():
    world = choosy(rows=4, write_policy="on_evict")
    in_rows(world, 1, 2, 3, 4)
    world.load(1, 2)
    world.run_all()
    assert world.plane.dirty_rows == 2, "written when the rows are wanted, not before"
    assert counted(world) == (0, 4, 0)
    world.store(5, 6, 7, 8)
    world.run_all()
    assert counted(world) == (1, 8, 0), "one row was wanted that was not clean"
    world.plane.close(world.now)
    world.plane.drain(world.now)
    world.step()
    world.run_all()
    assert counted(world) == (2, 8, 0)
    assert set(world.plane.control.lowers[0].owned.directory) == {key(1), key(2)}
    world.check()


def test_what_comes_from_another_tier_was_used_before():
    world = World(cpu_setup(4), [fs_setup(64), shared_setup(admit="second_use")])
    for first in (1, 5):
        world.store(*range(first, first + 4))
        world.run_all()
    assert world.plane.control.counters(2).stored == 0
    world.load(1)
    world.run_all()
    assert world.plane.control.counters(2).stored == 1
    assert key(1) in world.remote


def test_a_row_remembers_nothing_of_the_block_before():
    """A row that held a block that was not admitted is filled from the tier itself, which needs no write for it."""
    world = choosy("shared", rows=1)
    world.remote = {key(2): (key(2), 0)}
    in_rows(world, 1)
    world.load(2)
    world.run_all()
    world.now += 100.0
    world.load(2)
    assert not world.under_way(1, STORE)
    world.run_all()
    assert counted(world) == (0, 1, 0)


def test_a_reset_keeps_what_it_held_from_being_written():
    world = choosy()
    in_rows(world, 1)
    world.plane.reset(world.now)
    in_rows(world, 2)
    world.load(1)
    world.run_all()
    assert counted(world) == (0, 2, 0)
    world.check()


def test_a_tier_that_is_held_back_is_sent_nothing_at_a_second_use():
    world = choosy()
    in_rows(world, 1)
    world.plane.hold_back(world.now)
    world.load(1)
    world.run_all()
    assert (counted(world)[0], world.plane.dirty_rows) == (0, 0)


def test_a_tier_that_takes_every_block_has_no_admission():
    world = World(cpu_setup(4), [fs_setup(64)])
    assert make_admission("always", RequestModels()) is world.plane.control.lowers[0].admission is None
    assert world.plane.demotions.admits_all


# -- the memory of first uses --------------------------------------------------------------------------------------


def test_first_uses_are_remembered_in_bounded_memory_the_newest_longest():
    memory = SecondUse(num_bytes=4 * WAYS * 16)
    room = WAYS * 16
    assert not any(memory.admits(key(n), False, absent) for n in range(10 * room))
    assert len(memory._fingerprints) == room
    newest = [memory.admits(key(n), False, absent) for n in range(10 * room - room // 4, 10 * room)]
    assert all(newest)
    assert not any(memory.admits(key(n), False, absent) for n in range(room))


def test_its_memory_is_what_the_options_say_and_strangers_are_not_taken_for_known():
    memory = SecondUse()
    assert memory._fingerprints.itemsize * len(memory._fingerprints) == ADMISSION_BYTES
    assert not any(memory.admits(key(n), False, absent) for n in range(50_000))
    assert all(memory.admits(key(n), False, absent) for n in range(50_000))
    assert memory.admits(key(1 << 40), True, absent)


@BOTH
def test_within_a_write_budget_it_decides_as_blocks_are_stored(kind):
    """It has none of its own; a tier on a server keeps to the budget by itself."""
    world = choosy(kind, write_policy="on_evict", write_bytes_per_day=1 << 30)
    in_rows(world, 1, 2, 3)
    in_rows(world, 2, 3)
    assert world.plane.dirty_rows == 2
    world.store(*range(10, 18))
    world.run_all()
    lower = world.plane.control.lowers[0]
    assert [bool(lower.index.presence(key(n), world.now)) for n in (1, 2, 3)] == [False, True, True]
    assert counted(world) == (2, 11, 0)
    world.check()
