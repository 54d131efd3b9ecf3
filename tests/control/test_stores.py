"""Stores: nothing twice, whole blocks only, a row or a reason for each, and what is stored lands below one by one."""

from __future__ import annotations

import pytest
from support_control import World, cpu_setup, fs_setup, key, key_number, plane_settings

from kvtier.control.tiers.slot_table import FREE, QUARANTINED, READY
from kvtier.errors import IntegrityError, UsageError
from kvtier.policy import LRU
from kvtier.tier.contract import LookupResult
from kvtier.types.arrays import int_array
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import CANCELLED, STORED, DropReason, GPUGroup, JobKind, JobResult, TransferJob, failed
from kvtier.types.keys import GroupIndex, JobId, RequestId

STORE, LOAD = JobKind.STORE, JobKind.LOAD


def reasons(world: World, job: JobId) -> list[str | None]:
    return [outcome.reason for group in world.results[job].outcomes for outcome in group]


def coldest(world: World) -> list[int]:
    cpu = world.plane.control.cpu
    return [key_number(cpu.table.keys[row]) for row in cpu.policy.coldest()]


def submit_runs(world: World, numbers: list[int], runs: list[tuple[int, int, int]]) -> JobId:
    """A store of keys whose GPU pages are given as (block, first sub-block, count)."""
    blocks, firsts, counts = zip(*runs, strict=True)
    pages = int_array(world.gpu_blocks(sum(counts)))
    staging = GPURuns(int_array(blocks), int_array(firsts), int_array(counts), pages)
    job = TransferJob(
        JobId(500 + len(world.jobs)), STORE, (GPUGroup(GroupIndex(0), tuple(map(key, numbers)), staging),)
    )
    world.jobs[job.job_id] = job
    for block, page in zip(staging.pages()[0].tolist(), pages.tolist(), strict=True):
        world.bytes_at["gpu", page] = (key(numbers[block % len(numbers)]), world.plane.control.epoch)
    world.plane.submit(job, world.now)
    world.collect()
    return job.job_id


# -- nothing twice -----------------------------------------------------------------------------------------------------


def test_what_is_there_already_is_present_and_not_copied():
    world = World(cpu_setup(4), [])
    world.store(1, 2)
    world.run_all()
    again = world.store(2, 1)
    assert not world.running
    assert world.statuses(again) == ["present", "present"]


def test_a_store_in_flight_is_remembered_across_calls_and_not_stored_twice():
    world = World(cpu_setup(8), [])
    first = world.store(1, 2)
    second = world.store(2, 3)
    world.pass_time(1.0)
    third = world.store(1, 3)
    assert [world.numbers(job) for job in world.under_way(0, STORE)] == [[1, 2], [3]]
    assert third not in world.results
    world.run_all()
    assert world.statuses(first) == ["stored", "stored"]
    assert world.statuses(second) == ["present", "stored"]
    assert world.statuses(third) == ["present", "present"]
    assert world.plane.control.counters(0).stored == 3


@pytest.mark.parametrize("how", ["failed", "late", "cancelled"])
def test_when_the_first_store_of_a_key_fails_the_second_stores_it_itself(how):
    world = World(cpu_setup(4), [])
    first, second = world.store(1), world.store(1)
    (copy,) = world.under_way(0, STORE)
    if how == "failed":
        world.end(copy, failed(5))
    elif how == "late":
        world.make_late(copy)
    else:
        world.end(copy, CANCELLED)
    assert world.statuses(first) == [how]
    assert second not in world.results
    assert [world.numbers(job) for job in world.under_way(0, STORE)] == [[1]]
    world.run_all()
    assert world.statuses(second) == ["stored"]
    assert world.plane.lookup([key(1)], world.now) == [LookupResult.HIT]
    world.check()


def test_a_key_twice_in_one_store_is_copied_once():
    world = World(cpu_setup(4), [])
    job = world.store(1, 2, 1)
    assert [sorted(world.numbers(copy)) for copy in world.under_way(0, STORE)] == [[1, 2]]
    world.run_all()
    assert sorted(world.statuses(job)) == ["present", "stored", "stored"]


def test_a_key_twice_in_one_store_gets_a_second_try_when_the_first_copy_fails():
    world = World(cpu_setup(4), [])
    job = world.store(1, 2, 1)
    (copy,) = world.under_way(0, STORE)
    world.end(copy, *(failed(5) if n == 1 else STORED for n in world.numbers(copy)))
    world.run_all()
    assert world.statuses(job)[1] == "stored"
    assert sorted(world.statuses(job)) == ["failed", "stored", "stored"]
    assert world.plane.locate([key(1)], world.now) == ["cpu"]


def test_a_key_twice_in_one_store_on_a_single_row_ends():
    world = World(cpu_setup(1), [])
    job = world.store(1, 1, 2, 2)
    world.run_all()
    assert sorted(world.statuses(job)) == ["present", "present", "stored", "stored"]


def test_a_store_waits_for_a_promotion_of_the_same_key_instead_of_copying():
    world = World(cpu_setup(4), [fs_setup(16)])
    for number in (1, 10, 11, 12, 13):
        world.store(number)
        world.run_all()
    load, store = world.load(1), world.store(1)
    assert not world.under_way(0, STORE)
    world.run_all()
    assert (world.statuses(load), world.statuses(store)) == (["loaded"], ["present"])


# -- whole blocks only -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("runs", "whole"),
    [
        ([(0, 0, 4), (1, 0, 4)], [True, True]),
        ([(0, 1, 3), (1, 0, 4)], [False, True]),
        ([(0, 0, 4), (1, 0, 3)], [True, False]),
        ([(0, 0, 1), (0, 1, 3), (1, 0, 1), (1, 2, 2)], [True, False]),
        ([(1, 0, 4)], [False, True]),
        ([(0, 0, 4), (0, 3, 1), (1, 0, 4)], [False, True]),
    ],
)
def test_a_row_whose_sub_blocks_were_not_all_written_once_never_becomes_ready(runs, whole):
    world = World(cpu_setup(4), [], factor=4)
    job = submit_runs(world, [1, 2], runs)
    world.run_all()
    assert world.statuses(job) == ["stored" if ok else "dropped" for ok in whole]
    assert reasons(world, job) == [None if ok else DropReason.PARTIAL for ok in whole]
    assert world.plane.locate([key(1), key(2)], world.now) == ["cpu" if ok else None for ok in whole]
    world.check()


@pytest.mark.parametrize("run", [(0, 3, 2), (2, 0, 4), (-1, 0, 4)])
def test_runs_outside_the_job_are_refused_and_nothing_is_begun(run):
    world = World(cpu_setup(4), [], factor=4)
    with pytest.raises(UsageError):
        submit_runs(world, [1, 2], [run])
    assert not world.running
    assert world.plane.idle
    world.check()


def test_a_job_id_that_is_under_way_is_refused():
    world = World(cpu_setup(4), [])
    job = world.store(1)
    with pytest.raises(UsageError):
        world.plane.submit(world.jobs[job], world.now)
    world.run_all()
    assert world.statuses(job) == ["stored"]


def test_partial_success_of_a_copy_is_kept_in_any_order():
    world = World(cpu_setup(8), [])
    job = world.store(1, 2, 3, 4)
    (copy,) = world.under_way(0, STORE)
    world.end(copy, failed(5), STORED, failed(5), STORED)
    assert world.statuses(job) == ["failed", "stored", "failed", "stored"]
    assert world.plane.locate([key(n) for n in (1, 2, 3, 4)], world.now) == [None, "cpu", None, "cpu"]
    counts = world.plane.control.cpu.table.counts
    assert (counts[READY], counts[FREE]) == (2, 6)
    world.check()


def test_outcomes_belong_to_their_keys_when_groups_alternate():
    world = World(cpu_setup(8, groups=2), [])
    job = world.submit(STORE, [key(1, 0), key(1, 1), key(2, 0), key(2, 1)])
    (copy,) = world.under_way(0, STORE)
    world.end(copy, STORED, failed(5), STORED, STORED)
    assert world.statuses(job) == ["stored", "failed", "stored", "stored"]
    located = world.plane.locate([key(1, 0), key(2, 0), key(1, 1), key(2, 1)], world.now)
    assert located == ["cpu", None, "cpu", "cpu"]


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("write_policy", ["write_through", "on_evict"])
def test_a_store_larger_than_the_cpu_tier_lands_below_block_by_block(rows, write_policy):
    world = World(cpu_setup(rows), [fs_setup(64, write_policy=write_policy)])
    job = world.store(*range(40))
    world.run_all()
    assert world.statuses(job) == ["stored"] * 40
    assert None not in world.plane.locate([key(n) for n in range(40)], world.now)
    assert world.plane.control.counters(1).dropped == {}
    load = world.load(*range(40))
    world.run_all()
    assert world.statuses(load) == ["loaded"] * 40
    world.check()


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_what_a_large_store_leaves_in_a_small_cpu_tier_is_the_front_of_its_prefix(policy):
    """As if its blocks were used one by one from leaf to root: the rest without the root would be worth nothing."""
    world = World(cpu_setup(8, policy), [])
    job = world.store(*range(20))
    world.run_all()
    assert world.statuses(job) == ["stored"] * 20
    assert coldest(world) == list(reversed(range(8)))


def test_stores_are_served_in_the_order_they_came():
    world = World(cpu_setup(2), [])
    for start in (0, 10, 20):
        world.store(start, start + 1)
    order = []
    while world.running:
        (job,) = world.running
        order += world.numbers(job)
        world.finish(job)
    assert order == [0, 1, 10, 11, 20, 21]


def test_loads_go_before_stores():
    world = World(cpu_setup(2), [fs_setup(16)])
    for number in (1, 2, 3):
        world.store(number)
        world.run_all()
    busy = world.store(50, 51)
    store, load = world.store(60, 61), world.load(1)
    world.finish(*world.under_way(0, STORE))
    for job in world.under_way(1, STORE):
        world.finish(job)
    assert world.under_way(1, LOAD) or world.statuses(load) == ["loaded"]
    world.run_all()
    assert world.statuses(load) == ["loaded"]
    assert world.statuses(busy) == world.statuses(store) == ["stored", "stored"]


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_stored_prefix_ages_from_its_leaf_to_its_root(policy):
    world = World(cpu_setup(8, policy), [])
    world.store(*range(5))
    world.run_all()
    assert coldest(world) == [4, 3, 2, 1, 0]
    world.store(*range(10, 15))
    world.run_all()
    assert coldest(world) == [2, 1, 0, 14, 13, 12, 11, 10]


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_prefix_stored_in_several_copies_ages_from_its_leaf_to_its_root(policy):
    """Some rows are free at once, others later: all the same the leaf must go first, in the tier below too."""
    world = World(cpu_setup(16, policy), [fs_setup(64, policy=policy)])
    world.store(*range(100, 106))
    (busy,) = world.under_way(0, STORE)
    job = world.store(*range(14))
    assert [world.numbers(copy) for copy in world.under_way(0, STORE)[1:]] == [list(range(4, 14))]
    world.finish(busy)
    world.run_all()
    assert world.statuses(job) == ["stored"] * 14
    assert [n for n in coldest(world) if n < 100] == list(reversed(range(14)))
    fs = world.plane.control.lowers[0].owned
    below = [key_number(fs.table.keys[slot]) for slot in fs.policy.coldest()]
    assert [n for n in below if n < 100] == list(reversed(range(14)))
    world.check()


def test_touching_goes_from_leaf_to_root():
    world = World(cpu_setup(8), [fs_setup(16)])
    world.store(*range(4))
    world.store(*range(10, 14))
    world.run_all()
    world.plane.touch([key(n) for n in (0, 1, 99, 2, 3)])
    assert coldest(world)[-4:] == [3, 2, 1, 0]
    fs = world.plane.control.lowers[0].owned
    assert [key_number(fs.table.keys[slot]) for slot in fs.policy.coldest()][-4:] == [3, 2, 1, 0]


# -- eviction ----------------------------------------------------------------------------------------------------------


def test_a_policy_is_told_from_leaf_to_root_what_is_about_to_be_placed():
    world = World(cpu_setup(8), [])
    told = []

    class Spy(LRU):
        __slots__ = ()

        def admit(self, keys):
            told.extend(map(key_number, keys))

    cpu = world.plane.control.cpu
    cpu.policy = Spy(8, cpu.table.keys)
    world.store(1, 2, 3)
    assert told == [3, 2, 1]


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_eviction_is_all_or_nothing(policy):
    world = World(cpu_setup(8, policy), [])
    world.store(*range(8))
    world.run_all()
    cpu = world.plane.control.cpu
    cpu.pin([cpu.ready(key(n)) for n in range(3)])
    before = coldest(world)
    assert cpu.evict(6) == 0
    assert coldest(world) == before
    assert cpu.evict(5) == 5
    assert sorted(coldest(world)) == [0, 1, 2]
    assert cpu.evict(1) == 0
    cpu.unpin([cpu.ready(key(n)) for n in range(3)])
    cpu.check()


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_eviction_touches_neither_held_nor_filling_rows(policy):
    world = World(cpu_setup(6, policy), [])
    world.store(1, 2)
    world.run_all()
    lease = world.plane.reserve(RequestId("r"), [key(1)], world.now)
    world.store(3, 4)
    job = world.store(*range(10, 16))
    assert [world.numbers(copy) for copy in world.under_way(0, STORE)] == [[3, 4], [13, 14, 15]]
    assert lease.hits() == [True]
    assert world.plane.lookup([key(n) for n in (1, 2, 3, 4)], world.now) == [
        "hit",
        "miss",
        "hit_pending",
        "hit_pending",
    ]
    world.run_all()
    assert world.statuses(job) == ["stored"] * 6
    assert world.plane.locate([key(1)], world.now) == ["cpu"]
    world.check()


def test_slots_refuse_moves_their_state_does_not_allow():
    world = World(cpu_setup(4), [])
    world.store(1)
    table = world.plane.control.cpu.table
    with pytest.raises(IntegrityError):
        table.begin_fill([0], [key(9)])
    with pytest.raises(IntegrityError):
        table.move([0], FREE, READY)
    with pytest.raises(IntegrityError):
        table.unpin([3])
    world.run_all()
    world.check()


@pytest.mark.parametrize("damage", ["count", "hold", "key", "free list", "directory", "policy"])
def test_check_integrity_finds_what_does_not_add_up(damage):
    world = World(cpu_setup(4), [])
    world.store(1, 2)
    world.run_all()
    world.check()
    cpu = world.plane.control.cpu
    row = cpu.ready(key(1))
    match damage:
        case "count":
            cpu.table.counts[READY] += 1
        case "hold":
            cpu.table.pins[row] = 1
        case "key":
            cpu.table.keys[row] = key(77)
        case "free list":
            cpu.placement.take(0, 1)
        case "directory":
            cpu.directory[key(5)] = row
        case "policy":
            cpu.policy.remove([row])
    with pytest.raises(IntegrityError):
        world.plane.check_integrity()


# -- the end -----------------------------------------------------------------------------------------------------------


def test_a_store_that_finds_no_row_before_its_deadline_is_dropped_with_that_reason():
    world = World(cpu_setup(2), [])
    world.store(1, 2)
    job = world.store(3, 4, timeout=5.0)
    assert world.plane.next_deadline(world.now) == 1.0, "its patience; then its deadline"
    world.pass_time(1.0)
    assert world.plane.next_deadline(world.now) == 5.0
    world.pass_time(4.0)
    assert reasons(world, job) == [DropReason.NO_ROW] * 2
    assert world.plane.control.counters(0).dropped == {DropReason.NO_ROW: 2}
    world.run_all()
    world.check()


@pytest.mark.parametrize("landed", [True, False])
def test_a_late_copy_is_reported_and_its_rows_wait_until_it_has_ended(landed):
    world = World(cpu_setup(2), [])
    job = world.store(1, 2)
    (copy,) = world.under_way(0, STORE)
    world.make_late(copy)
    assert world.statuses(job) == ["late", "late"]
    table = world.plane.control.cpu.table
    assert table.counts[QUARANTINED] == 2
    assert world.plane.lookup([key(1)], world.now) == [LookupResult.MISS]
    world.pass_time(1000.0)
    assert table.counts[QUARANTINED] == 2, "time alone ends no quarantine"
    world.end_late(copy, landed)
    assert table.counts[FREE] == 2
    assert world.plane.lookup([key(1)], world.now) == [LookupResult.MISS]
    world.check()


def test_a_cancelled_store_waits_for_its_copy_and_keeps_what_arrived():
    world = World(cpu_setup(2), [])
    job = world.store(1, 2, 3)
    world.plane.cancel(job, world.now)
    world.collect()
    assert job not in world.results
    world.run_all()
    assert world.statuses(job) == ["cancelled", "stored", "stored"]
    world.check()


def test_a_waiting_store_costs_no_walk_over_its_blocks():
    """While there is no row it looks at one block a step, however long it is."""
    world = World(cpu_setup(4), [], limits=plane_settings(patience_seconds=1e9))
    world.store(*range(4))
    world.store(*range(100, 400))
    looked: list[bytes] = []

    class Spy(dict):
        def get(self, k, default=None):
            looked.append(k)
            return super().get(k, default)

        def keys(self):
            looked.extend(super().keys())
            return super().keys()

    cpu = world.plane.control.cpu
    cpu.directory = Spy(cpu.directory)
    for _ in range(10):
        world.step()
    assert len(looked) <= 20


def test_a_finished_job_is_told_once_and_an_unknown_one_refused():
    world = World(cpu_setup(2), [])
    world.store(1)
    (copy,) = world.under_way(0, STORE)
    emission = world.running[copy]
    world.finish(copy)
    with pytest.raises(UsageError):
        world.plane.finish(JobResult.uniform(emission.job, STORED), world.now)
    with pytest.raises(UsageError):
        world.plane.on_late(copy, world.now)
    with pytest.raises(UsageError):
        world.plane.on_end(copy, world.now)
