"""Hints: what is retained survives within its quota, what is prefetched is there, and nothing waits for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support_control import ROW_BYTES, World, cpu_setup, fs_setup, key, plane_settings, shared_setup

from kvtier.control.hints import prefetches, retention
from kvtier.control.tiers.lower_tier import TierSpec
from kvtier.errors import UsageError
from kvtier.types.hints import Demote, HintRefusal, HintResult, KVHint, Pin, Prefetch, Release, Retain
from kvtier.types.jobs import CORRUPT, JobKind
from kvtier.types.keys import OffloadKey, RequestId

POLICIES = ["lru", "arc", "reuse"]


def keys(*numbers: int) -> list[OffloadKey]:
    return [key(number) for number in numbers]


def allowed(setup: TierSpec, blocks: int) -> TierSpec:
    """A tier that may retain so many blocks."""
    return replace(setup, retained_bytes_max=blocks * ROW_BYTES)


def hint(world: World, said: KVHint) -> HintResult:
    result = world.plane.hint(said, world.now)
    world.step()
    world.check()
    return result


def stored(world: World, *numbers: int) -> None:
    world.store(*numbers)
    world.run_all()
    world.check()


def flood(world: World, blocks: int, first: int = 1000) -> None:
    for start in range(first, first + blocks, 4):
        stored(world, *range(start, start + 4))


def held(world: World, *numbers: int) -> list[str | None]:
    return world.plane.locate(keys(*numbers), world.now)


def refused(**counts: int) -> dict[HintRefusal, int]:
    return {HintRefusal(reason): count for reason, count in counts.items()}


# -- retaining


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("lowers", ["none", "small", "on_evict", "shared", "second_use"])
def test_what_is_retained_survives_a_flood_of_four_times_the_cpu_tier(policy, lowers):
    below = {
        "none": [],
        "small": [allowed(fs_setup(16, policy=policy), 8)],
        "on_evict": [allowed(fs_setup(16, policy=policy, write_policy="on_evict"), 8)],
        "shared": [shared_setup(hint_seconds=1e6)],
        "second_use": [allowed(fs_setup(16, policy=policy, admit="second_use"), 8)],
    }[lowers]
    world = World(allowed(cpu_setup(32, policy), 8), below)
    stored(world, *range(1, 9))
    assert hint(world, Retain(keys(*range(1, 9)), 300.0, "agent")) == HintResult(8)
    flood(world, 4 * 32)
    assert None not in held(world, *range(1, 9))
    job = world.load(*range(1, 9))
    world.run_all()
    assert world.statuses(job) == ["loaded"] * 8
    world.pass_time(301.0)
    flood(world, 4 * 32, first=5000)
    if lowers not in ("shared", "second_use") and policy == "lru":
        assert held(world, *range(1, 9)) == [None] * 8, "after its time it is as any other block"


def test_a_block_is_retained_below_once_it_is_there_and_no_longer_in_a_row():
    world = World(allowed(cpu_setup(8), 6), [allowed(fs_setup(64), 10)])
    world.store(1, 2, 3)
    world.run_tier(0)  # in rows, and not yet below
    cpu, fs = world.plane.control.cpu, world.plane.control.lowers[0].owned
    assert hint(world, Retain(keys(1, 2, 3), 60.0)) == HintResult(3)
    assert (cpu.retained.used_bytes, fs.retained.used_bytes) == (3 * ROW_BYTES, 0)
    world.run_all()
    assert (cpu.retained.used_bytes, fs.retained.used_bytes) == (0, 3 * ROW_BYTES)
    assert cpu.available == 8
    world.check()


def test_what_the_lower_tier_may_not_retain_stays_in_its_row():
    world = World(allowed(cpu_setup(16), 4), [allowed(fs_setup(8), 2)])
    stored(world, 1, 2, 3, 4, 5, 6, 7)
    assert hint(world, Retain(keys(*range(1, 8)), 60.0)) == HintResult(6, refused(over_quota=1))
    flood(world, 64)
    assert held(world, *range(1, 8)) == ["fs", "fs", "cpu", "cpu", "cpu", "cpu", None]


def test_quotas_hold_at_every_moment_and_what_is_over_them_is_refused_and_counted():
    world = World(allowed(cpu_setup(16), 5), [])
    stored(world, *range(1, 13))
    assert hint(world, Retain(keys(1, 2, 3), 60.0, "a")) == HintResult(3)
    assert hint(world, Retain(keys(3, 4, 5, 6, 7), 60.0, "b")) == HintResult(3, refused(over_quota=2))
    assert hint(world, Retain(keys(1, 99), 60.0, "c")) == HintResult(1, refused(not_found=1))
    assert world.plane.control.cpu.retained.used_bytes == 5 * ROW_BYTES
    counted = {name: count for name, count in world.plane.hints.refused.items() if count}
    assert counted == {("retain", "over_quota"): 2, ("retain", "not_found"): 1}
    assert hint(world, Release("b")) == HintResult(3)
    assert hint(world, Retain(keys(6, 7, 8), 60.0, "b")) == HintResult(2, refused(over_quota=1))


def test_a_quota_of_everything_leaves_rows_for_loads_and_stores():
    world = World(allowed(cpu_setup(8), 8), [allowed(fs_setup(64), 64)])
    stored(world, *range(1, 5))
    stored(world, *range(5, 9))
    world.plane.control.lowers[0].owned.retained.max_bytes = 0
    assert hint(world, Retain(keys(*range(1, 9)), 60.0)).accepted == 6
    flood(world, 32)
    job = world.load(*range(1000, 1032))  # through the two rows that are left
    world.run_all()
    assert world.statuses(job) == ["loaded"] * 32


def test_with_every_slot_retained_stores_are_dropped_with_a_reason_and_nothing_waits():
    world = World(allowed(cpu_setup(8), 0), [allowed(fs_setup(4, 1), 4)])
    stored(world, 1, 2, 3, 4)
    assert hint(world, Retain(keys(1, 2, 3, 4), 60.0)) == HintResult(4)
    flood(world, 16)
    assert held(world, 1, 2, 3, 4) == ["fs"] * 4
    while not world.plane.idle:
        world.step()
    assert {reason.value: count for reason, count in world.plane.control.counters(1).dropped.items()} == {"no_slot": 16}
    hint(world, Release())
    flood(world, 16, first=2000)
    assert world.plane.control.counters(1).stored > 4


def test_several_sessions_retain_a_block_until_the_last_of_them_lets_it_go():
    world = World(allowed(cpu_setup(8), 4), [])
    stored(world, 1, 2)
    for session, seconds in (("a", 10.0), ("b", 20.0)):
        hint(world, Retain(keys(1, 2), seconds, session))
    hint(world, Release("b"))
    flood(world, 16)
    assert held(world, 1, 2) == ["cpu"] * 2
    world.pass_time(10.0)
    assert world.plane.control.cpu.retained.used_bytes == 0
    flood(world, 16)
    assert held(world, 1, 2) == [None] * 2


def test_a_set_is_kept_until_the_latest_of_its_calls_lapses_but_no_longer_than_a_set_may():
    limits = plane_settings(retain_time=100.0)
    world = World(allowed(cpu_setup(8), 4), [], limits=limits)
    stored(world, 1, 2, 3)
    hint(world, Retain(keys(1, 2), 50.0, "a"))
    hint(world, Retain(keys(3), 10.0, "a"))
    assert world.plane.next_deadline(world.now) == 50.0
    hint(world, Retain(keys(3), 5000.0, "a"))
    assert world.plane.next_deadline(world.now) == 100.0
    world.now = 99.0
    assert world.plane.control.cpu.retained.used_bytes == 3 * ROW_BYTES
    world.pass_time(1.0)
    assert world.plane.control.cpu.retained.used_bytes == 0
    assert world.plane.next_deadline(world.now) is None


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_seconds_that_are_none_are_an_error_of_the_caller(seconds):
    world = World(allowed(cpu_setup(8), 4), [])
    with pytest.raises(UsageError, match="seconds above 0"):
        world.plane.hint(Retain(keys(1), seconds), 0.0)


def test_sets_and_blocks_of_sets_are_bounded(monkeypatch):
    monkeypatch.setattr(retention, "CLAIMS_MAX", 3)
    world = World(allowed(cpu_setup(16), 12), [], limits=plane_settings(retained_sets=2))
    stored(world, 1, 2, 3, 4)
    assert hint(world, Retain(keys(1, 2), 60.0, "a")).ok
    assert hint(world, Retain(keys(1, 2), 60.0, "b")) == HintResult(1, refused(too_many=1))
    assert hint(world, Retain(keys(3), 60.0, "c")) == HintResult(0, refused(too_many=1))
    hint(world, Release("a"))
    assert hint(world, Retain(keys(3), 60.0, "c")).ok
    assert world.plane.hints.retention.num_sets == 2


def test_a_set_of_nothing_is_none():
    world = World(allowed(cpu_setup(16), 12), [], limits=plane_settings(retained_sets=1))
    assert hint(world, Retain(keys(7), 60.0, "a")) == HintResult(0, refused(not_found=1))
    assert hint(world, Retain([], 60.0, "b")) == HintResult()
    assert world.plane.hints.retention.num_sets == 0


def test_a_large_set_becomes_ordinary_in_steps(monkeypatch):
    monkeypatch.setattr(retention, "RELEASED_AT_ONCE", 3)
    world = World(allowed(cpu_setup(16), 12), [])
    stored(world, *range(1, 9))
    hint(world, Retain(keys(*range(1, 9)), 60.0, "a"))
    assert world.plane.hint(Release("a"), world.now) == HintResult(8)
    left = []
    while world.plane.hints.retention:
        left.append(len(world.plane.control.cpu.retained.keys))
        world.now = world.plane.next_deadline(world.now)
        world.step()
        world.check()
    assert left == [5, 2]
    assert list(world.plane.control.cpu.policy.coldest())[-1] == world.plane.control.cpu.ready(key(1)), "root last"


def test_what_a_session_retains_after_a_release_does_not_keep_what_was_released(monkeypatch):
    monkeypatch.setattr(retention, "RELEASED_AT_ONCE", 3)
    world = World(allowed(cpu_setup(16), 12), [])
    stored(world, *range(1, 10))
    hint(world, Retain(keys(*range(1, 9)), 60.0, "a"))
    assert world.plane.hint(Release("a"), world.now) == HintResult(8)
    assert world.plane.hint(Retain(keys(1, 9), 60.0, "a"), world.now) == HintResult(2)
    for _ in range(4):
        world.pass_time(1.0)
        world.check()
    assert set(world.plane.control.cpu.retained.keys) == set(keys(1, 9))
    assert world.plane.hints.retention.num_sets == 1
    assert world.plane.hint(Release("a"), world.now) == HintResult(2)
    world.step()
    assert not world.plane.hints.retention


def test_a_block_that_is_stored_again_after_it_was_lost_is_retained_again():
    world = World(allowed(cpu_setup(8), 4), [allowed(fs_setup(16), 4)])
    stored(world, 1)
    hint(world, Retain(keys(1), 60.0))
    flood(world, 8)
    job = world.load(1)
    world.end(world.under_way(1, JobKind.LOAD)[0], CORRUPT)
    world.run_all()
    assert world.statuses(job) == ["missing"]
    assert held(world, 1) == [None]
    stored(world, 1)
    flood(world, 32)
    assert held(world, 1) == ["fs"]


def test_a_row_that_is_retained_while_it_is_filled_is_kept_when_it_is_ready():
    world = World(allowed(cpu_setup(8), 4), [])
    world.store(1, 2)
    assert hint(world, Retain(keys(1, 2), 60.0)).ok
    world.run_all()
    flood(world, 16)
    assert held(world, 1, 2) == ["cpu"] * 2


def test_after_a_reset_nothing_is_retained():
    world = World(allowed(cpu_setup(8), 4), [allowed(fs_setup(16), 4)])
    stored(world, 1, 2)
    hint(world, Retain(keys(1, 2), 60.0))
    hint(world, Pin(keys(1), 60.0))
    world.plane.reset(world.now)
    world.check()
    stored(world, 1, 2)
    flood(world, 64)
    assert held(world, 1, 2) == [None] * 2


def test_when_lower_tiers_are_held_back_what_is_in_rows_stays_retained_and_the_rest_is_let_go():
    world = World(allowed(cpu_setup(8), 4), [allowed(fs_setup(64), 32)])
    stored(world, 1, 2)
    flood(world, 8)
    stored(world, 3, 4)
    assert hint(world, Retain(keys(1, 2, 3, 4), 60.0)).ok
    world.plane.hold_back(world.now)
    world.check()
    flood(world, 32)
    assert held(world, 1, 2, 3, 4) == [None, None, "cpu", "cpu"]


# -- pinning


def test_what_is_pinned_stays_in_the_cpu_tier_also_what_was_below():
    world = World(allowed(cpu_setup(16), 4), [fs_setup(64)])
    stored(world, 1, 2)
    flood(world, 16)
    stored(world, 3, 4)
    assert held(world, 1, 2, 3, 4) == ["fs", "fs", "cpu", "cpu"]
    assert hint(world, Pin(keys(1, 2, 3, 4, 5), 60.0, "a")) == HintResult(4, refused(not_found=1))
    world.run_all()
    flood(world, 64)
    assert held(world, 1, 2, 3, 4) == ["cpu"] * 4
    assert hint(world, Demote(keys(1))) == HintResult(0, refused(in_use=1))
    world.pass_time(61.0)
    flood(world, 64)
    assert "cpu" not in held(world, 1, 2, 3, 4)


def test_a_pinned_block_is_retained_below_once_it_is_not_pinned_any_more():
    world = World(allowed(cpu_setup(16), 4), [allowed(fs_setup(64), 4)])
    stored(world, 1, 2)
    hint(world, Retain(keys(1, 2), 600.0, "a"))
    hint(world, Pin(keys(1, 2), 60.0, "a"))
    cpu, fs = world.plane.control.cpu, world.plane.control.lowers[0].owned
    assert (len(cpu.retained.keys), len(fs.retained.keys)) == (2, 0)
    world.pass_time(61.0)
    world.check()
    assert (len(cpu.retained.keys), len(fs.retained.keys)) == (0, 2)
    flood(world, 256)
    assert held(world, 1, 2) == ["fs"] * 2


# -- prefetching


def below(rows: int = 32, blocks: int = 8, **more: object) -> World:
    """A world with keys 1 to `blocks` in its lower tier alone."""
    world = World(allowed(cpu_setup(rows), rows // 2), [allowed(fs_setup(256, **more), 128)])
    stored(world, *range(1, blocks + 1))
    flood(world, rows)
    assert held(world, *range(1, blocks + 1)) == ["fs"] * blocks
    return world


def test_what_is_prefetched_is_a_hit_of_the_cpu_tier_and_counted_as_used():
    world = below()
    assert hint(world, Prefetch(keys(*range(1, 9)))) == HintResult(8)
    assert not world.plane.idle
    world.run_all()
    assert world.plane.idle
    assert held(world, *range(1, 9)) == ["cpu"] * 8
    hits = world.plane.control.counters(0).hits
    world.load(*range(1, 7))
    world.run_all()
    assert world.plane.control.counters(0).hits == hits + 6
    told = world.plane.hints.prefetches
    assert (told.brought, told.used, told.unused) == (8, 6, 0)
    flood(world, 64)
    assert (told.brought, told.used, told.unused) == (8, 6, 2)


def test_what_a_session_retains_is_brought_up_and_down_by_its_name():
    world = below()
    hint(world, Retain(keys(3, 4, 5), 60.0, "agent"))
    assert hint(world, Prefetch(session="agent")) == HintResult(3)
    world.run_all()
    assert held(world, 2, 3, 4, 5) == ["fs", "cpu", "cpu", "cpu"]
    assert hint(world, Demote(session="agent")) == HintResult(3)
    assert held(world, 3, 4, 5) == ["fs"] * 3
    assert hint(world, Prefetch(session="nobody")) == HintResult()


def test_a_prefetch_waits_for_loads_and_takes_few_places_of_a_tier(monkeypatch):
    monkeypatch.setattr(prefetches, "IN_FLIGHT_MAX", 2)
    world = below(rows=64, blocks=24)
    world.load(*range(17, 25))  # eight of sixteen rows that may be on their way
    assert hint(world, Prefetch(keys(*range(1, 17)))).ok
    assert sum(map(len, map(world.numbers, world.under_way(1, JobKind.LOAD)))) == 10
    job = world.load(*range(100, 101), *range(9, 17))  # more than fits: some wait, and no prefetch goes on meanwhile
    before = world.plane.hints.prefetches.filling
    assert before == 2
    world.run_all()
    assert "cancelled" not in world.statuses(job)
    assert held(world, *range(1, 17)) == ["cpu"] * 16
    world.check()


def test_prefetched_blocks_that_nobody_loads_take_a_quarter_of_the_rows_at_most():
    world = below(rows=32, blocks=24)
    assert hint(world, Prefetch(keys(*range(1, 25)))).ok
    world.run_all()
    told = world.plane.hints.prefetches
    assert (told.brought, told.waiting) == (8, 16)
    world.load(1, 2, 3)
    world.run_all()
    assert (told.brought, told.used) == (11, 3)
    world.now = world.plane.next_deadline(world.now)
    assert world.now == prefetches.WAIT_SECONDS
    world.step()
    assert (told.waiting, told.late) == (0, 13)
    world.now = world.plane.next_deadline(world.now)
    assert world.now == prefetches.FRESH_SECONDS
    world.step()
    assert told.unused == 8
    assert world.plane.next_deadline(world.now) is None


def test_blocks_that_wait_to_be_brought_up_are_bounded():
    world = World(cpu_setup(8), [fs_setup(64)], limits=plane_settings(prefetch_blocks=5))
    for start in (1, 5, 1000, 1004):
        stored(world, *range(start, start + 4))
    assert hint(world, Prefetch(keys(1, 2, 3, 1004))) == HintResult(4)
    assert hint(world, Prefetch(keys(3, 4, 5, 6))) == HintResult(3, refused(queue_full=1))  # 3 waits already


def test_what_no_tier_has_is_missing_and_what_a_tier_cannot_load_is_given_up():
    world = below()
    hint(world, Prefetch(keys(7, 8, 77)))
    (job,) = world.under_way(1, JobKind.LOAD)
    world.finish(job, "failed")
    world.run_all()
    told = world.plane.hints.prefetches
    assert (told.brought, told.missing, told.waiting) == (0, 3, 0)
    assert world.plane.idle


def test_a_shared_tier_is_asked_for_what_is_prefetched():
    world = World(cpu_setup(16), [shared_setup(hint_seconds=1e6)])
    stored(world, 1, 2, 3)
    flood(world, 32)
    assert hint(world, Prefetch(keys(1, 2, 3))).ok
    world.run_all()
    assert held(world, 1, 2, 3) == ["cpu"] * 3


def test_what_is_on_its_way_at_a_reset_is_forgotten():
    world = below()
    hint(world, Prefetch(keys(1, 2, 3, 4)))
    world.plane.reset(world.now)
    world.run_all()
    world.check()
    told = world.plane.hints.prefetches
    assert (told.brought, told.waiting, told.filling) == (0, 0, 0)


# -- demoting


@pytest.mark.parametrize("write_policy", ["write_through", "on_evict"])
@pytest.mark.parametrize("admit", ["always", "second_use"])
def test_what_is_demoted_is_written_and_gives_up_its_rows(write_policy, admit):
    world = World(cpu_setup(32), [fs_setup(64, write_policy=write_policy, admit=admit)])
    stored(world, *range(1, 9))
    assert hint(world, Demote(keys(*range(1, 9), 99))) == HintResult(8, refused(not_found=1))
    world.run_all()
    assert held(world, *range(1, 9)) == ["fs"] * 8
    assert world.plane.control.cpu.table.counts[1] == 32, "every row is free"
    assert world.plane.hints.demotions.freed == 8


def test_a_block_keeps_its_row_if_no_lower_tier_takes_it():
    world = World(cpu_setup(32), [])
    stored(world, 1)
    assert hint(world, Demote(keys(1))) == HintResult(0, refused(no_tier=1))
    world = World(cpu_setup(32), [fs_setup(64, write_policy="on_evict")])
    stored(world, 1, 2)
    assert hint(world, Demote(keys(1, 2))).ok
    world.finish(world.under_way(1, JobKind.STORE)[0], "failed")
    world.run_all()
    assert held(world, 1, 2) == ["cpu"] * 2
    assert (world.plane.hints.demotions.freed, world.plane.hints.demotions.kept) == (0, 2)


def test_a_block_that_is_loaded_before_it_is_written_keeps_its_row():
    world = World(cpu_setup(32), [fs_setup(64, write_policy="on_evict")])
    stored(world, 1, 2)
    hint(world, Demote(keys(1, 2)))
    world.load(1)
    world.run_all()
    assert held(world, 1, 2) == ["cpu", "fs"]


def test_a_retained_block_that_is_demoted_is_retained_below():
    world = World(allowed(cpu_setup(16), 4), [allowed(fs_setup(16, write_policy="on_evict"), 4)])
    stored(world, 1, 2)
    world.plane.hint(Retain(keys(1, 2), 60.0, "a"), world.now)
    hint(world, Demote(session="a"))
    world.run_all()
    assert held(world, 1, 2) == ["fs"] * 2
    flood(world, 64)
    assert held(world, 1, 2) == ["fs"] * 2


# -- closing


def test_a_closing_stack_follows_no_hint_and_drains():
    world = below()
    hint(world, Prefetch(keys(*range(1, 9))))
    world.plane.close(world.now)
    assert hint(world, Retain(keys(1), 60.0)) == HintResult(0, refused(stopped=1))
    world.run_all()
    assert world.plane.idle


def test_a_closing_stack_does_not_prefetch_from_elsewhere_what_one_tier_could_not_load():
    world = World(cpu_setup(16), [fs_setup(64), shared_setup()])
    stored(world, *range(1, 5))
    flood(world, 16)
    hint(world, Prefetch(keys(1)))
    (job,) = world.under_way(1, JobKind.LOAD)
    world.plane.close(world.now)
    world.finish(job, "failed")
    assert not world.running
    assert world.plane.hints.prefetches.waiting == 0
    assert world.plane.idle


def test_leases_and_retained_rows_do_not_starve_a_reservation_that_wants_them_all():
    world = World(allowed(cpu_setup(8), 6), [allowed(fs_setup(64), 0)])
    for start in (1, 5, 9):
        stored(world, *range(start, start + 4))
    hint(world, Retain(keys(*range(7, 13)), 60.0))
    reservation = world.plane.reserve(RequestId("r"), keys(*range(1, 7)), world.now)
    for _ in range(20):
        world.run_all()
        world.step()
    assert reservation.served
    assert sum(reservation.hits()) == 2
