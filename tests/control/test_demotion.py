"""Demotions: what the CPU tier owes to the tiers below, when it is sent, and what a row waits for before it goes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support_control import World, below, cpu_setup, fs_setup, key, key_number, plane_settings, shared_setup

from kvtier.control.tiers.lower_tier import TierSpec
from kvtier.control.tiers.slot_table import FREE, QUARANTINED, READY
from kvtier.types.hints import Demote
from kvtier.types.jobs import CORRUPT, STORED, DropReason, JobKind, dropped, failed
from kvtier.types.keys import Medium, RequestId

STORE, LOAD = JobKind.STORE, JobKind.LOAD


def second_fs(slots: int, **more: object) -> TierSpec:
    """An owned tier below the first one, under a name and a medium of its own."""
    return replace(fs_setup(slots, **more), name="fs2", medium=Medium("FS2"))


def where(world: World, *numbers: int) -> list[str | None]:
    return world.plane.locate([key(n) for n in numbers], world.now)


def coldest_below(world: World, position: int = 1) -> list[int]:
    owned = world.plane.control.lowers[position - 1].owned
    return [key_number(owned.table.keys[slot]) for slot in owned.policy.coldest()]


# -- write_through -----------------------------------------------------------------------------------------------------


def test_write_through_stores_a_row_below_as_soon_as_it_is_ready():
    world = World(cpu_setup(8), [fs_setup(16)])
    world.store(1, 2)
    assert not world.under_way(1, STORE)
    world.run_tier(0)
    assert [world.numbers(job) for job in world.under_way(1, STORE)] == [[2, 1]]
    world.run_all()
    assert world.plane.dirty_rows == 0
    assert where(world, 1, 2) == ["cpu", "cpu"]
    assert coldest_below(world) == [2, 1]


def test_what_a_tier_has_already_is_not_sent_to_it_again():
    world = below(2)
    world.load(1, 2)
    world.run_all()
    assert where(world, 1, 2) == ["cpu", "cpu"]
    assert world.plane.control.counters(1).stored == 10
    assert world.plane.dirty_rows == 0


def test_a_block_promoted_from_the_second_tier_is_stored_in_the_first():
    world = World(cpu_setup(8), [fs_setup(16), shared_setup()])
    world.remote[key(1)] = (key(1), 0)
    world.load(1)
    world.run_all()
    assert world.plane.control.lowers[0].owned.ready(key(1)) is not None
    assert world.plane.control.counters(2).stored == 0, "where it came from it need not go"


def test_what_another_host_stored_meanwhile_is_not_sent_any_more():
    world = World(cpu_setup(8), [shared_setup(inflight_blocks=1)])
    world.store(1, 2)
    world.run_tier(0)
    assert [world.numbers(job) for job in world.under_way(1, STORE)] == [[2]]
    world.plane.control.lowers[0].index.note_presence(key(1), True, world.now)
    world.run_all()
    assert world.plane.control.counters(1).stored == 1
    assert world.plane.dirty_rows == 0


def test_a_store_waits_for_rows_that_are_being_written_below_but_only_until_its_patience_ends():
    world = World(cpu_setup(4), [fs_setup(16)], limits=plane_settings(patience_seconds=2.0))
    world.store(1, 2, 3, 4)
    world.run_tier(0)
    waiting = world.store(5, 6)
    assert not world.under_way(0, STORE)
    assert world.plane.next_deadline(world.now) == 2.0
    world.pass_time(1.9)
    assert not world.under_way(0, STORE)
    world.pass_time(0.1)
    assert len(world.under_way(0, STORE)) == 1
    assert world.plane.control.counters(1).dropped == {DropReason.BACKLOG: 2}
    world.run_all()
    assert world.statuses(waiting) == ["stored", "stored"]
    world.check()


def test_a_load_takes_rows_that_wait_to_be_written_below_at_once():
    world = below(2, inflight_blocks=1)
    world.store(*range(10, 18))
    world.run_tier(0)
    assert world.plane.control.cpu.available == 0
    job = world.load(1)
    assert world.plane.control.counters(1).dropped == {DropReason.BACKLOG: 1}
    assert world.under_way(1, LOAD)
    world.run_all()
    assert world.statuses(job) == ["loaded"]


def test_a_row_that_was_given_up_while_it_waits_and_is_written_back_after_all_is_sent_once():
    world = World(cpu_setup(16), [fs_setup(32, inflight_blocks=4)])
    plane, lower = world.plane, world.plane.control.lowers[0]
    world.store(*range(5))
    world.run_tier(0)
    assert [world.numbers(job) for job in world.under_way(1, STORE)] == [[4, 3, 2]], "0 and 1 wait"
    plane.demotions.drop_dirty(2, patient=False)
    assert not owes(world, 0)
    plane.hint(Demote([key(0)]), world.now)
    world.run_all()
    held = [key_number(name) for name in lower.owned.table.keys if name is not None]
    assert sorted(held) == [0, 2, 3, 4], "no key has two slots"
    world.check()


def test_a_load_gives_up_no_more_rows_that_wait_to_be_written_than_it_can_use():
    world = World(cpu_setup(16), [fs_setup(32, inflight_blocks=4)])
    for number in [200, 201, *range(100, 116)]:  # 200 and 201 are below alone, the others also in rows
        world.store(number)
        world.run_all()
    world.plane.reserve(RequestId("leased"), [key(n) for n in range(105, 116)], world.now)
    world.step()
    world.store(*range(5))
    world.run_tier(0)
    assert [world.numbers(job) for job in world.under_way(1, STORE)] == [[4, 3, 2]], "0 and 1 wait"
    job = world.load(200, 201)
    assert [world.numbers(promotion) for promotion in world.under_way(1, LOAD)] == [[200]], "a quarter of the rows"
    assert world.plane.control.counters(1).dropped == {DropReason.BACKLOG: 1}
    world.run_all()
    assert world.statuses(job) == ["loaded"] * 2
    assert world.plane.control.counters(1).stored == 18 + 4
    world.check()


# -- on_evict ----------------------------------------------------------------------------------------------------------


def test_on_evict_stores_nothing_while_there_is_room():
    world = World(cpu_setup(8), [fs_setup(16, write_policy="on_evict")])
    world.store(*range(8))
    world.run_all()
    assert world.plane.control.counters(1).stored == 0
    assert world.plane.dirty_rows == 8


def test_on_evict_keeps_the_upper_copy_until_the_lower_tier_acknowledges():
    world = World(cpu_setup(8), [fs_setup(16, write_policy="on_evict")])
    world.store(*range(8))
    world.run_all()
    waiting = world.store(8, 9)
    (demotion,) = world.under_way(1, STORE)
    assert world.numbers(demotion) == [7, 6], "the coldest, leaf before root"
    assert not world.under_way(0, STORE)
    assert where(world, *range(8)) == ["cpu"] * 8
    world.finish(demotion)
    world.run_all()
    assert world.statuses(waiting) == ["stored", "stored"]
    assert where(world, 6, 7) == ["fs", "fs"]
    assert world.plane.control.counters(1).dropped == {}


@pytest.mark.parametrize("patience", [0.5, 1.0])
def test_on_evict_makes_a_load_wait_for_the_acknowledgement_but_not_for_long(patience):
    world = below(2, rows=8, write_policy="on_evict")
    world.plane._admission._patience_seconds = patience
    world.store(*range(10, 14))
    world.store(*range(14, 18))
    world.run_all()
    assert world.plane.dirty_rows == 8
    first = world.load(1)
    (demotion,) = world.under_way(1, STORE)
    assert not world.under_way(1, LOAD)
    assert world.plane.next_deadline(world.now) == world.now + patience
    world.finish(demotion)
    assert world.under_way(1, LOAD)
    world.run_all()
    assert world.statuses(first) == ["loaded"]
    assert world.plane.control.counters(1).dropped == {}
    while world.plane.control.cpu.available:
        world.store(next_number := 100 + len(world.jobs))
        assert next_number
        world.run_tier(0)
    second = world.load(2)
    world.pass_time(patience)
    assert world.under_way(1, LOAD)
    assert world.plane.control.counters(1).dropped[DropReason.BACKLOG] == 1
    world.run_all()
    assert world.statuses(second) == ["loaded"]
    world.check()


def owes(world: World, number: int) -> bool:
    row = world.plane.control.cpu.ready(key(number))
    return bool(world.plane.demotions.dirty.bits[row])


def test_a_load_that_gets_on_does_not_lose_its_patience():
    """It takes far longer than its patience, a row at a time; nothing that an on_evict tier is to have is lost."""
    world = below(12, rows=16, write_policy="on_evict", inflight_blocks=1)
    load = world.load(*range(1, 13))
    while world.running:
        world.finish(next(iter(world.running)))
        world.pass_time(0.4)
        assert world.plane.control.counters(1).dropped == {}
    assert world.now > 5.0
    assert world.statuses(load) == ["loaded"] * 12


def test_a_store_that_lost_its_patience_takes_no_row_before_a_load_that_waits():
    world = below(2, rows=16, write_policy="on_evict", inflight_blocks=1)
    store = world.store(200)
    assert world.held_below(1) == 1
    world.pass_time(0.9)
    load = world.load(1)
    world.pass_time(0.1)
    assert not world.under_way(0, STORE)
    assert world.plane.control.counters(1).dropped == {}
    world.run_all()
    assert (world.statuses(load), world.statuses(store)) == (["loaded"], ["stored"])


def test_when_an_on_evict_tier_lets_its_copy_go_the_row_owes_itself_again():
    world = World(cpu_setup(8), [fs_setup(4, regions=1, write_policy="on_evict")])
    lower = world.plane.control.lowers[0].owned
    for start in range(0, 12, 2):
        world.store(start, start + 1)
        world.run_all()
    world.plane.reserve(RequestId("r"), [key(0)], world.now)
    world.step()
    world.run_all()
    assert not owes(world, 0)
    for start in range(20, 30, 2):
        world.store(start, start + 1)
        world.run_all()
        assert owes(world, 0) == (key(0) not in lower.directory)
    assert owes(world, 0)
    world.plane.end_request(RequestId("r"), world.now)
    world.run_all()
    assert where(world, 0) == ["cpu"], "it stays until the tier has it again"
    world.check()


def test_on_evict_loses_nothing_as_long_as_the_lower_tier_has_room(seed):
    rng = random.Random(seed)
    world = World(cpu_setup(12), [fs_setup(256, write_policy="on_evict")], limits=plane_settings(watermark_rows=1))
    known = 0
    for _ in range(150):
        if known < 200 and rng.random() < 0.6:
            count = rng.randint(1, 12)
            world.store(*range(known, known + count))
            known += count
        elif known:
            world.load(*rng.sample(range(known), min(known, rng.randint(1, 8))))
        for _ in range(rng.randint(0, 4)):
            if world.running:
                world.finish(rng.choice(list(world.running)))
        world.check()
    world.run_all()
    assert None not in where(world, *range(known))
    assert world.plane.control.counters(1).dropped == {}
    assert {status for job in world.jobs for status in world.statuses(job)} == {"stored", "loaded", "missing"}


def test_a_lower_tier_smaller_than_the_watermark_is_not_written_for_ever():
    world = World(
        cpu_setup(16), [fs_setup(4, regions=1, write_policy="on_evict")], limits=plane_settings(watermark_rows=12)
    )
    world.store(*range(8))
    world.store(*range(8, 16))
    world.run_all(limit=200)
    world.check()


def test_the_watermark_keeps_rows_clean_before_anybody_needs_them():
    world = World(cpu_setup(16), [fs_setup(64, write_policy="on_evict")], limits=plane_settings(watermark_rows=4))
    for start in range(0, 48, 4):
        job = world.store(*range(start, start + 4))
        world.run_all()
        assert world.statuses(job) == ["stored"] * 4
        assert world.plane.control.cpu.available >= 4
    assert world.plane.control.counters(1).dropped == {}
    assert where(world, *range(32)) == ["fs"] * 32, "nothing was lost on the way down"


def test_with_the_tier_down_on_evict_rows_go_without_at_once_and_as_many_as_are_needed():
    world = World(cpu_setup(8), [fs_setup(16, write_policy="on_evict")])
    lower = world.plane.control.lowers[0]
    for _ in range(lower.store_breaker.threshold):
        lower.store_breaker.on_failure(world.now)
    world.store(*range(8))
    world.run_all()
    job = world.store(8, 9)
    assert world.under_way(0, STORE), "nothing else would ever wake it"
    world.run_all()
    assert world.statuses(job) == ["stored", "stored"]
    assert lower.counters.dropped == {DropReason.TIER_DOWN: 2}
    assert where(world, *range(8)) == ["cpu"] * 6 + [None, None]


# -- how much ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write_policy", ["write_through", "on_evict"])
def test_in_flight_and_quarantined_a_tier_holds_at_most_a_quarter_of_the_rows(write_policy):
    world = World(cpu_setup(16), [fs_setup(64, write_policy=write_policy)], limits=plane_settings(watermark_rows=16))
    world.store(*range(12))
    world.run_tier(0)
    assert world.held_below(1) == 4
    for job in world.under_way(1, STORE):
        world.make_late(job)
    assert not world.under_way(1, STORE)
    world.store(20, 21)
    world.run_tier(0)
    assert world.held_below(1) == 4
    assert not world.under_way(1, STORE)
    for job in list(world.late):
        world.end_late(job, landed=True)
    world.store(30)
    world.run_tier(0)
    assert world.under_way(1, STORE), "the tier is used again"
    world.run_all()
    world.check()


def test_no_job_is_larger_than_what_may_be_in_flight():
    world = below(12, rows=64, slots=256, inflight_blocks=3)
    world.load(*range(1, 13))
    assert [len(world.numbers(job)) for job in world.under_way(1, LOAD)] == [3, 3, 3, 3]
    world.store(*range(50, 60))
    world.run_tier(0)
    assert [len(world.numbers(job)) for job in world.under_way(1, STORE)] == [3]
    world.run_all()


def test_promotions_and_demotions_share_the_quarter():
    world = below(16, rows=16)
    world.store(30, 31, 32)
    world.run_tier(0)
    assert world.held_below(1) == 3
    job = world.load(*range(1, 17))
    assert world.held_below(1) == 4
    world.run_all()
    assert world.statuses(job) == ["loaded"] * 16


def test_a_frozen_tier_counts_as_down_until_a_late_transfer_has_ended():
    """Late promotions keep rows that nobody may touch; the rest of the CPU tier must not follow them."""
    world = below(16, rows=16)
    first = world.load(*range(1, 9))
    world.make_late(*world.under_way(1, LOAD))
    assert world.statuses(first) == ["missing"] * 8
    assert not world.running
    assert world.plane.control.cpu.table.counts[QUARANTINED] == 4
    second = world.load(9, 10)
    assert world.statuses(second) == ["missing"] * 2
    assert where(world, 9) == ["fs"]
    assert world.plane.lookup([key(9)], world.now) == ["miss"]
    world.store(50)
    world.run_tier(0)
    assert not world.under_way(1, STORE)
    assert world.plane.control.counters(1).dropped == {DropReason.TIER_DOWN: 1}
    world.end_late(*world.late, landed=True)
    third = world.load(9, 10)
    world.run_all()
    assert world.statuses(third) == ["loaded"] * 2
    assert world.plane.control.cpu.table.counts[QUARANTINED] == 0
    world.check()


# -- how it ends -------------------------------------------------------------------------------------------------------


def test_partial_success_is_kept_in_any_order():
    world = World(cpu_setup(16), [fs_setup(16)])
    world.store(1, 2, 3, 4)
    world.run_tier(0)
    (demotion,) = world.under_way(1, STORE)
    assert world.numbers(demotion) == [4, 3, 2, 1]
    world.end(demotion, failed(5), STORED, dropped(DropReason.KEY_TOO_LONG), STORED)
    owned = world.plane.control.lowers[0].owned
    assert [owned.ready(key(n)) is not None for n in (1, 2, 3, 4)] == [True, False, True, False]
    assert (owned.table.counts[READY], owned.table.counts[FREE]) == (2, 2)
    assert world.plane.dirty_rows == 0, "what failed is given up, not tried for ever"
    assert world.plane.control.counters(1).failed == 1
    assert world.plane.control.counters(1).dropped == {DropReason.KEY_TOO_LONG: 1}
    world.check()


@pytest.mark.parametrize("landed", [True, False])
@pytest.mark.parametrize("write_policy", ["write_through", "on_evict"])
def test_a_late_demotion_quarantines_its_slot_and_pins_its_row_until_it_has_ended(landed, write_policy):
    world = World(cpu_setup(4), [fs_setup(4, regions=1, write_policy=write_policy)])
    world.store(1)
    world.run_tier(0)
    world.plane.drain(world.now)
    world.collect()
    (demotion,) = world.under_way(1, STORE)
    cpu, owned = world.plane.control.cpu, world.plane.control.lowers[0].owned
    row = cpu.ready(key(1))
    world.make_late(demotion)
    assert owned.table.counts[QUARANTINED] == 1
    assert key(1) not in owned.directory
    assert world.plane.dirty_rows == 0
    if write_policy == "on_evict":
        assert world.plane.control.counters(1).dropped == {DropReason.TIER_DOWN: 1}
    filling = world.store(2, 3, 4, 5, 6, 7)
    world.run_tier(0)
    assert world.statuses(filling) == ["stored"] * 6
    assert cpu.ready(key(1)) == row, "it is the coldest, but its row is being read and cannot go"
    assert cpu.table.pins[row] == 1
    world.end_late(demotion, landed)
    assert cpu.table.pins[row] == 0
    assert owned.table.counts[QUARANTINED] == 0
    assert owned.ready(key(1)) is None, "whatever landed late stays unseen"
    world.run_all()
    world.check()


def test_a_late_demotion_is_no_backlog_and_nobody_waits_for_it():
    world = World(cpu_setup(8), [fs_setup(8, regions=1)])
    world.store(1)
    world.run_tier(0)
    (demotion,) = world.under_way(1, STORE)
    assert (world.plane.backlog, world.plane.in_flight) == (1, 1)
    world.make_late(demotion)
    assert (world.plane.backlog, world.plane.in_flight) == (0, 1)
    assert not world.plane.idle, "its I/O goes on"
    world.end_late(demotion, True)
    assert (world.plane.backlog, world.plane.in_flight) == (0, 0)
    assert world.plane.idle


def test_a_row_whose_bytes_were_refused_while_it_is_demoted_is_pinned_until_the_demotion_ends():
    world = World(cpu_setup(4), [fs_setup(8)])
    world.store(1)
    world.run_tier(0)
    (demotion,) = world.under_way(1, STORE)
    world.load(1)
    (copy,) = world.under_way(0, LOAD)
    world.end(copy, CORRUPT)
    table = world.plane.control.cpu.table
    assert table.counts[QUARANTINED] == 1
    world.finish(demotion)
    assert table.counts[QUARANTINED] == 0
    world.check()


# -- order -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["as sent", "reversed", "middle last"])
@pytest.mark.parametrize("write_policy", ["write_through", "on_evict"])
def test_below_too_a_parent_never_ages_before_its_child_whatever_order_jobs_end_in(order, write_policy):
    world = World(cpu_setup(2048), [fs_setup(1024, write_policy=write_policy)])
    world.store(*range(300))
    world.run_tier(0)
    world.plane.drain(world.now)
    world.collect()
    jobs = world.under_way(1, STORE)
    assert [len(world.numbers(job)) for job in jobs] == [128, 128, 44]
    for i in {"as sent": (0, 1, 2), "reversed": (2, 1, 0), "middle last": (2, 0, 1)}[order]:
        world.finish(jobs[i])
    assert coldest_below(world) == list(reversed(range(300)))
    world.check()


def test_a_late_demotion_does_not_disturb_the_order_of_the_others():
    world = World(cpu_setup(2048), [fs_setup(1024)])
    world.store(*range(300))
    world.run_tier(0)
    jobs = world.under_way(1, STORE)
    world.finish(jobs[2])
    world.make_late(jobs[0])
    world.finish(jobs[1])
    world.end_late(jobs[0], landed=True)
    assert coldest_below(world) == list(reversed(range(172)))
    world.check()


def test_how_many_jobs_are_kept_in_order_is_bounded():
    world = World(cpu_setup(512), [fs_setup(1024, inflight_blocks=1000)])
    for number in range(60):
        world.store(number)
        world.run_tier(0)
    stuck, *others = world.under_way(1, STORE)
    for job in others:
        world.finish(job)
        assert len(world.plane.control.lowers[0].store_order._line) <= 16
    world.finish(stuck)
    world.check()


# -- several tiers -----------------------------------------------------------------------------------------------------


def test_a_row_is_sent_only_to_the_tier_it_owes_itself_to():
    """The first tier looks for cold rows while rows it has already still owe themselves to a slow second tier."""
    lowers = [fs_setup(16, write_policy="on_evict"), second_fs(16, inflight_blocks=1)]
    world = World(cpu_setup(8), lowers, limits=plane_settings(watermark_rows=8))
    world.store(1, 2, 3, 4, 5, 6)
    world.run_tier(0)
    sent = []
    while jobs := world.under_way(1, STORE):
        sent += world.numbers(jobs[0])
        world.finish(jobs[0])
        world.check()
    assert sorted(sent) == [1, 2, 3, 4, 5, 6]
    world.run_all()
    world.check()
    assert world.plane.dirty_rows == 0
    assert all(len(lower.owned.directory) == 6 for lower in world.plane.control.lowers)


def test_a_tier_that_is_down_does_not_keep_rows_from_the_others():
    world = World(cpu_setup(8), [fs_setup(16), second_fs(16)])
    broken = world.plane.control.lowers[0]
    for _ in range(broken.store_breaker.threshold):
        broken.store_breaker.on_failure(world.now)
    world.store(1, 2)
    world.run_tier(0)
    assert not world.under_way(1, STORE)
    assert [world.numbers(job) for job in world.under_way(2, STORE)] == [[2, 1]]
    world.run_all()
    assert world.plane.dirty_rows == 0


# -- closing -----------------------------------------------------------------------------------------------------------


def test_closing_over_a_tier_smaller_than_the_rows_writes_each_row_once():
    world = World(cpu_setup(8), [fs_setup(4, regions=1, write_policy="on_evict")])
    world.store(*range(8))
    world.run_all()
    world.plane.close(world.now)
    for _ in range(20):
        world.plane.drain(world.now)
        world.collect()
        world.run_all()
    assert world.plane.control.counters(1).stored == 8
    assert world.plane.dirty_rows == 0
    assert world.plane.idle


def test_closing_drains_what_is_owed_and_abandon_counts_what_is_not():
    world = World(cpu_setup(8), [fs_setup(16, write_policy="on_evict")])
    world.store(*range(8))
    world.run_all()
    world.plane.close(world.now)
    late_store = world.store(20)
    assert [o.reason for group in world.results[late_store].outcomes for o in group] == [DropReason.CLOSING]
    world.plane.drain(world.now)
    world.collect()
    assert world.held_below(1) == 2
    world.run_tier(1)
    world.plane.drain(world.now)
    world.collect()
    (demotion,) = world.under_way(1, STORE)
    assert world.plane.abandon() == 4, "two are below, two under way"
    world.finish(demotion)
    assert world.plane.idle
    assert world.plane.dirty_rows == 0
    assert world.plane.control.counters(1).dropped == {DropReason.CLOSING: 4}
    world.check()
