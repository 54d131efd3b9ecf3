"""Which order `reuse` follows: what it learned, or LRU's once that would hit more."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support_adverse_traces import TRACES

from benchmarks.policies import OneTier
from kvtier.control.policies import Reuse
from kvtier.control.policies.order_choice import SAMPLE_MAX, USES_KEPT, OrderChoice
from kvtier.control.policies.prediction.classes import class_of
from kvtier.control.policies.prediction.model import ReuseModel
from kvtier.control.policies.prediction.segments import NONE, Segments
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


def reviewed(choice: OrderChoice, num_slots: int) -> bool:
    """A review; True if the order is another one now."""
    return choice.asked(num_slots, num_slots)


@pytest.mark.parametrize("count", [400, 3 * SAMPLE_MAX])
def test_the_learned_order_is_followed_while_it_leads(count: int) -> None:
    """A tier of half of all blocks: in the learned order it has every short prompt, in LRU's those of late."""
    model = learned_model()
    segments = segments_of(model, count, 4)
    num_slots = 2 * count
    choice = OrderChoice(num_slots, segments, model)
    assert choice.learned
    assert not reviewed(choice, num_slots), "nothing was judged yet"
    for kind, gap in ((LONG, 100.0), (SHORT, 300.0), (LONG, 100.0)):
        turns = 0
        before = choice.learned
        while choice.learned is before:
            for _ in range(min(count // 4, USES_KEPT)):
                choice.used(kind, gap, 4)
            reviewed(choice, num_slots)
            turns += 1
            assert turns <= 10, "what comes back decides soon"


def test_a_lead_of_long_ago_counts_less() -> None:
    model = learned_model()
    choice = OrderChoice(800, segments_of(model, 400, 4), model)
    reviewed(choice, 800)
    for _ in range(100):
        choice.used(SHORT, 300.0, 4)
    reviewed(choice, 800)
    assert choice.learned
    for _ in range(100):  # as many as before: without a half-life this would be a draw
        reviewed(choice, 800)
    for _ in range(40):
        choice.used(LONG, 100.0, 4)
    reviewed(choice, 800)
    assert not choice.learned


def test_uses_that_no_request_tells_of_are_kept_within_a_bound() -> None:
    model = ReuseModel()
    choice = OrderChoice(10, segments_of(model, 4, 1), model)
    for _ in range(2 * USES_KEPT):
        choice.used(SHORT, 1.0, 1)
    assert len(choice._uses) == USES_KEPT


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
                tier.policy._order.choice.learned = False
            hits[name] += tier.serve(number, request)
    print(hits)
    assert abs(hits["lru"] - hits["reuse"]) <= hits["lru"] // 100
