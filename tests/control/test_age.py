"""An owned tier with a `max_age`: what is too old is not found, and its slot becomes free though none asks for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support_control import World, cpu_setup, fs_setup, key

from kvtier.control.tiers.aged_tier import RECLAIMED_AT_ONCE, AgedTier
from kvtier.tier.block_age import BlockAges
from kvtier.tier.contract import LookupResult, Recovered
from kvtier.types.arrays import int_array
from kvtier.types.jobs import MISSING, JobKind, RegionFormat

HOUR = 3600.0
BEGIN_NS = 1_700_000_000 * 10**9


class AgingWorld(World):
    """A world whose wall clock is `off_seconds` beside its own time. The tier `fs` keeps blocks for an hour."""

    def __init__(self, rows: int = 8, recovered: Recovered | None = None, **more: object) -> None:
        self.now, self.off_seconds = 0.0, 0.0
        setup = fs_setup(**more)  # type: ignore[arg-type]
        opened = replace(setup.opened, ages=BlockAges(self.wall_ns, 3600), recovered=recovered or Recovered())
        super().__init__(cpu_setup(rows), [replace(setup, opened=opened)])
        tier = self.plane.control.lowers[0].owned
        assert isinstance(tier, AgedTier)
        self.fs = tier

    def wall_ns(self) -> int:
        return BEGIN_NS + int((self.now + self.off_seconds) * 1e9)

    def stored(self, *numbers: int) -> None:
        self.store(*numbers)
        self.run_all()

    def found(self, *numbers: int) -> list[str]:
        """Which of these keys the tier `fs` has."""
        return ["hit" if self.fs.presence(key(number), self.now) else "miss" for number in numbers]

    def fill_rows(self) -> None:
        """Take the rows away from what was stored before."""
        self.stored(*range(9000, 9000 + len(self.plane.control.cpu.table)))


def test_a_block_that_is_too_old_is_not_found():
    world = AgingWorld(rows=2)
    world.stored(1, 2)
    world.stored(3, 4)
    world.now += HOUR - 1
    world.stored(5, 6)
    assert world.plane.lookup([key(1)], world.now) == [LookupResult.HIT_PENDING]
    world.now += 2
    assert world.plane.lookup([key(1), key(5)], world.now) == [LookupResult.MISS, LookupResult.HIT]
    assert world.found(1, 2, 3, 4) == ["miss"] * 4
    assert world.plane.locate([key(2)], world.now) == [None]
    job = world.load(1, 3)
    world.run_all()
    assert world.statuses(job) == ["missing"] * 2
    world.check()


def test_slots_become_free_by_time_alone():
    world = AgingWorld()
    world.stored(1, 2)
    due = world.plane.next_deadline(world.now)
    passes = 0
    while world.fs.table.counts[3]:
        assert due is not None
        assert due > world.now, "time goes on"
        world.now = due
        world.step()
        due, passes = world.plane.next_deadline(world.now), passes + 1
    assert HOUR < world.now <= HOUR + HOUR / 64 + 1
    assert passes <= 66
    assert (world.fs.expired, world.fs.evictions, world.fs.used_bytes) == (2, 0, 0)
    removed = [event for event in world.plane.take_events() if event.removed]
    assert sorted(name for event in removed for name in event.keys) == [key(1), key(2)]
    world.check()


def test_a_block_that_is_too_old_is_stored_anew():
    world = AgingWorld(rows=2)
    world.stored(1)
    world.fill_rows()
    world.now += HOUR + 1
    world.fs.reclaim_at = world.now + HOUR  # as if no pass had come to it yet
    world.stored(1)
    assert world.found(1) == ["hit"]
    world.now += HOUR - 1
    assert world.found(1) == ["hit"], "its age counts from the second store"
    world.check()


def test_one_call_frees_a_bounded_number_of_slots():
    count = 3 * RECLAIMED_AT_ONCE - 10
    names = [key(number) for number in range(count)]
    generations = int_array([BEGIN_NS + number for number in range(count)])
    slots = int_array(range(count))
    space = fs_setup(4096, 1).opened.space
    assert space is not None
    formats = (RegionFormat(0, space.slot_bytes[0], 1),)
    world = AgingWorld(recovered=Recovered(names, slots, generations, formats), slots=4096, regions=1)
    world.step()
    world.now += 10 * HOUR
    for left in (count - RECLAIMED_AT_ONCE, count - 2 * RECLAIMED_AT_ONCE, 0):
        assert world.found(count - 1) == ["miss"], "those that wait are not found"
        world.step()
        assert left - 1 <= len(world.fs.directory) <= left, "one of them gave its slot up at once"
        due = world.plane.next_deadline(world.now)
        assert due is not None
        assert due <= world.now + (0.1 if left else 60)
        world.now = due
    world.check()


def test_a_load_in_flight_keeps_its_slot():
    world = AgingWorld(rows=2)
    world.stored(1)
    world.fill_rows()
    job = world.load(1, timeout=None)
    assert world.under_way(1, JobKind.LOAD)
    world.now += HOUR + 1
    world.step()
    world.pass_time(HOUR / 64)
    assert (world.found(1), world.fs.table.counts[4]) == (["miss"], 1), "no other block gets the slot meanwhile"
    world.run_all()
    assert (world.statuses(job), world.fs.table.counts[4]) == (["loaded"], 0)
    world.check()


def test_a_place_whose_block_was_too_old_for_the_backend_stays_in_use():
    world = AgingWorld(rows=1, slots=2, regions=1)
    for _ in range(4):
        world.stored(1)
        world.fill_rows()
        world.load(1)
        (job,) = world.under_way(1, JobKind.LOAD)
        world.now += HOUR + 1
        world.fs.reclaim_at = world.now + HOUR
        world.end(job, MISSING)
        world.run_all()
        assert world.found(1) == ["miss"]
    assert world.fs.table.counts[5] == 0
    world.check()


@pytest.mark.parametrize("days", [30, -30])
def test_after_a_clock_was_set_blocks_of_unknown_age_are_gone_and_new_ones_stay(days):
    world = AgingWorld(rows=2)
    world.stored(1)
    world.off_seconds = days * 24 * HOUR
    world.pass_time(HOUR / 64)
    assert (world.found(1), world.fs.directory) == (["miss"], {})
    world.stored(2)
    world.fill_rows()
    assert world.found(2) == ["hit"]
    world.off_seconds = 0.0
    world.pass_time(HOUR / 64)
    assert world.found(2) == ["miss"], "and it is not kept when the clock is right again"
    world.check()


def test_generations_that_were_counted_have_no_age():
    formats = (RegionFormat(0, 4096, 1),)
    recovered = Recovered([key(1), key(2)], int_array([0, 1]), int_array([7, BEGIN_NS]), formats)
    world = AgingWorld(recovered=recovered)
    assert world.found(1, 2) == ["miss", "hit"]
