"""What `policy: reuse` learns of returns, and that it is kept: hit rates, saved tables, several tiers of one model."""

from __future__ import annotations

import random
from heapq import heappop, heappush

import pytest
from support_reuse import Tier, chat

from kvtier.policy import RequestModels
from kvtier.policy.reuse.prediction.model import ReuseModel
from kvtier.types.keys import GroupIndex, OffloadKey, RequestId
from kvtier.types.requests import RequestUse


def rates(tier: Tier, seed: int) -> tuple[float, float]:
    """Hit rates of prompts that come back after a minute, and never, among each other, in the second half."""
    rng, due, time = random.Random(seed), list[tuple[float, list[OffloadKey]]](), 0.0
    hits = asked = 0
    for number in range(1500):
        time += 2.0
        while due and due[0][0] <= time:
            at, keys = due.pop(0)
            found = tier.serve(keys, at)
            hits, asked = (hits + found, asked + len(keys)) if number > 700 else (0, 0)
        stays = rng.random() < 0.3
        keys = chat(number, 5 if stays else 20)
        tier.serve(keys, time)
        if stays:
            due.append((time + 90.0, keys))
    return hits, asked


def test_new_blocks_are_compared_with_what_is_not_pinned(seed: int) -> None:
    """Long prompts never come back, short ones do. A new long one goes where one of its kind ends, and nowhere else."""
    learned = Tier(400)
    rates(learned, seed)
    tier, now = Tier(30, learned.models), 10_000.0
    once, new = chat(-1, 20), chat(-2, 20)
    for keys in (once, chat(-3, 5), chat(-4, 5)):
        tier.serve(keys, now)
    tier.begin(new, now)
    end = tier.slots[once[-1]]
    for pinned in (0, 1, 0):
        tier.pins[end] = pinned
        assert len(tier.policy.bypass(new[:4], 4, tier.pins)) == 4 * pinned
        tier.check()
    assert tier.policy.evict(1, tier.pins) == [end]


def chats(named: bool) -> float:
    """The share of blocks that are hits in chats of up to 12 turns, 4 blocks of input and 8 of output each."""
    rng, tier, due, time = random.Random(1), Tier(600), list[tuple[float, int, int, int]](), 0.0
    for session in range(700):
        time += rng.expovariate(1 / 3)
        heappush(due, (time, session, 0, 1 if rng.random() < 0.6 else rng.randrange(2, 12)))
    hits = asked = 0
    while due:
        time, session, turn, turns = heappop(due)
        keys = chat(session, 12 * turn + 16 + 8)
        hits += tier.begin(keys[:-8], time)
        asked += len(keys) - 8
        tier.store(keys[:-8])
        for key in keys[-8:]:
            if named:
                tier.extend([key])
            tier.store([key])
        tier.end(128)
        if turn + 1 < turns:
            heappush(due, (time + rng.lognormvariate(4.5, 0.7), session, turn + 1, turns))
    return hits / asked


def test_the_output_of_chats_is_kept_better_when_its_blocks_are_named() -> None:
    assert chats(named=True) > 1.03 * chats(named=False)


def test_it_keeps_the_prompts_that_come_back() -> None:
    """LRU, whose order it starts with, holds 300 blocks for about 40 s here: it hits nothing."""
    hits, asked = rates(Tier(300), seed=3)
    assert hits > 0.8 * asked


def test_a_restored_model_decides_at_once_as_the_saved_one_did() -> None:
    tier = Tier(300)
    rates(tier, seed=3)
    models = RequestModels()
    models.of(ReuseModel).restore(tier.model.save())
    assert models.of(ReuseModel).describe()
    assert models.of(ReuseModel).save()
    long, short = chat(9000, 20), chat(9001, 5)
    fresh, blank = Tier(20, models), Tier(20)
    for each in (fresh, blank):
        each.serve(short, 0.0)
        each.serve(long, 1.0)
    assert short[4] in fresh.slots
    assert short[4] not in blank.slots


@pytest.mark.parametrize("saved", [b"", b"kvtier reuse 3\n", b"kvtier reuse 3\n\x01rubbish", b"kvtier reuse 2\n"])
def test_broken_tables_are_refused(saved: bytes) -> None:
    with pytest.raises(ValueError):
        ReuseModel().restore(saved)


def test_tables_of_a_release_that_was_in_lrus_order_are_read() -> None:
    tier, model = Tier(300), ReuseModel()
    rates(tier, seed=3)
    saved = tier.model.save()
    assert saved.startswith(b"kvtier reuse 3\n\x01")
    model.restore(saved.replace(b"3\n\x01", b"3\n\x00", 1))
    assert model.save() == saved


def test_the_same_calls_end_in_the_same_state() -> None:
    first, second = Tier(100), Tier(100)
    rates(first, seed=5)
    rates(second, seed=5)
    assert first.model.save() == second.model.save()
    assert list(first.policy.coldest()) == list(second.policy.coldest())


def test_a_tier_that_is_held_back_leaves_the_tables_to_a_smaller_one() -> None:
    models = RequestModels()
    small, large = Tier(8, models), Tier(64, models)
    keys = chat(0, 4)

    def returns() -> float:
        return sum(small.model.tables.ended)

    def serve(time: float, tiers: list[Tier]) -> None:
        tiers[0].begin(keys, time)
        for tier in tiers[1:]:
            slots = [tier.slots.get(key, -1) for key in keys]
            tier.policy.begin_request(RequestUse(RequestId("1"), time, keys, GroupIndex(0), 0), slots)
        for tier in tiers:
            tier.store(keys)

    for time in (1.0, 2.0, 3.0):
        serve(time, [small, large])
    before = returns()
    for time in (4.0, 5.0, 6.0, 7.0):
        serve(time, [small])
    assert returns() > before > 0
