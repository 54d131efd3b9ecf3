"""The order that `reuse` follows: the model's, or LRU's once that hits more."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support_adverse_traces import TRACES

from benchmarks.policies import OneTier
from kvtier.policy.reuse.lru_guard import SAMPLE_MAX, LRUGuard
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


def use(guard: LRUGuard, kind: int, age: float, held: int, times: int = 1) -> None:
    """Requests that each use the segment of this class and nearly this age, of which the tier has so many blocks."""
    segments = guard._segments
    at = int(len(segments.length[:-1]) * (1.0 - age / 400.0))
    seg = at if segments.kind[at] == kind else at + 1
    for _ in range(times):
        segments.held[seg] = held
        guard.on_use([seg])
        guard.on_request(0)


def review(guard: LRUGuard, num_slots: int) -> bool:
    """A review; True if the model's order holds now."""
    guard.on_request(num_slots // 8)
    return guard.follows_model


@pytest.mark.parametrize("count", [400, 3 * SAMPLE_MAX])
def test_the_order_that_hits_more_holds(count: int) -> None:
    """A tier of half of all blocks: in the model's order it has every short prompt, in LRU's the latest ones."""
    model = learned_model()
    num_slots = 2 * count
    guard = LRUGuard(num_slots, segments_of(model, count, 4), model)
    assert review(guard, num_slots), "the first one begins the comparison"
    use(guard, LONG, 100.0, held=0, times=3)
    assert not review(guard, num_slots), "LRU has it"
    use(guard, SHORT, 300.0, held=0, times=20)
    assert review(guard, num_slots), "the model's order would have it"
    use(guard, SHORT, 300.0, held=4)
    assert review(guard, num_slots)
    use(guard, LONG, 100.0, held=0, times=40)
    assert not review(guard, num_slots)


def test_what_may_be_chance_does_not_bring_the_models_order_back() -> None:
    """Four requests are two standard deviations; the fifth makes it 2.2."""
    model = learned_model()
    guard = LRUGuard(800, segments_of(model, 400, 4), model)
    review(guard, 800)
    use(guard, LONG, 100.0, held=0)
    assert not review(guard, 800)
    guard._lead = guard._variance = 0.0
    use(guard, SHORT, 300.0, held=0, times=4)
    assert not review(guard, 800)
    use(guard, SHORT, 300.0, held=0, times=2)
    assert review(guard, 800)


def test_while_it_holds_the_models_order_has_what_the_tier_has() -> None:
    """Prompts that LRU would have as well, of which the tier has all or nothing."""
    model = learned_model()
    guard = LRUGuard(800, segments_of(model, 400, 4), model)
    review(guard, 800)
    for held in (4, 0):
        use(guard, SHORT, 100.0, held, times=3)
        assert review(guard, 800) == (held == 4)


def test_a_lead_of_long_ago_counts_less() -> None:
    """Twenty requests in which LRU leads outweigh a hundred of the other kind before them."""
    model = learned_model()
    guard = LRUGuard(800, segments_of(model, 400, 4), model)
    review(guard, 800)
    use(guard, SHORT, 300.0, held=4, times=100)
    for _ in range(128):
        assert review(guard, 800)
    use(guard, LONG, 100.0, held=0, times=20)
    assert not review(guard, 800)


def test_lrus_order_holds_while_all_that_is_known_fits() -> None:
    model = learned_model()
    segments = segments_of(model, 400, 4)
    guard = LRUGuard(1601, segments, model)
    use(guard, SHORT, 300.0, held=4, times=100)
    assert not review(guard, 1608)
    segments.length[0] = 6
    assert review(guard, 1608)
    segments.length[0] = 4
    assert not review(guard, 1608)


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
