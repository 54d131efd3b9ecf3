"""`reset`: what was stored before it is gone at once, in every tier, and stays gone whatever is still under way."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support_control import World, below, cpu_setup, fs_setup, key, shared_setup

from kvtier.control.tiers.slot_table import FREE, QUARANTINED, READY
from kvtier.tier.contract import LookupResult
from kvtier.types.jobs import LOADED, DropReason, JobKind, JobResult
from kvtier.types.keys import RequestId

STORE, LOAD = JobKind.STORE, JobKind.LOAD


def reset(world: World) -> int:
    epoch = world.plane.reset(world.now)
    world.remote.clear()
    world.collect()
    return epoch


def everything(world: World, count: int = 40) -> list[str | None]:
    return world.plane.locate([key(n) for n in [*range(count), *range(1000, 1040)]], world.now)


def test_everything_is_unreachable_at_once_in_all_tiers():
    world = below(8, others=[shared_setup()])
    assert set(everything(world)) > {"cpu", "fs"}
    reset(world)
    assert set(everything(world)) == {None}
    assert LookupResult.HIT not in world.plane.lookup([key(1), key(1000)], world.now)
    assert world.plane.control.cpu.table.counts[FREE] == 8
    assert world.plane.control.lowers[0].owned.table.counts[READY] == 0
    job = world.load(1, 1000)
    world.run_all()
    assert world.statuses(job) == ["missing", "missing"]
    world.check()


def test_every_key_is_published_as_removed():
    world = below(4, rows=4)
    world.plane.take_events()
    reset(world)
    removed = {(event.medium, k) for event in world.plane.take_events() for k in event.keys if event.removed}
    fs = {("FS", key(n)) for n in [*range(1, 5), *range(1000, 1004)]}
    assert removed == fs | {("CPU", key(n)) for n in range(1000, 1004)}


def test_jobs_carry_the_epoch_they_belong_to():
    world = below(2)
    assert reset(world) == world.plane.control.epoch == 1
    world.store(1)
    (copy,) = world.under_way(0, STORE)
    assert world.running[copy].job.epoch == 1
    world.finish(copy)
    (demotion,) = world.under_way(1, STORE)
    assert world.running[demotion].job.epoch == 1
    assert reset(world) == 2
    assert world.running[demotion].job.epoch == 1, "what was sent before stays what it was"
    world.run_all()


def test_the_epoch_continues_from_the_highest_a_tier_was_opened_with():
    plan = fs_setup(16)
    world = World(cpu_setup(4), [replace(plan, opened=replace(plan.opened, epoch=7))])
    world.store(1)
    assert {e.job.epoch for e in world.running.values()} == {7}
    assert reset(world) == 8


@pytest.mark.parametrize("landed", [True, False])
def test_a_store_under_way_is_dropped_and_its_rows_wait_for_the_copy(landed):
    world = World(cpu_setup(4), [fs_setup(16)])
    job = world.store(1, 2)
    (copy,) = world.under_way(0, STORE)
    reset(world)
    assert job not in world.results, "its GPU blocks are still being read"
    assert world.plane.control.cpu.table.counts[QUARANTINED] == 2
    if landed:
        world.finish(copy)
    else:
        world.finish(copy, "failed")
    assert world.statuses(job) == (["dropped", "dropped"] if landed else ["failed", "failed"])
    assert [o.reason for group in world.results[job].outcomes for o in group if landed] == [
        DropReason.RESET
    ] * 2 * landed
    assert set(everything(world)) == {None}
    assert world.plane.control.cpu.table.counts[FREE] == 4
    assert not world.running, "nothing of it goes below"
    world.check()


def test_a_store_that_waits_for_rows_is_dropped():
    world = World(cpu_setup(2), [])
    world.store(1, 2)
    waiting = world.store(3)
    reset(world)
    assert [o.reason for group in world.results[waiting].outcomes for o in group] == [DropReason.RESET]
    world.run_all()
    world.check()


def test_a_demotion_under_way_never_becomes_visible():
    world = World(cpu_setup(4), [fs_setup(16)])
    world.store(1)
    world.run_tier(0)
    (demotion,) = world.under_way(1, STORE)
    reset(world)
    fs = world.plane.control.lowers[0].owned
    assert fs.table.counts[QUARANTINED] == 1
    assert world.plane.control.cpu.table.counts[QUARANTINED] == 1, "its row is being read"
    world.store(1)
    world.run_tier(0)
    world.finish(demotion)
    world.run_all()
    assert fs.table.counts[QUARANTINED] == 0
    assert fs.table.counts[READY] == 1
    load = world.load(1)
    world.run_all()
    assert world.statuses(load) == ["loaded"]
    world.check()


def test_a_demotion_to_a_shared_tier_teaches_nothing_after_a_reset():
    world = World(cpu_setup(4), [shared_setup()])
    world.store(1)
    world.run_tier(0)
    (demotion,) = world.under_way(1, STORE)
    reset(world)
    world.finish(demotion)
    assert world.plane.locate([key(1)], world.now) == [None]


def test_a_promotion_under_way_ends_in_nothing_and_its_slot_is_free_only_then():
    world = below(2)
    job = world.load(1)
    (promotion,) = world.under_way(1, LOAD)
    reset(world)
    assert world.statuses(job) == ["cancelled"]
    fs = world.plane.control.lowers[0].owned
    assert fs.table.counts[QUARANTINED] == world.plane.control.cpu.table.counts[QUARANTINED] == 1
    fresh = world.load(1)
    assert world.statuses(fresh) == ["missing"]
    world.finish(promotion)
    assert set(everything(world)) == {None}
    assert fs.table.counts[QUARANTINED] == world.plane.control.cpu.table.counts[QUARANTINED] == 0
    world.check()


def test_a_load_that_is_being_copied_ends_as_cancelled_although_the_bytes_came():
    """They are the bytes of the old weights."""
    world = below(2)
    job = world.load(1000, 1)
    (copy,) = world.under_way(0, LOAD)
    reset(world)
    assert job not in world.results
    assert world.plane.control.cpu.table.counts[QUARANTINED] == 2
    world.run_all()
    assert world.statuses(job) == ["cancelled", "cancelled"]
    assert copy not in world.running
    world.check()


def test_blocks_that_a_load_had_already_are_not_taken_for_valid_after_a_reset():
    world = below(2)
    job = world.load(1000, 1)
    world.run_tier(0)
    reset(world)
    world.run_all()
    assert world.statuses(job) == ["cancelled", "cancelled"]


def test_a_load_that_ended_but_was_not_told_yet_is_not_taken_for_valid_after_a_reset():
    world = below(1)
    job = world.load(1000)
    (copy,) = world.running
    world.plane.finish(JobResult.uniform(world.running.pop(copy).job, LOADED), world.now)
    world.watch.done(copy)
    world.plane.pump(world.now)
    reset(world)
    assert world.statuses(job) == ["cancelled"]


@pytest.mark.parametrize("landed", [True, False])
@pytest.mark.parametrize("what", ["store", "demotion", "promotion"])
def test_late_transfers_from_before_a_reset_end_unseen(what, landed):
    world = below(2)
    world.store(5) if what != "promotion" else world.load(1)
    if what == "demotion":
        world.run_tier(0)
    (job,) = world.running
    world.make_late(job) if what == "promotion" or landed else None
    reset(world)
    if job in world.running:
        world.make_late(job)
    world.store(5)
    world.store(1)
    world.end_late(job, landed)
    world.run_all()
    load = world.load(5, 1)
    world.run_all()
    assert world.statuses(load) == ["loaded", "loaded"]
    assert world.plane.control.cpu.table.counts[QUARANTINED] == 0
    world.check()


def test_leases_end_and_reservations_are_forgotten():
    world = below(4)
    world.plane.reserve(RequestId("a"), [key(1), key(1000)], world.now)
    world.plane.reserve(RequestId("b"), [key(2)], world.now)
    world.collect()
    reset(world)
    assert world.plane.reservation(RequestId("a")) is None
    world.run_all()
    assert world.plane.control.cpu.table.counts[FREE] == 8
    world.check()


def test_what_is_owed_below_is_forgotten():
    world = World(cpu_setup(8), [fs_setup(16, write_policy="on_evict"), shared_setup(inflight_blocks=1)])
    world.store(*range(6))
    world.run_tier(0)
    assert world.plane.dirty_rows == 6
    reset(world)
    world.run_all()
    assert world.plane.dirty_rows == 0
    assert world.plane.idle
    world.check()


def test_nothing_from_before_a_reset_is_ever_seen_again_whatever_was_under_way(seed):
    """Each key is stored in one epoch only: from the next one on it must be nowhere, at any moment."""
    rng = random.Random(seed)
    world = World(cpu_setup(10), [fs_setup(24, 4), shared_setup(hint_seconds=2.0)])
    epoch_of: dict[int, int] = {}
    known = 0
    for _ in range(300):
        epoch = world.plane.control.epoch
        match rng.choice(["store", "load", "end", "end", "end", "late", "late end", "time", "reset"]):
            case "store":
                numbers = range(known, known + rng.randint(1, 6))
                known += len(numbers)
                epoch_of |= dict.fromkeys(numbers, epoch)
                world.store(*numbers)
            case "load" if known:
                world.load(*(rng.randrange(known) for _ in range(rng.randint(1, 5))))
            case "end" if world.running:
                world.finish(rng.choice(list(world.running)), rng.choice([None, None, "failed"]))
            case "late" if timed := [j for j, e in world.running.items() if e.job.deadline is not None]:
                world.make_late(rng.choice(timed))
            case "late end" if world.late:
                world.end_late(rng.choice(list(world.late)), rng.random() < 0.5)
            case "time":
                world.pass_time(rng.choice([0.1, 1.0, 5.0]))
            case "reset" if rng.random() < 0.3:
                reset(world)
        epoch = world.plane.control.epoch
        located = world.plane.locate([key(n) for n in range(known)], world.now)
        ghosts = [n for n, name in enumerate(located) if name is not None and epoch_of[n] != epoch]
        assert not ghosts
        world.check()
