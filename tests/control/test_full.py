"""A full disk under an owned tier: blocks go where others are evicted, once; then they are dropped with the reason."""

from __future__ import annotations

import random

import pytest
from support_control import ROW_BYTES, World, cpu_setup, fs_setup, key

from kvtier.control.tiers.breaker import BreakerState
from kvtier.control.tiers.placement import PAUSE_SECONDS
from kvtier.types.jobs import STORED, DropReason, JobKind, dropped

STORE, LOAD = JobKind.STORE, JobKind.LOAD
FULL = dropped(DropReason.DISK_FULL)


class Disk:
    """What lies under a world's lower tier: room for the regions that have it, and for so many more.

    `sparse`: room is given slot by slot, when one is first written. `refuses`: not even what has room takes a write.
    """

    def __init__(self, world: World, room: int, sparse: bool = False) -> None:
        self.world, self.room, self.sparse = world, room, sparse
        self.refuses = False
        self.has: set[int] = set()
        self.attempts = 0
        self.owned = world.plane.control.lowers[0].owned
        self.counters = world.plane.control.lowers[0].counters

    def write(self, slot: int) -> bool:
        place = slot if self.sparse else self.owned.placement.region_of(slot)
        if place not in self.has and self.room > 0:
            self.room -= 1
            self.has.add(place)
        return place in self.has and not self.refuses

    def serve(self) -> None:
        """End everything that is under way, and what follows from it."""
        world = self.world
        while world.running:
            job_id, emission = next(iter(world.running.items()))
            if emission.position != 1 or emission.job.kind is LOAD:
                world.finish(job_id)
                continue
            slots = [slot for group in emission.job.groups for slot in group.slots]
            self.attempts += len(slots)
            world.end(job_id, *[STORED if self.write(slot) else FULL for slot in slots])
        world.check()

    def store(self, *numbers: int) -> None:
        self.world.store(*numbers)
        self.serve()

    def holds(self, *numbers: int) -> list[bool]:
        return [self.owned.ready(key(number)) is not None for number in numbers]


@pytest.mark.parametrize("write_policy", ["write_through", "on_evict"])
@pytest.mark.parametrize("sparse", [False, True], ids=["regions", "slots"])
def test_a_block_that_finds_the_disk_full_goes_where_an_older_one_is_evicted(write_policy, sparse):
    world = World(cpu_setup(8), [fs_setup(32, 4, write_policy=write_policy)])
    disk = Disk(world, 8 if sparse else 1, sparse)
    for number in range(40):
        disk.store(number)
    assert disk.counters.dropped == {}
    assert disk.owned.table.counts[3] == 8, "what the disk has room for"
    newest = 40 if write_policy == "write_through" else 32
    assert disk.holds(*range(newest - 8, newest)) == [True] * 8, "the cache goes on with what is new"
    assert disk.owned.evictions == newest - 8
    job = world.load(newest - 1)
    disk.serve()
    assert world.statuses(job) == ["loaded"]


def test_nothing_is_asked_of_a_full_disk_before_the_pause_is_over():
    world = World(cpu_setup(8), [fs_setup(32, 4)])
    disk = Disk(world, 1)
    for number in range(9):
        disk.store(number)
    attempts = disk.attempts
    assert attempts == 10, "one block was tried twice"
    for number in range(9, 30):
        disk.store(number)
    assert disk.attempts == attempts + 21
    world.pass_time(PAUSE_SECONDS)
    disk.store(30)
    assert disk.attempts == attempts + 23, "tried again after the pause, in vain"


def test_once_there_is_room_again_it_is_used():
    world = World(cpu_setup(8), [fs_setup(32, 4)])
    disk = Disk(world, 1)
    for number in range(12):
        disk.store(number)
    disk.room = 100
    world.pass_time(PAUSE_SECONDS)
    for number in range(12, 36):
        disk.store(number)
    assert disk.holds(*range(4, 36)) == [True] * 32
    assert disk.counters.dropped == {}


def test_with_nothing_to_evict_it_is_dropped_with_the_reason():
    world = World(cpu_setup(8), [fs_setup(32, 4)])
    disk = Disk(world, 0)
    disk.store(1, 2, 3)
    assert disk.counters.dropped == {DropReason.DISK_FULL: 3}
    assert world.plane.dirty_rows == 0
    disk.room = 1
    world.pass_time(PAUSE_SECONDS)
    disk.store(4)
    assert disk.holds(4) == [True]


def test_a_disk_that_takes_no_write_at_all_is_not_emptied_by_evictions():
    world = World(cpu_setup(64), [fs_setup(256, 4)])
    disk = Disk(world, 1)
    disk.store(*range(16))
    disk.store(*range(16, 64))
    assert disk.holds(*range(64)) == [True] * 64
    disk.refuses = True
    lower = world.plane.control.lowers[0]
    for number in range(100, 400):
        disk.store(number)
        world.pass_time(0.1)
    kept = sum(disk.holds(*range(64)))
    assert kept >= 60, "each pause costs a block at most"
    assert disk.counters.dropped == {DropReason.DISK_FULL: 300}
    assert lower.room_breaker.opened
    assert lower.store_breaker.state is BreakerState.CLOSED, "a full disk is not a broken one"
    disk.refuses = False
    world.pass_time(PAUSE_SECONDS)
    disk.store(500)
    assert disk.holds(500) == [True]
    assert lower.room_breaker.state is BreakerState.CLOSED


def test_a_probe_of_a_full_disk_that_is_late_does_not_end_all_probing():
    world = World(cpu_setup(16), [fs_setup(32, 4)])
    disk = Disk(world, 1)
    lower = world.plane.control.lowers[0]
    disk.store(*range(4))
    lower.room_breaker.on_failure(world.now)
    world.pass_time(PAUSE_SECONDS)
    world.store(10)
    world.run_tier(0)
    (probe,) = world.under_way(1, STORE)
    world.make_late(probe)
    world.end_late(probe, landed=False)
    disk.store(11)
    assert disk.holds(11) == [True]


def test_each_root_has_a_disk_of_its_own():
    world = World(cpu_setup(8), [fs_setup(32, 4, roots=2)])
    disk = Disk(world, 4)
    per_root = disk.owned.placement.per_region * 2
    full_root = set(range(per_root))
    write = disk.write
    disk.write = lambda slot: slot not in full_root and write(slot)
    for number in range(64):
        disk.store(number)
    assert disk.counters.dropped == {}
    assert disk.holds(*range(48, 64)) == [True] * 16, "all of the other root is used"


def test_after_a_reset_nothing_of_before_is_tried_again():
    world = World(cpu_setup(8), [fs_setup(32, 4)])
    disk = Disk(world, 1)
    for number in range(8):
        disk.store(number)
    world.store(20)
    world.run_tier(0)
    (job,) = world.under_way(1, STORE)
    world.plane.reset(world.now)
    world.end(job, FULL)
    disk.serve()
    assert world.plane.idle
    assert disk.holds(20) == [False]


def test_sizes_share_what_room_there_is():
    world = World(cpu_setup(8, groups=2), [fs_setup(32, 8, sizes=(ROW_BYTES, 2 * ROW_BYTES))])
    disk = Disk(world, 3)
    rng = random.Random(1)
    for _ in range(300):
        numbers = [(rng.randrange(60), rng.randrange(2)) for _ in range(2)]
        world.submit(STORE, list(dict.fromkeys(key(number, group) for number, group in numbers)))
        disk.serve()
        world.pass_time(0.3)
    held = [disk.owned.ready(key(number, group)) is not None for number in range(60) for group in range(2)]
    formatted = sum(size >= 0 for size in disk.owned.placement.region_size)
    assert formatted >= 3
    assert sum(held) >= 3 * 4 - 2
    assert disk.owned.peak_bytes <= 8 * 4 * 2 * ROW_BYTES


def test_random_rooms_never_break_the_sums(seed):
    rng = random.Random(seed)
    for _ in range(20):
        sizes = rng.choice([(ROW_BYTES,), (ROW_BYTES, 3 * ROW_BYTES)])
        roots = rng.choice([1, 2])
        policy = rng.choice(["write_through", "on_evict"])
        world = World(cpu_setup(8, groups=len(sizes)), [fs_setup(32, 4, sizes=sizes, roots=roots, write_policy=policy)])
        disk = Disk(world, rng.randrange(4), rng.random() < 0.5)
        for _ in range(60):
            disk.room = max(disk.room, rng.choice([0, 0, 0, 1]))
            disk.refuses = rng.random() < 0.2
            names = {key(rng.randrange(80), rng.randrange(len(sizes))) for _ in range(rng.randrange(1, 4))}
            world.submit(rng.choice([STORE, STORE, LOAD]), sorted(names))
            if rng.random() < 0.7:
                disk.serve()
            if rng.random() < 0.05:
                world.plane.reset(world.now)
                world.collect()
            world.pass_time(rng.random() * 3)
        disk.serve()
        world.pass_time(60.0)
        assert world.plane.idle
