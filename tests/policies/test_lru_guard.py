"""Which order `reuse` follows: what it learned, or LRU's once that would hit more."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support_adverse_traces import TRACES

from benchmarks.policies import OneTier
from kvtier.policy.reuse.lru_guard import SAMPLE_MAX, USES_KEPT, LRUGuard
from kvtier.policy.reuse.policy import Reuse
from kvtier.policy.reuse.prediction.classes import class_of
from kvtier.policy.reuse.prediction.model import ReuseModel
from kvtier.policy.reuse.prediction.segments import NONE, Segments
from kvtier.types.keys import make_key

SHORT, LONG = class_of(1, -1.0, 1), class_of(1, -1.0, 4)


def learned_model() -> ReuseModel:
    """Short prompts come back after a minute or two, long ones never."""
    model = ReuseModel()
    model.advance(0.0)
    for kind, counts in ((SHORT, model.tables.ended), (LONG, model.tables.cut)):
        for bucket in (12, 13, 14):
            counts[kind * len(model.tables.values[0]) + bucket] += 2000.0
    model.tables.recompute(np.zeros(len(model.tables.ended)))
    return model


def segments_of(model: ReuseModel, count: int, blocks: int) -> Segments:
    """Segments in turns short and long, used one after the other within 400 s."""
    segments = Segments(count + 1, count * blocks)
    for number in range(count):
        keys = [make_key(f"{number}:{i}".encode().ljust(32, b"."), 0) for i in range(blocks)]
        seg = segments.add(NONE, 0, keys)
        segments.kind[seg] = (SHORT, LONG)[number % 2]
        segments.touched[seg] = 400.0 * number / count
    model.now = 400.0
    return segments


def reviewed(guard: LRUGuard, num_slots: int) -> bool:
    """A review; True if the order is another one now."""
    return guard.on_request(num_slots, num_slots)


def turns_until_it_changes(guard: LRUGuard, num_slots: int, kind: int, gap: float) -> int:
    """Reviews until the order is another one, after some requests each that use a segment of this class and age."""
    before = guard.follows_model
    for turn in range(1, 41):
        for _ in range(max(16, num_slots // 200)):
            guard.on_use([(kind, gap, 4, 4 if kind == SHORT else 0)])
            guard.on_request(4, 0)
        guard.on_request(num_slots // 8, num_slots)
        if guard.follows_model is not before:
            return turn
    raise AssertionError("what comes back changes nothing")


@pytest.mark.parametrize("count", [400, 3 * SAMPLE_MAX])
def test_the_learned_order_is_followed_while_it_leads(count: int) -> None:
    """A tier of half of all blocks: in the learned order it has every short prompt, in LRU's those of late."""
    model = learned_model()
    segments = segments_of(model, count, 4)
    num_slots = 2 * count
    guard = LRUGuard(num_slots, segments, model)
    assert not reviewed(guard, num_slots), "nothing was judged yet"
    assert not guard.follows_model
    assert turns_until_it_changes(guard, num_slots, SHORT, 300.0) <= 3
    assert turns_until_it_changes(guard, num_slots, LONG, 100.0) <= 4
    assert turns_until_it_changes(guard, num_slots, SHORT, 300.0) <= 6


def test_what_may_be_chance_is_not_followed() -> None:
    """Six requests in which it leads are 2.4 standard deviations; the seventh makes it 2.6."""
    model = learned_model()
    guard = LRUGuard(800, segments_of(model, 400, 4), model)
    reviewed(guard, 800)
    for number in range(7):
        assert not guard.follows_model, number
        guard.on_use([(SHORT, 300.0, 4, 0)])
        guard._asked = 0  # so that none of them counts less
        guard.on_request(0, 100)
    assert guard.follows_model


@pytest.mark.parametrize(("asked", "followed"), [(10_000, True), (20_000, False)])
def test_a_gain_of_few_hits_is_not_followed(asked: int, followed: bool) -> None:
    """Ten requests in which it leads by four blocks: 40 hits in 10,000 blocks asked for, or in 20,000."""
    model = learned_model()
    guard = LRUGuard(800, segments_of(model, 400, 4), model)
    reviewed(guard, 800)
    guard._weight = asked
    for _ in range(10):
        guard.on_use([(SHORT, 300.0, 4, 0)])
        guard.on_request(0, 0)
    guard._asked = 0
    guard.on_request(0, 100)
    assert guard.follows_model is followed


def test_while_it_is_followed_it_is_judged_by_what_the_tier_has() -> None:
    """Prompts that the learned order should have are not there: as LRU's own would be, it leads by them no more."""
    model = learned_model()
    model.is_followed = True
    guard = LRUGuard(800, segments_of(model, 400, 4), model)
    reviewed(guard, 800)
    for held in (4, 0):
        guard.on_use([(SHORT, 100.0, 4, held)])
        guard.on_request(4, 0)
        reviewed(guard, 800)
        assert guard.follows_model == (held == 4)


def test_a_lead_of_long_ago_counts_less() -> None:
    """Ten requests in which LRU leads outweigh a hundred of the other kind before them."""
    model = learned_model()
    guard = LRUGuard(800, segments_of(model, 400, 4), model)
    reviewed(guard, 800)
    for _ in range(100):
        guard.on_use([(SHORT, 300.0, 4, 0)])
        guard.on_request(0, 0)
    reviewed(guard, 800)
    assert guard.follows_model
    for _ in range(16):
        reviewed(guard, 800)
    for _ in range(10):
        guard.on_use([(LONG, 100.0, 4, 0)])
        guard.on_request(0, 0)
    reviewed(guard, 800)
    assert not guard.follows_model


@pytest.mark.parametrize("followed", [False, True])
def test_tables_that_outlived_a_restart_are_followed_if_they_were(followed: bool) -> None:
    before, model = learned_model(), ReuseModel()
    before.is_followed = followed
    model.restore(before.save())
    guard = LRUGuard(800, segments_of(model, 400, 4), model)
    assert reviewed(guard, 800) == followed
    reviewed(guard, 800)
    assert guard.follows_model == followed, "nothing speaks for another one"
    assert turns_until_it_changes(guard, 800, LONG if followed else SHORT, 100.0 if followed else 300.0) <= 3


def test_the_largest_tier_says_which_order_is_followed_after_a_restart() -> None:
    model = learned_model()
    small, large = (segments_of(model, count, 4) for count in (40, 400))
    for segments in (small, large):
        model.teach(segments)
    choices = [LRUGuard(2 * segments.used, segments, model) for segments in (small, large)]
    for guard in choices:
        reviewed(guard, 1600)
        assert turns_until_it_changes(guard, 1600, SHORT, 300.0) <= 4
        assert model.is_followed == (guard is choices[1])


def test_uses_that_no_request_tells_of_are_kept_within_a_bound() -> None:
    model = ReuseModel()
    guard = LRUGuard(10, segments_of(model, 4, 1), model)
    for _ in range(2 * USES_KEPT):
        guard.on_use([(SHORT, 1.0, 1, 0)])
    assert len(guard._uses) == USES_KEPT


def test_in_lrus_order_what_goes_is_what_lru_would_take() -> None:
    """Whole prompts of one length, so that both evict the same leaves."""
    rng = random.Random(5)
    prompts = [TRACES["never_again"](seed, 1)[0] for seed in range(60)]
    tiers = {name: OneTier(name, 400) for name in ("lru", "reuse")}
    hits = dict.fromkeys(tiers, 0)
    for number in range(1500):
        request = rng.choice(prompts)
        for name, tier in tiers.items():
            if name == "reuse":
                assert isinstance(tier.policy, Reuse)
                tier.policy._order.guard.follows_model = False
            hits[name] += tier.serve(number, request)
    print(hits)
    assert abs(hits["lru"] - hits["reuse"]) <= hits["lru"] // 100
