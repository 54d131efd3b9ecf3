"""Admission by prediction: what a tier with `admit: predicted` is sent, once the life tables know the requests."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from support_control import key
from support_counts import seeds
from support_traffic import LONG, SHORT, Traffic

from kvtier.control.request_tracker import NO_REQUEST
from kvtier.policy import RequestModels
from kvtier.policy.reuse import admission as predicted
from kvtier.policy.reuse.admission import BudgetedAdmission, Predicted
from kvtier.policy.reuse.prediction.model import ReuseModel
from kvtier.policy.write_budget import WriteBudget
from kvtier.types.jobs import DropReason, SkipReason
from kvtier.types.keys import GroupIndex, RequestId
from kvtier.types.requests import NO_INFO, RequestUse

BOTH = pytest.mark.parametrize("kind", ["owned", "shared"])
WAYS = [("shared", "write_through"), ("owned", "write_through"), ("shared", "on_evict"), ("owned", "on_evict")]


def absent(key: object) -> bool:
    return False


@BOTH
def test_without_data_everything_is_written(kind: str) -> None:
    traffic = Traffic(kind)
    prompt = traffic.new(LONG)
    traffic.ask(prompt)
    assert traffic.written(prompt) == [True] * LONG


@BOTH
def test_what_comes_back_is_written_and_what_does_not_is_not(kind: str) -> None:
    traffic = Traffic(kind)
    traffic.learn()
    short, long = traffic.new(SHORT), traffic.new(LONG)
    traffic.ask(short)
    traffic.ask(long)
    assert traffic.written(short) == [True] * SHORT
    assert traffic.written(long) == [False] * LONG
    counters = traffic.world.plane.control.counters(1)
    assert counters.skipped[SkipReason.NOT_ADMITTED] >= LONG
    assert not counters.dropped
    traffic.world.check()


def test_what_was_not_written_and_is_computed_again_is_counted() -> None:
    traffic = Traffic(rows=16)
    traffic.learn()
    counters = traffic.world.plane.control.counters(1)
    long, before = traffic.new(LONG), counters.computed_again
    traffic.ask(long)
    for _ in range(4):
        traffic.ask(traffic.new(LONG))
    assert not any(traffic.written(long))
    traffic.ask(long)
    assert counters.computed_again - before == LONG


def test_a_block_that_is_written_takes_those_before_it_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that was refused goes on, and by then writes are cheaper."""
    traffic = Traffic()
    traffic.learn()
    long = traffic.new(LONG)
    traffic.ask(long)
    assert not any(traffic.written(long))
    monkeypatch.setattr(predicted, "HITS_MIN", 0.0)
    longer = long + traffic.new(1)
    traffic.world.store(longer[-1])
    traffic.world.plane.uses.begin(RequestId("next"), [key(n) for n in longer], traffic.world.now, None, NO_INFO)
    traffic.world.run_all()
    assert traffic.written(longer) == [True] * (LONG + 1)
    traffic.world.check()


def admission() -> tuple[ReuseModel, Predicted]:
    models = RequestModels()
    return models.of(ReuseModel), Predicted(models)


def test_a_block_whose_child_is_below_is_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, decides = admission()
    keys = [key(n) for n in range(3)]
    model.begin_request(RequestUse(RequestId("a"), 1.0, keys, GroupIndex(0), 3))
    monkeypatch.setattr(predicted, "HITS_MIN", 2.0)
    assert not decides.admits(keys[2], False, absent)
    assert decides.admits(keys[1], False, lambda child: child == keys[2])
    assert decides.admits(keys[0], False, absent), "the one after it was admitted just now"


def test_a_block_that_no_request_announced_is_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    _, decides = admission()
    monkeypatch.setattr(predicted, "HITS_MIN", 2.0)
    assert decides.admits(key(1), False, absent)


@pytest.mark.parametrize(("followed", "hits", "written"), [(False, 0.17, True), (True, 0.17, False), (True, 0.2, True)])
def test_a_tier_whose_policy_follows_requests_asks_for_more(
    followed: bool, hits: float, written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = RequestModels()
    model, decides = models.of(ReuseModel), Predicted(models, followed=followed)
    model.begin_request(RequestUse(RequestId("a"), 1.0, [key(0)], GroupIndex(0), 1))
    monkeypatch.setattr(decides, "expected_hits", lambda prompt, position: hits)
    assert decides.admits(key(0), False, absent) == written


def test_a_prompt_that_leaves_another_keeps_what_they_share() -> None:
    """Three prompts share four blocks: for the third one those are in their third use, and its own are new."""
    model, _ = admission()
    prompts = model.keep_prompts()
    shared = [key(n) for n in range(4)]
    for turn in range(3):
        own = [key(100 * (turn + 1) + n) for n in range(2)]
        model.begin_request(RequestUse(RequestId(str(turn)), float(turn), shared + own, GroupIndex(0), 2))
    found = prompts.find(shared[-1])
    assert found is not None
    prompt, position = found
    assert (position, list(prompt.ends)) == (3, [4, 6])
    assert [prompts.segments.uses[seg] for seg in prompt.segs] == [3, 1]


def test_blocks_of_old_prompts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.policy.reuse.prediction import prompts as module

    monkeypatch.setattr(module, "RECENT_KEYS", 16)
    model, decides = admission()
    prompts = model.keep_prompts()
    for turn in range(200):
        keys = [key(4 * turn + n) for n in range(4)]
        model.begin_request(RequestUse(RequestId(str(turn)), float(turn), keys, GroupIndex(0), 4))
        for position, name in enumerate(keys):
            found = prompts.find(name)
            assert found is not None
            assert found[1] == position
            assert found[0].keys == keys
    assert prompts.find(key(0)) is None
    assert len(prompts._young) + len(prompts._old) <= 32
    assert len(prompts._prompts) <= 8
    assert decides.admits(key(0), False, absent)


def test_prompts_that_come_again_and_again_take_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.policy.reuse.prediction import prompts as module

    monkeypatch.setattr(module, "RECENT_KEYS", 16)
    model, _ = admission()
    prompts = model.keep_prompts()
    keys = [key(n) for n in range(8)]
    for turn in range(1000):
        model.begin_request(RequestUse(RequestId(str(turn)), float(turn), keys, GroupIndex(0), 0))
        model.end_request(RequestId(str(turn)), 10)
        assert sum(len(each.keys) for each in prompts._prompts) <= 2 * module.REPEATS_MAX * 16
        assert prompts.find(keys[3]) == (prompts._prompts[-1], 3)


def test_output_of_a_request_that_began_long_ago_is_forgotten_with_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.policy.reuse.prediction import prompts as module

    monkeypatch.setattr(module, "RECENT_KEYS", 16)
    model, decides = admission()
    prompts = model.keep_prompts()
    model.begin_request(RequestUse(RequestId("long"), 0.0, [key(0)], GroupIndex(0), 1))
    for turn in range(1, 40):
        model.begin_request(RequestUse(RequestId(str(turn)), float(turn), [key(turn)], GroupIndex(0), 1))
        if turn == 20:  # its prompt is among the old ones
            model.extend_request(RequestId("long"), GroupIndex(0), [key(100)])
            assert prompts.find(key(100)) is not None
    assert prompts.find(key(100)) is None
    assert decides.admits(key(100), False, absent)


def test_uses_without_a_request_keep_the_latest_prompt_of_each_group() -> None:
    """No end of a request follows them. The first group of this layout keeps no chain."""
    model, _ = admission()
    prompts = model.keep_prompts()
    for turn in range(50):
        for group in (1, 2):
            model.begin_request(RequestUse(NO_REQUEST, float(turn), [key(turn, group)], GroupIndex(group), 1))
    assert [(one.group, one.keys) for one in prompts._open[NO_REQUEST]] == [(1, [key(49, 1)]), (2, [key(49, 2)])]


# -- within a budget -----------------------------------------------------------------------------------------------


def test_with_a_budget_what_no_request_announced_is_chosen_too() -> None:
    models = RequestModels()
    model, decides = models.of(ReuseModel), BudgetedAdmission(models, WriteBudget(1440 * 4))
    model.advance(0.0)
    assert not decides.admits(key(1), False, absent), "the budget counts as used before"
    model.advance(3600.0)
    assert decides.admits(key(1), False, absent)


@pytest.mark.parametrize(("kind", "write_policy"), [("shared", "write_through"), ("owned", "on_evict")])
def test_a_budget_holds_in_any_24_hours_and_is_used(kind: str, write_policy: str) -> None:
    """Two days of 960 blocks in the requests each, and a budget of 480 a day."""
    traffic = Traffic(kind, write_policy=write_policy, write_bytes_per_day=480)
    counters, world, stored = traffic.world.plane.control.counters(1), traffic.world, list[int]()
    world.now = 0.0
    for _ in range(2 * 192 + 96):
        traffic.ask(traffic.new(5))
        world.now += 450.0
        stored.append(counters.stored)
    day = 192
    for start in range(len(stored) - day):
        assert stored[start + day] - stored[start] <= 480, start
    assert stored[-1] - stored[-1 - day] >= 0.98 * 480
    assert counters.skipped[SkipReason.NOT_ADMITTED]
    world.check()


class Spending(Traffic):
    """Prompts within a budget, written in bursts. `orphans` are written blocks without the one before them."""

    def __init__(self, kind: str, write_policy: str, seed: int) -> None:
        super().__init__(kind, rows=96, write_policy=write_policy, write_bytes_per_day=1440)
        self.draw = random.Random(seed)
        self.prompts: list[list[int]] = []

    def burst(self, prompts: int) -> None:
        """Prompts at once, new ones and some that go on; what they are to be written is sent after the last."""
        world = self.world
        for _ in range(prompts):
            before = self.draw.choice(self.prompts[-8:]) if self.prompts and self.draw.random() < 0.3 else []
            prompt = before + self.new(self.draw.randrange(1, 24))
            self.prompts.append(prompt)
            name = RequestId(str(len(self.prompts)))
            assert world.plane.uses is not None
            world.plane.uses.begin(name, [key(n) for n in prompt], world.now, None, NO_INFO)
            world.store(*prompt)
            world.plane.uses.end(name, None)
        world.run_all()
        world.check()

    def orphans(self) -> int:
        lower = self.world.plane.control.lowers[0]
        owned = lower.owned
        written = self.world.remote if owned is None else owned.directory
        names = [[key(n) for n in prompt] for prompt in self.prompts[-40:]]
        return sum(after in written and before not in written for prompt in names for before, after in pairwise(prompt))


@pytest.mark.parametrize("seed", seeds(2, 1))
@pytest.mark.parametrize(("kind", "write_policy"), WAYS)
def test_no_block_is_written_within_a_budget_without_those_before_it(kind: str, write_policy: str, seed: int) -> None:
    """Much more is offered at once than is left of the budget, which is used all the same."""
    traffic = Spending(kind, write_policy, seed)
    counters, world = traffic.world.plane.control.counters(1), traffic.world
    for _ in range(60):
        traffic.burst(traffic.draw.randrange(1, 12))
        assert traffic.orphans() == 0
        world.now += traffic.draw.uniform(1.0, 600.0)
    assert counters.stored > 60
    if write_policy == "write_through":
        assert DropReason.WRITE_BUDGET not in counters.dropped, "what was admitted is written"


def test_blocks_of_the_output_belong_to_the_prompt_before_them() -> None:
    model, decides = admission()
    prompts = model.keep_prompts()
    keys = [key(n) for n in range(8)]
    for name, end in (("a", 2), ("b", 5)):
        model.begin_request(RequestUse(RequestId(name), 60.0 * end, keys[:end], GroupIndex(0), 2))
        model.extend_request(RequestId(name), GroupIndex(0), keys[end : end + 1])
        model.extend_request(RequestId(name), GroupIndex(0), keys[end + 1 : end + 2])
        found = prompts.find(keys[end + 1])
        assert found is not None
        assert found[1] == end + 1
        assert found[0].keys == keys[: end + 2]
        assert list(decides.parents(keys[end + 1])) == keys[end::-1]
        model.end_request(RequestId(name), 32)
    assert found[0].ends == [4, 7]
    assert [prompts.segments.uses[seg] for seg in found[0].segs] == [2, 1]
    model.extend_request(RequestId("b"), GroupIndex(0), keys[7:])
    assert prompts.find(keys[7]) is None, "its request has ended"


def test_output_that_is_known_or_longer_than_can_be_numbered_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.policy.reuse.prediction import prompts as module

    monkeypatch.setattr(module, "OUTPUT_BLOCKS_MAX", 2)
    model, _ = admission()
    prompts = model.keep_prompts()
    keys = [key(n) for n in range(8)]
    model.begin_request(RequestUse(RequestId("a"), 0.0, keys[:6], GroupIndex(0), 6))
    model.begin_request(RequestUse(RequestId("b"), 60.0, keys[:3], GroupIndex(0), 0))
    model.extend_request(RequestId("b"), GroupIndex(0), [key(20), key(21)])
    model.extend_request(RequestId("b"), GroupIndex(0), [key(22)])
    found = prompts.find(key(21))
    assert found is not None
    assert found[0].keys == [*keys[:3], key(20), key(21)]
    assert found[0].ends == [3, 5]
    assert prompts.find(key(22)) is None
    model.begin_request(RequestUse(RequestId("c"), 120.0, keys[:3], GroupIndex(0), 0))
    model.extend_request(RequestId("c"), GroupIndex(0), [key(20)])
    again = prompts.find(key(20))
    assert again is not None
    assert again[0] == found[0]
