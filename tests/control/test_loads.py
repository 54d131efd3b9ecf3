"""Loads: what is here is kept, what is below is fetched, in order of age, through any CPU tier, block by block."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support_control import World, below, cpu_setup, fs_setup, key, shared_setup

from kvtier.control.tiers.slot_table import FILLING, QUARANTINED, READY, RETIRED
from kvtier.tier.contract import LookupResult
from kvtier.types.arrays import int_array
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import CORRUPT, LOADED, GPUGroup, JobKind, JobResult, TransferJob, failed
from kvtier.types.keys import GroupIndex, JobId, Medium, RequestId

STORE, LOAD = JobKind.STORE, JobKind.LOAD


def where(world: World, *numbers: int) -> list[str | None]:
    return world.plane.locate([key(n) for n in numbers], world.now)


# -- what is here, what is below ---------------------------------------------------------------------------------------


def test_blocks_in_rows_are_held_before_anything_is_evicted_for_the_others():
    """The hits of a load are the coldest rows there are: fetching the rest must not throw them out."""
    world = below(4, rows=8)
    job = world.load(1000, 1001, 1002, 1003, 1, 2, 3, 4)
    world.run_all()
    assert world.statuses(job) == ["loaded"] * 8
    assert world.plane.control.counters(0).hits == 4
    assert world.plane.control.counters(1).loaded == 4
    assert where(world, 1000, 1001, 1002, 1003) == ["cpu"] * 4


def test_loaded_blocks_are_the_most_recent_leaf_before_root_in_all_tiers():
    world = below(4, rows=8)
    world.load(1000, 1, 2, 3, 4)
    world.run_all()
    cpu, fs = world.plane.control.cpu, world.plane.control.lowers[0].owned
    assert [cpu.table.keys[row] for row in cpu.policy.coldest()][-5:] == [key(n) for n in (4, 3, 2, 1, 1000)]
    assert [fs.table.keys[slot] for slot in fs.policy.coldest()][-5:] == [key(n) for n in (4, 3, 2, 1, 1000)]


def test_a_block_in_no_tier_is_missing_and_takes_nothing_with_it():
    world = below(3)
    job = world.load(1, 77, 2, 78, 3)
    world.run_all()
    assert world.statuses(job) == ["loaded", "missing", "loaded", "missing", "loaded"]


def test_two_loads_of_one_key_share_one_promotion():
    world = below(2)
    first, second = world.load(1, 2), world.load(2, 1)
    assert [sorted(world.numbers(job)) for job in world.under_way(1, LOAD)] == [[1, 2]]
    world.run_all()
    assert world.statuses(first) == world.statuses(second) == ["loaded", "loaded"]
    assert world.plane.control.counters(1).loaded == 2


def test_a_load_waits_for_a_store_of_the_same_key_that_is_under_way():
    world = World(cpu_setup(4), [])
    store = world.store(1)
    job = world.load(1)
    assert not world.under_way(0, LOAD)
    world.run_all()
    assert (world.statuses(store), world.statuses(job)) == (["stored"], ["loaded"])


def test_a_load_goes_below_when_the_store_it_waited_for_fails():
    world = below(1)
    assert where(world, 1) == ["fs"]
    world.store(1)
    job = world.load(1)
    world.finish(*world.under_way(0, STORE), "failed")
    assert world.under_way(1, LOAD)
    world.run_all()
    assert world.statuses(job) == ["loaded"]


def test_a_key_named_twice_in_one_load_is_fetched_once_and_copied_twice():
    world = below(2)
    job = world.load(1, 2, 1)
    assert [world.numbers(promotion) for promotion in world.under_way(1, LOAD)] == [[1, 2]]
    world.run_all()
    assert world.statuses(job) == ["loaded"] * 3
    world.check()


def test_partial_success_of_a_promotion_is_kept_in_any_order():
    world = below(4, rows=16)
    job = world.load(1, 2, 3, 4)
    (promotion,) = world.under_way(1, LOAD)
    world.end(promotion, failed(5), LOADED, CORRUPT, LOADED)
    world.run_all()
    assert world.statuses(job) == ["missing", "loaded", "missing", "loaded"]
    assert where(world, 1, 2, 3, 4) == [None, "cpu", None, "cpu"]
    assert (world.plane.control.counters(1).failed, world.plane.control.counters(1).corrupt) == (1, 1)
    world.check()


@pytest.mark.parametrize("factor", [2, 4])
def test_a_load_names_only_the_sub_blocks_the_engine_asked_for(factor):
    """An unaligned head or tail: the row holds all sub-blocks, the copy moves some, in the engine's own places."""
    world = World(cpu_setup(4), [], factor=factor)
    world.store(1, 2)
    world.run_all()
    runs = GPURuns(int_array([0, 1]), int_array([factor - 1, 0]), int_array([1, 1]), int_array([100, 101]))
    job = TransferJob(JobId(50), LOAD, (GPUGroup(GroupIndex(0), (key(1), key(2)), runs),))
    world.jobs[job.job_id] = job
    world.plane.submit(job, world.now)
    world.collect()
    (copy,) = world.under_way(0, LOAD)
    (group,) = world.running[copy].job.groups
    assert [part.tolist() for part in group.runs.pages()] == [[0, 1], [factor - 1, 0], [100, 101]]
    world.run_all()
    assert world.statuses(job.job_id) == ["loaded", "loaded"]


# -- any size, any age -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 64])
@pytest.mark.parametrize("length", [1, 7, 60])
def test_a_load_longer_than_the_cpu_tier_streams_through_it(rows, length):
    world = World(cpu_setup(rows), [fs_setup(128)])
    for number in range(length):
        world.store(number)
        world.run_all()
    job = world.load(*range(length))
    world.run_all()
    assert world.statuses(job) == ["loaded"] * length
    world.check()


@pytest.mark.parametrize("rows", [1, 4, 9])
def test_several_long_loads_get_through_a_small_cpu_tier_together(rows):
    world = World(cpu_setup(rows), [fs_setup(128)])
    for number in range(60):
        world.store(number)
        world.run_all()
    jobs = [world.load(*range(start, start + 30)) for start in (0, 10, 30)]
    world.run_all()
    assert [world.statuses(job) for job in jobs] == [["loaded"] * 30] * 3
    world.check()


def test_rows_go_to_the_oldest_load_first():
    world = below(12, rows=8)
    blocker = world.store(*range(500, 506))
    old, young = world.load(1, 2, 3), world.load(4, 5, 6)
    first = [world.numbers(job) for job in world.under_way(1, LOAD)]
    assert first == [[1, 2]], "two rows are left, and they are the old one's"
    world.finish(*world.under_way(0, STORE))
    order = []
    while world.running:
        for job in world.under_way(1, LOAD):
            order += [n for n in world.numbers(job) if n not in order]
        world.finish(next(iter(world.running)))
    assert order[:3] == [1, 2, 3]
    assert world.statuses(old) == world.statuses(young) == ["loaded"] * 3
    assert world.statuses(blocker) == ["stored"] * 6


def test_a_young_load_is_not_served_before_an_old_one_that_waits_for_rows():
    world = below(12, rows=4)
    world.store(500, 501, 502, 503)
    old = world.load(1)
    young = world.load(2)
    (fill,) = world.under_way(0, STORE)
    world.running.pop(fill)
    world.watch.done(fill)
    world.plane.on_late(fill, world.now)
    world.plane.on_end(fill, world.now)
    newest = world.load(3)
    assert [world.numbers(job) for job in world.under_way(1, LOAD)] == [[1]], "the quarter is one row, and it is old's"
    world.run_all()
    assert [world.statuses(job) for job in (old, young, newest)] == [["loaded"]] * 3


def test_a_load_that_has_as_much_in_motion_as_it_may_holds_up_nobody_else():
    """Its window is full, rows are free: others load and store, nothing owed below is dropped, no lease goes."""
    slow = replace(fs_setup(128), name="slow", medium=Medium("SLOW"))
    world = below(30, rows=32, others=[slow])
    leased = world.plane.reserve(RequestId("r"), [key(1020), key(1021)], world.now)
    assert leased.served
    long = world.load(*range(1, 31))
    assert world.under_way(1, LOAD)
    world.store(600, 601)
    world.run_tier(0)
    assert len(world.results) == len(world.jobs) - 1, "the store is done"
    short = world.load(1025, 1026)
    world.run_tier(0)
    assert world.statuses(short) == ["loaded", "loaded"]
    assert leased.served
    assert leased.rows
    assert world.plane.control.counters(1).dropped == {}
    world.run_all()
    assert world.statuses(long) == ["loaded"] * 30


def test_a_load_takes_no_more_rows_from_those_owed_below_than_it_can_use():
    world = below(40, rows=32, slots=256, others=[shared_setup(inflight_blocks=1)])
    world.run_all()
    world.store(*range(600, 632))
    world.run_tier(0)
    for job in world.under_way(1, STORE):
        world.finish(job)
    owed = world.plane.dirty_rows
    assert owed > 20
    world.load(*range(1, 41))
    given_up = world.plane.control.counters(2).dropped
    assert not given_up, "stores hold all the rows that its tier may hold"
    world.finish(world.under_way(1, STORE)[0])
    assert 0 < sum(given_up.values()) <= 8, "transfers of its tier hold a quarter of the rows"
    world.run_all()
    world.check()


# -- corrupt, missing, late --------------------------------------------------------------------------------------------


def test_a_corrupt_entry_is_dropped_published_and_its_place_reused():
    world = below(2)
    world.plane.take_events()
    fs = world.plane.control.lowers[0].owned
    slot = fs.ready(key(1))
    job = world.load(1)
    world.finish(*world.under_way(1, LOAD), "corrupt")
    assert world.statuses(job) == ["missing"]
    assert [(e.keys, e.removed) for e in world.plane.take_events() if e.medium == "FS"] == [((key(1),), True)]
    world.store(50)
    world.run_all()
    assert fs.ready(key(50)) == slot, "a place that erred once is used again at once"
    world.check()


def test_a_corrupt_entry_is_dropped_only_while_the_slot_has_that_generation():
    world = below(2)
    fs = world.plane.control.lowers[0].owned
    slot = fs.ready(key(1))
    generation = fs.table.generation[slot]
    assert not fs.discard(slot, generation - 1)
    assert fs.ready(key(1)) == slot
    assert fs.discard(slot, generation)
    assert not fs.discard(slot, generation)
    fs.check()


def test_a_place_that_errs_twice_is_out_of_use():
    world = below(1)
    fs = world.plane.control.lowers[0].owned
    slot = fs.ready(key(1))
    for number in (1, 50):
        assert fs.ready(key(number)) == slot
        world.load(number) if number == 1 else world.plane.control.cpu.reset()
        if number == 50:
            world.load(50)
        world.finish(*world.under_way(1, LOAD), "corrupt")
        world.store(50)
        world.run_all()
    assert fs.table.counts[RETIRED] == 1
    assert fs.ready(key(50)) != slot
    world.check()


def test_bytes_refused_on_their_way_from_a_row_come_from_below_instead():
    world = below(1)
    world.load(1)
    world.run_all()
    job = world.load(1)
    world.finish(*world.under_way(0, LOAD), "corrupt")
    assert world.under_way(1, LOAD)
    world.run_all()
    assert world.statuses(job) == ["loaded"]
    assert world.plane.control.counters(0).corrupt == 1
    world.check()


def test_bytes_refused_again_and_again_end_in_a_miss():
    world = below(1)
    job = world.load(1)
    rounds = 0
    while world.running:
        rounds += 1
        assert rounds < 10, "retried without a bound"
        copies = world.under_way(0, LOAD)
        world.finish(copies[0], "corrupt") if copies else world.finish(next(iter(world.running)))
    assert world.statuses(job) == ["missing"]
    world.check()


def test_only_the_refused_blocks_of_a_copy_are_fetched_again():
    world = below(2)
    job = world.load(1000, 1001, 1, 2)
    while promotions := world.under_way(1, LOAD):
        world.finish(promotions[0])
    copies = world.under_way(0, LOAD)
    assert sorted(n for copy in copies for n in world.numbers(copy)) == [1, 2, 1000, 1001]
    world.end(copies[0], CORRUPT, LOADED)
    assert [world.numbers(promotion) for promotion in world.under_way(1, LOAD)] == [[1000]]
    world.run_all()
    assert world.statuses(job) == ["loaded"] * 4


def test_when_all_rows_are_out_of_use_everything_ends_at_once():
    world = below(2, rows=1)
    for number in (1, 2):
        world.load(number)
        world.run_tier(1)
        world.finish(*world.under_way(0, LOAD), "corrupt")
    assert world.plane.control.cpu.table.counts[RETIRED] == 1
    load, store = world.load(1, timeout=None), world.store(9, timeout=None)
    reservation = world.plane.reserve(RequestId("r"), [key(1)], world.now)
    world.step()
    assert (world.statuses(load), world.statuses(store)) == (["missing"], ["dropped"])
    assert reservation.served
    assert reservation.hits() == [False]
    world.check()


def test_a_late_promotion_quarantines_its_row_keeps_the_entry_and_the_load_goes_on():
    world = below(2)
    job = world.load(1, 1000)
    (promotion,) = world.under_way(1, LOAD)
    world.make_late(promotion)
    world.run_all()
    assert world.statuses(job) == ["missing", "loaded"]
    table = world.plane.control.cpu.table
    assert table.counts[QUARANTINED] == 1
    assert where(world, 1) == ["fs"]
    fs = world.plane.control.lowers[0].owned
    assert fs.table.pins[fs.ready(key(1))] == 1, "its slot is still being read"
    again = world.load(1)
    world.run_all()
    assert world.statuses(again) == ["loaded"], "into another row"
    world.end_late(promotion, landed=True)
    assert table.counts[QUARANTINED] == 0
    world.check()


@pytest.mark.parametrize("how", ["failed", "corrupt", "late"])
def test_the_next_tier_is_asked_when_the_first_fails(how):
    world = below(1, others=[shared_setup()])
    assert world.remote
    job = world.load(1)
    (promotion,) = world.under_way(1, LOAD)
    if how == "late":
        world.make_late(promotion)
    else:
        world.finish(promotion, how)
    assert [world.numbers(j) for j in world.under_way(2, LOAD)] == [[1]]
    world.run_all()
    assert world.statuses(job) == ["loaded"]
    assert world.plane.control.counters(2).loaded == 1


def test_a_load_asks_every_tier_at_most_once():
    world = below(1, others=[shared_setup()])
    job = world.load(1)
    world.finish(*world.under_way(1, LOAD), "failed")
    world.finish(*world.under_way(2, LOAD), "corrupt")
    assert world.statuses(job) == ["missing"]
    assert not world.running


# -- deadlines and cancelling ------------------------------------------------------------------------------------------


def test_at_its_deadline_a_load_is_late_for_what_it_lacks():
    world = below(2)
    job = world.load(1000, 1, timeout=3.0)
    world.run_tier(0)
    assert world.plane.next_deadline(world.now) == 3.0
    world.pass_time(2.9)
    assert job not in world.results
    world.pass_time(0.1)
    assert world.statuses(job) == ["loaded", "late"]
    world.run_all()
    assert where(world, 1) == ["cpu"], "what arrived after all is kept"
    world.check()


@pytest.mark.parametrize("end", ["cancel", "deadline", "close"])
def test_however_a_load_ends_its_copies_under_way_end_first(end):
    """GPU blocks belong to the copy until it has ended: only then may the engine hear that the load is over."""
    world = below(2)
    job = world.load(1000, 1, timeout=5.0)
    (copy,) = world.under_way(0, LOAD)
    if end == "cancel":
        world.plane.cancel(job, world.now)
    elif end == "close":
        world.plane.close(world.now)
    else:
        world.now += 5.0
    world.step()
    assert job not in world.results
    world.finish(copy)
    assert world.statuses(job) == ["loaded", "late" if end == "deadline" else "cancelled"]
    world.run_all()
    table = world.plane.control.cpu.table
    assert table.evictable == table.counts[READY]
    assert table.counts[FILLING] == 0
    world.check()


def test_a_cancelled_load_lets_go_of_rows_it_was_about_to_copy():
    world = below(2)
    job = world.load(1, 2)
    (promotion,) = world.under_way(1, LOAD)
    world.running.pop(promotion)
    world.watch.done(promotion)
    world.plane.finish(JobResult(promotion, ((LOADED, LOADED),)), world.now)
    world.plane.cancel(job, world.now)
    world.collect()
    assert world.statuses(job) == ["cancelled", "cancelled"]
    assert not world.running
    assert world.plane.control.cpu.table.evictable == world.plane.control.cpu.table.counts[READY]


def test_cancelling_one_of_two_loads_leaves_the_other_its_promotion():
    world = below(1)
    first, second = world.load(1), world.load(1)
    world.plane.cancel(first, world.now)
    world.collect()
    assert world.statuses(first) == ["cancelled"]
    world.run_all()
    assert world.statuses(second) == ["loaded"]


def test_cancelling_what_is_over_or_unknown_does_nothing():
    world = below(1)
    job = world.load(1)
    world.run_all()
    world.plane.cancel(job, world.now)
    world.plane.cancel(JobId(999), world.now)
    world.collect()
    assert world.statuses(job) == ["loaded"]


# -- leases ------------------------------------------------------------------------------------------------------------


def test_a_load_takes_over_the_lease_of_its_request():
    world = below(2)
    reservation = world.plane.reserve(RequestId("r"), [key(1), key(2)], world.now)
    world.collect()
    world.run_all()
    assert reservation.hits() == [True, True]
    job = world.job(LOAD, [key(1), key(2)])
    world.jobs[job.job_id] = job
    world.plane.submit(job, world.now, RequestId("r"))
    world.collect()
    assert world.plane.reservation(RequestId("r")) is None
    held = [row for row, holds in enumerate(world.plane.control.cpu.table.pins) if holds]
    assert len(held) == 2
    world.run_all()
    assert world.statuses(job.job_id) == ["loaded", "loaded"]
    assert not any(world.plane.control.cpu.table.pins)


def test_a_revoked_reservation_is_served_at_once_from_what_others_hold():
    world = below(8, rows=4)
    for name, numbers in (("old", [1]), ("young", [1]), ("youngest", [7])):
        world.plane.reserve(RequestId(name), [key(n) for n in numbers], world.now)
        world.collect()
        world.run_all()
    old = world.plane.reserve(RequestId("old"), [key(n) for n in (2, 3, 4, 5)], world.now)
    world.collect()
    world.run_all()
    assert old.hits() == [True] * 4 + [False]
    young, youngest = (world.plane.reservation(RequestId(name)) for name in ("young", "youngest"))
    assert young.hits() == [True]
    assert not youngest.served
    world.plane.end_request(RequestId("old"), world.now)
    world.step()
    world.run_all()
    assert youngest.hits() == [True]


def test_leased_rows_go_to_the_load_of_their_request_and_to_nobody_older_who_waits():
    world = below(4, rows=8)
    leased = [1000, 1001, 1002, 1003]
    world.plane.reserve(RequestId("r"), [key(n) for n in leased], world.now)
    world.store(50, 51, 52, 53)
    old = world.load(1, 2)
    assert not world.under_way(1, LOAD)
    job = world.job(LOAD, [key(n) for n in leased])
    world.jobs[job.job_id] = job
    world.plane.submit(job, world.now, RequestId("r"))
    world.collect()
    assert [world.numbers(copy) for copy in world.under_way(0, LOAD)] == [leased]
    world.run_all()
    assert world.statuses(old) == ["loaded"] * 2
    assert world.statuses(job.job_id) == ["loaded"] * 4


def test_an_older_reservation_that_wants_more_lets_no_younger_one_take_leases():
    """Although rows are free: it waits for its tier, and would have to take the younger one's leases away later."""
    world = below(12, rows=16)
    old = world.plane.reserve(RequestId("old"), [key(n) for n in range(1, 9)], world.now)
    young = world.plane.reserve(RequestId("young"), [key(1005), key(1006)], world.now)
    world.collect()
    assert world.plane.control.cpu.available > 0
    assert not old.served
    assert not young.rows
    world.run_all()
    assert old.hits() == [True] * 8
    assert young.hits() == [True] * 2


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_promoted_blocks_age_from_their_leaf_to_their_root_even_before_they_are_loaded(policy):
    world = World(cpu_setup(32, policy), [fs_setup(128)])
    world.store(*range(6))
    world.run_all()
    world.plane.control.cpu.reset()
    world.step()
    world.plane.reserve(RequestId("r"), [key(n) for n in range(6)], world.now)
    world.collect()
    world.run_all()
    cpu = world.plane.control.cpu
    assert [cpu.table.keys[row] for row in cpu.policy.coldest()] == [key(n) for n in reversed(range(6))]


@pytest.mark.parametrize("wants", ["load", "reservation"])
def test_what_waits_for_its_tier_costs_no_walk(wants):
    """While the tier has no room it looks at a block or two a step, however many there are."""
    world = below(200, rows=16, slots=512)
    if wants == "load":
        world.load(*range(1, 201))
    else:
        world.plane.reserve(RequestId("r"), [key(n) for n in range(1, 201)], world.now)
        world.collect()
    promotions = world.plane._promotions
    looked = []
    source = promotions.source

    def spy(*args):
        looked.append(args)
        return source(*args)

    promotions.source = spy
    for _ in range(10):
        world.step()
    assert len(looked) <= 20
    assert world.held_below(1) == 4


def test_no_alarm_is_set_for_a_time_that_has_passed():
    """A driver sleeps until `next_deadline`: one in the past would make it spin."""
    world = below(4, rows=4)
    served = world.plane.reserve(RequestId("none"), [key(900)], world.now)
    world.plane.reserve(RequestId("old"), [key(n) for n in (1, 2, 3, 4)], world.now)
    assert served.served
    for _ in range(100):
        deadline = world.plane.next_deadline(world.now)
        if deadline is None:
            break
        assert deadline > world.now
        world.now = deadline
        world.step()
    else:
        raise AssertionError("there is always another deadline although nothing happens")


def test_a_reservation_cut_to_size_lets_the_next_be_served_in_the_same_breath():
    world = below(12, rows=4)
    old = world.plane.reserve(RequestId("old"), [key(n) for n in range(1, 9)], world.now)
    young = world.plane.reserve(RequestId("young"), [key(700)], world.now)
    world.collect()
    world.run_all()
    assert old.served
    assert sum(old.hits()) == 4
    assert young.served, "it needs no row: nobody has its key"


def test_looking_up_and_locating_agree():
    world = below(3, others=[shared_setup()])
    world.store(40)
    keys = [key(n) for n in (1, 2, 1000, 40, 999)]
    world.plane.lookup(keys, world.now)
    world.collect()
    for step in range(3):
        looked, located = world.plane.lookup(keys, world.now), world.plane.locate(keys, world.now)
        for result, name in zip(looked, located, strict=True):
            assert (result is LookupResult.HIT) == (name == "cpu")
            assert (result is LookupResult.MISS) <= (name is None)
        assert looked[3] is (LookupResult.HIT_PENDING if step == 0 else LookupResult.HIT)
        assert located[3] == (None if step == 0 else "cpu")
        world.run_all()
    assert world.plane.locate([key(1), key(1000), key(999)], world.now) == ["fs", "cpu", None]
