"""A shared tier: its backend and other hosts decide what is there; the plane asks, believes for a while, and learns."""

from __future__ import annotations

import pytest
from support_control import World, cpu_setup, fs_setup, key, shared_setup

from kvtier.control.tiers.breaker import BreakerState
from kvtier.control.tiers.placement import PAUSE_SECONDS
from kvtier.control.tiers.shared_tier import SharedTier
from kvtier.tier.contract import LookupResult
from kvtier.types.jobs import PRESENT, DropReason, JobKind, dropped

STORE, LOAD = JobKind.STORE, JobKind.LOAD
HIT, PENDING, RETRY, MISS = LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.RETRY, LookupResult.MISS


def shared_world(rows: int = 4, remote: tuple[int, ...] = (), **more: object) -> World:
    world = World(cpu_setup(rows), [shared_setup(hint_seconds=5.0, lookup_timeout_seconds=1.0, **more)])
    world.remote = {key(n): (key(n), 0) for n in remote}
    return world


def look(world: World, *numbers: int) -> list[LookupResult]:
    results = world.plane.lookup([key(n) for n in numbers], world.now)
    world.collect()
    return results


def test_an_unknown_key_is_retry_until_the_answer_has_come():
    world = shared_world(remote=(1,))
    world.silent = True
    assert look(world, 1, 2) == [RETRY, RETRY]
    assert look(world, 1, 2) == [RETRY, RETRY]
    (question,) = world.unanswered
    assert question.keys == (key(1), key(2)), "asked once"
    world.plane.answer(question, [HIT, MISS], world.now)
    assert look(world, 1, 2) == [PENDING, MISS]
    assert world.plane.locate([key(1), key(2)], world.now) == ["shared", None]


def test_a_question_that_is_not_answered_becomes_a_miss_at_its_deadline():
    world = shared_world()
    world.silent = True
    assert look(world, 1) == [RETRY]
    world.now = 0.99
    assert look(world, 1) == [RETRY]
    world.now = 1.0
    assert look(world, 1) == [MISS]
    world.now = 5.9
    assert look(world, 1) == [MISS], "for as long as a hint is believed"
    world.now = 6.0
    assert look(world, 1) == [RETRY], "then it is asked again"
    assert len(world.unanswered) == 2


def test_an_answer_that_comes_after_its_deadline_is_believed_all_the_same():
    world = shared_world()
    world.silent = True
    look(world, 1)
    world.now = 2.0
    assert look(world, 1) == [MISS]
    world.plane.answer(world.unanswered[0], [HIT], world.now)
    assert look(world, 1) == [PENDING]


def test_a_backend_that_says_retry_is_asked_again_but_not_for_ever():
    world = shared_world()
    world.silent = True
    rounds = 0
    while look(world, 1) == [RETRY]:
        rounds += 1
        assert rounds < 30, "an unknown key must become a miss"
        answer(world, RETRY)
        if rounds % 4 == 0:
            look(world, 100 + rounds)
            answer(world, MISS)
        world.now += 0.1
    assert 9 <= rounds <= 11
    assert look(world, 1) == [MISS]


def test_a_backend_that_answers_no_question_is_left_alone_for_a_while():
    """Else each request waits for its lookups until they are given up."""
    world = shared_world(remote=(9,))
    assert look(world, 9) == [RETRY]
    assert look(world, 9) == [PENDING]
    world.silent = True
    for n in range(5):
        assert look(world, n) == [RETRY]
        answer(world, RETRY)
    assert look(world, 5, 6, 9) == [MISS, MISS, PENDING], "what is known holds"
    assert not world.unanswered
    world.now = 4.9
    assert look(world, 6) == [MISS]
    world.now = 5.1
    assert look(world, 6) == [RETRY], "it is tried again"
    answer(world, RETRY)
    assert look(world, 6) == [MISS], "once"
    world.now = 10.2
    assert look(world, 10) == [RETRY]
    answer(world, MISS)
    for n in range(11, 15):
        assert look(world, n) == [RETRY], "an answer ends that"
        answer(world, RETRY)


def answer(world: World, result: LookupResult) -> None:
    """The backend's answer to the only question."""
    (question,) = world.unanswered
    world.unanswered.clear()
    world.plane.answer(question, [result] * len(question.keys), world.now)


@pytest.mark.parametrize("there", [True, False])
def test_hints_expire(there):
    world = shared_world(remote=(1,) if there else ())
    look(world, 1)
    assert look(world, 1) == [PENDING if there else MISS]
    world.now = 4.9
    world.remote = {} if there else {key(1): (key(1), 0)}
    assert look(world, 1) == [PENDING if there else MISS]
    world.now = 5.0
    assert look(world, 1) == [RETRY]
    assert look(world, 1) == [MISS if there else PENDING]


def test_missing_at_load_is_normal_and_teaches():
    world = shared_world(remote=(1, 2))
    look(world, 1, 2)
    del world.remote[key(1)]
    job = world.load(1, 2)
    world.run_all()
    assert world.statuses(job) == ["missing", "loaded"]
    assert look(world, 1) == [MISS]
    assert world.plane.control.lowers[0].load_breaker.state == "closed"


def test_a_load_tries_a_key_nobody_asked_about():
    world = shared_world(remote=(1,))
    job = world.load(1, 2)
    world.run_all()
    assert world.statuses(job) == ["loaded", "missing"]


def test_a_load_does_not_try_what_is_known_to_be_absent():
    world = shared_world()
    look(world, 1)
    job = world.load(1)
    assert not world.running
    assert world.statuses(job) == ["missing"]


def test_a_store_teaches_and_is_not_repeated_while_the_hint_lasts():
    world = shared_world(rows=1)
    world.store(1)
    world.run_all()
    assert look(world, 1) == [HIT]
    world.store(2)
    world.run_all()
    assert look(world, 1) == [PENDING]
    world.load(1)
    world.run_all()
    world.store(3)
    world.run_all()
    assert world.plane.control.counters(1).stored == 3


def test_a_drop_teaches_nothing_and_present_counts_as_there():
    world = shared_world(rows=8)
    world.store(1, 2)
    world.run_tier(0)
    (demotion,) = world.under_way(1, STORE)
    assert world.numbers(demotion) == [2, 1]
    world.end(demotion, dropped(DropReason.DISK_FULL), PRESENT)
    assert world.plane.control.lowers[0].index.presence(key(1), world.now) is True
    assert world.plane.control.lowers[0].index.presence(key(2), world.now) is None
    assert world.plane.control.counters(1).dropped == {DropReason.DISK_FULL: 1}


def test_jobs_of_a_shared_tier_name_no_slots():
    world = shared_world(remote=(5,))
    world.store(1)
    world.run_tier(0)
    world.load(5)
    for job in [*world.under_way(1, STORE), *world.under_way(1, LOAD)]:
        (group,) = world.running[job].job.groups
        assert len(group.slots) == len(group.generations) == 0
        assert len(group.rows) == 1
    world.run_all()


def test_an_owned_tier_answers_at_once_even_if_a_shared_one_has_to_be_asked():
    world = World(cpu_setup(2), [shared_setup(), fs_setup(16)])
    world.store(1, 2)
    world.run_all()
    world.store(3, 4)
    world.run_all()
    world.plane.control.lowers[0].index.reset()
    world.silent = True
    assert look(world, 1, 9) == [PENDING, RETRY]


def test_what_was_asked_before_a_reset_says_nothing_after_it():
    world = shared_world()
    world.silent = True
    look(world, 1)
    world.plane.reset(world.now)
    assert look(world, 1) == [RETRY]
    before, after = world.unanswered
    world.plane.answer(before, [HIT], world.now)
    assert look(world, 1) == [RETRY]
    world.plane.answer(after, [MISS], world.now)
    assert look(world, 1) == [MISS]


def test_hints_and_open_questions_are_bounded():
    shared = SharedTier("s", 10.0, 10.0, lookup_timeout_seconds=1.0, max_hints=100)
    for number in range(1000):
        shared.note_presence(key(number), True, 0.0)
        shared.request(key(2000 + number), 0.0)
        shared.take_queries()
    assert len(shared._hints) <= 100
    assert len(shared._asked) <= 100
    assert len(shared._open) <= 100
    assert shared.presence(key(999), 1.0) is True, "the newest are kept"
    assert shared.presence(key(2999), 0.5) is None
    assert shared.presence(key(2999), 1.0) is False


@pytest.mark.parametrize("status", ["corrupt", "missing"])
def test_what_a_load_refused_is_no_hit_any_more(status):
    """A damaged block that cannot be removed would else be found and refused by every request."""
    world = shared_world(remote=(1,))
    assert look(world, 1) == [RETRY]
    assert look(world, 1) == [PENDING]
    world.load(1)
    world.finish(*world.under_way(1, LOAD), status)
    assert look(world, 1) == [MISS]


def test_what_is_there_is_believed_longer_than_what_is_not():
    """Other hosts store all the time; what they stored must be found soon."""
    world = World(cpu_setup(4), [shared_setup(hit_hint_seconds=30.0, miss_hint_seconds=5.0)])
    world.remote = {key(1): (key(1), 0)}
    look(world, 1, 2)
    world.now = 4.9
    assert look(world, 1, 2) == [PENDING, MISS]
    world.now = 5.0
    assert look(world, 1, 2) == [PENDING, RETRY]
    world.now = 30.0
    assert look(world, 1) == [RETRY]


def test_a_full_server_is_left_alone_for_a_while():
    """Each block would be sent in vain. A full server is not a broken one: loads go on."""
    world = shared_world(rows=16)
    lower = world.plane.control.lowers[0]
    for number in range(8):
        world.store(number)
        world.run_tier(0)
        for job in world.under_way(1, STORE):
            world.end(job, dropped(DropReason.DISK_FULL))
    assert lower.room_breaker.opened == 1
    assert world.plane.control.counters(1).dropped == {DropReason.DISK_FULL: 8}
    assert lower.refusal is DropReason.DISK_FULL
    assert lower.may_load(world.now)
    world.pass_time(PAUSE_SECONDS)
    world.store(20)
    world.run_all()
    assert lower.room_breaker.state is BreakerState.CLOSED
    assert key(20) in world.remote
