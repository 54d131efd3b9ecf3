"""Prefix probing: how few keys of a prompt a tier is asked for, and what is found by that."""

from __future__ import annotations

import random

import pytest
from support_control import World, cpu_setup, fs_setup, key, shared_setup

from kvtier.tier.contract import LookupResult
from kvtier.types.keys import GroupIndex, OffloadKey

HIT, PENDING, RETRY, MISS = LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.RETRY, LookupResult.MISS
BLOCKS = 512
KEYS_MAX = 11


class Probing(World):
    """A tier of which group 0 is probed. `asked` are the keys it was asked for, one list for each question."""

    def __init__(self, remote=(), rows: int = 8, above=(), **more: object) -> None:
        setup = shared_setup(hint_seconds=5.0, lookup_timeout_seconds=1.0, probed_groups=frozenset([GroupIndex(0)]))
        super().__init__(cpu_setup(rows, groups=2), [*above, setup])
        self.silent = True
        self.remote = {key(n): (key(n), 0) for n in remote}
        self.asked: list[list[OffloadKey]] = []

    def look(self, keys: list[OffloadKey]) -> list[LookupResult]:
        found = self.plane.lookup(keys, self.now)
        self.collect()
        return found

    def answer(self, *results: LookupResult) -> None:
        """Answer what was asked, with these results or the truth."""
        for question in self.unanswered:
            self.asked.append(list(question.keys))
            truth = [HIT if k in self.remote else MISS for k in question.keys]
            self.plane.answer(question, results or truth, self.now)
        self.unanswered.clear()

    def found(self, count: int = BLOCKS, group: int = 0) -> int:
        """The leading run of hits of a prompt once all is known. Nothing is asked after that."""
        keys = [key(n, group) for n in range(count)]
        while RETRY in (results := self.look(keys)):
            assert self.unanswered, "a key that is not asked for must not be waited for"
            self.answer()
        assert not self.unanswered
        return results.index(MISS) if MISS in results else count

    @property
    def num_asked(self) -> int:
        return sum(map(len, self.asked))


@pytest.mark.parametrize("part", range(9))
def test_any_leading_run_is_found_with_few_keys(part):
    for length in range(part, BLOCKS + 1, 9):
        world = Probing(range(length))
        assert world.found() == length
        assert world.num_asked <= KEYS_MAX
        assert len(world.asked) <= 9, "questions one after another"
        world.asked.clear()
        assert world.found() == length
        assert not world.asked, "it is believed for a while"


def test_nothing_takes_one_question():
    world = Probing()
    world.found()
    assert [len(keys) for keys in world.asked] == [3]


def test_a_prompt_of_100_blocks_takes_8_keys_and_6_questions_on_average():
    worlds = [Probing(range(length)) for length in range(101)]
    for world in worlds:
        world.found(100)
    assert sum(world.num_asked for world in worlds) / len(worlds) < 8.5
    assert sum(len(world.asked) for world in worlds) / len(worlds) < 6.5
    assert max(world.num_asked for world in worlds) == 9


@pytest.mark.parametrize("count", [1, 2, 3, 15, 16, 17, 255, 256, 257, 1000])
def test_prompts_of_any_length_are_found(count):
    for length in {0, 1, 2, count // 2, count - 1, count}:
        world = Probing(range(min(length, count)))
        assert world.found(count) == min(length, count)


def test_a_prompt_that_grew_is_looked_up_from_where_the_last_one_ended():
    world = Probing(range(300))
    assert world.found(200) == 200
    world.asked.clear()
    assert world.found(310) == 300
    assert min(world.asked[0]) == key(200)


def test_a_wrong_belief_is_missing_at_its_load_and_shortens_the_next_hit():
    world = Probing([n for n in range(64) if n != 40], rows=80)
    assert world.found(64) == 64, "the last one is there"
    job = world.load(*range(64))
    world.run_all()
    statuses = world.statuses(job)
    assert statuses == ["missing" if n == 40 else "loaded" for n in range(64)]
    assert world.plane.locate([key(40)], world.now) == [None]


def test_with_holes_the_next_hit_is_never_more_than_what_was_loaded():
    for seed in range(40):
        rng = random.Random(seed)
        world = Probing([n for n in range(100) if rng.random() < rng.choice([0.5, 0.9, 0.99])], rows=1)
        true = next((n for n in range(100) if key(n) not in world.remote), 100)
        for _ in range(100):
            hit = world.found(100)
            if hit <= true:
                break
            job = world.load(*range(hit))
            world.run_all()
            loaded = [status == "loaded" for status in world.statuses(job)]
            assert loaded == [key(n) in world.remote for n in range(hit)], "right bytes or a miss"
        assert hit <= true, f"seed {seed}: {hit} blocks are still believed of {true}"
        world.check()


def test_what_tiers_above_hold_is_not_asked_for():
    world = Probing(range(6), rows=4, above=[fs_setup(16)])
    world.store(0, 1)
    world.run_all()
    world.store(10, 11, 12, 13)
    world.run_all()
    world.plane.control.lowers[1].index.reset()
    assert world.plane.locate([key(0), key(1)], world.now) == ["fs", "fs"]
    assert world.found(8) == 6
    assert {k for keys in world.asked for k in keys}.isdisjoint([key(0), key(1)])


def test_groups_that_keep_a_window_are_asked_for_key_by_key():
    world = Probing()
    world.remote = {key(n, 1): (key(n, 1), 0) for n in (0, 7)}
    keys = [key(n, 1) for n in range(8)]
    world.look(keys)
    world.answer()
    assert world.look(keys) == [PENDING, *[MISS] * 6, PENDING]
    assert world.asked == [keys]


def test_a_tier_that_does_not_answer_makes_misses_within_the_time_of_one_lookup():
    world = Probing(range(100))
    keys = [key(n) for n in range(100)]
    assert world.look(keys) == [RETRY] * 100
    world.now = 1.0
    assert world.look(keys) == [MISS] * 100
    assert len(world.unanswered) == 1


def test_all_waves_together_have_the_time_of_one_lookup():
    world = Probing(range(100))
    keys = [key(n) for n in range(BLOCKS)]
    world.look(keys)
    world.now = 0.9
    world.answer()
    assert world.look(keys) == [PENDING] * 65 + [RETRY] * 191 + [MISS] * 256
    world.now = 1.0
    assert world.look(keys) == [PENDING] * 65 + [MISS] * 447


def test_a_request_that_was_given_up_takes_no_time_from_a_later_one():
    world = Probing(range(100))
    keys = [key(n) for n in range(BLOCKS)]
    world.look(keys)
    world.answer()
    world.now = 100.0
    assert world.found() == 100


def test_a_tier_that_says_retry_is_asked_again_but_not_for_ever():
    world = Probing(range(8))
    keys = [key(n) for n in range(8)]
    rounds = 0
    while RETRY in world.look(keys):
        world.answer(*[RETRY] * len(world.unanswered[0].keys))
        world.now += 0.1
        rounds += 1
    assert rounds == 5
    assert world.look(keys) == [MISS] * 8


def test_what_is_believed_ends_with_what_it_was_concluded_from():
    world = Probing(range(64))
    assert world.found(64) == 64
    index = world.plane.control.lowers[0].index
    del index._hints[key(10)]
    world.now = 4.0
    assert world.found(64) == 64
    assert index.presence(key(10), world.now) is True
    world.now = 5.0
    assert index.presence(key(10), world.now) is None
    world.asked.clear()
    assert world.found(64) == 64
    assert world.asked, "no belief outlives the answer it rests on"


def test_a_reset_forgets_it_all():
    world = Probing(range(64))
    world.found(64)
    world.plane.reset(world.now)
    world.remote.clear()
    assert world.found(64) == 0


def test_groups_that_keep_a_window_are_asked_for_a_bounded_number_of_keys_at_a_time():
    world = Probing(range(3000), rows=8)
    world.remote = {key(n, 1): (key(n, 1), 0) for n in range(3000)}
    keys = [key(n, 1) for n in range(3000)]
    rounds = 0
    while RETRY in world.look(keys):
        assert sum(len(question.keys) for question in world.unanswered) <= 1024
        world.answer()
        rounds += 1
    assert rounds == 3
    assert world.look(keys) == [PENDING] * 3000


def test_a_search_takes_up_what_a_shorter_prompt_has_found_meanwhile():
    world = Probing(range(400))
    long, short = [key(n) for n in range(BLOCKS)], [key(n) for n in range(300)]
    world.look(long)
    assert world.found(300) == 300
    assert world.look(short) == [PENDING] * 300
    assert world.found(BLOCKS) == 400
    assert world.num_asked <= 2 * KEYS_MAX


def test_searches_that_are_kept_are_bounded(monkeypatch):
    from kvtier.control.tiers import prefix_probe

    monkeypatch.setattr(prefix_probe, "SEARCHES_MAX", 3)
    world = Probing(range(8))
    for start in range(10):
        world.look([key(n) for n in range(start * 1000, start * 1000 + 8)])
    index = world.plane.control.lowers[0].index
    assert len(index._searches) == 3
    assert index._searched_keys == 24
