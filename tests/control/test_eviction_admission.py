"""Rows for an `on_evict` tier with a write budget: chosen as they are about to be evicted, with those before them."""

from __future__ import annotations

import pytest
from support_control import key
from support_traffic import Traffic

from kvtier.policy import RequestModels
from kvtier.policy.reuse.admission import BudgetedAdmission
from kvtier.policy.reuse.prediction.model import ReuseModel
from kvtier.policy.reuse.prediction.prompts import RECENT_KEYS_MAX
from kvtier.policy.write_budget import WriteBudget
from kvtier.types.hints import Demote
from kvtier.types.jobs import DropReason, SkipReason
from kvtier.types.keys import GroupIndex, OffloadKey, RequestId
from kvtier.types.requests import RequestUse

BOTH = pytest.mark.parametrize("kind", ["owned", "shared"])
DAY_BLOCKS = 1440
HOUR_BLOCKS = DAY_BLOCKS // 24


def traffic_of(kind: str = "owned", rows: int = 16, **more: object) -> Traffic:
    """A stack with rows for a few prompts, whose budget has an hour's share left."""
    traffic = Traffic(kind, rows, write_policy="on_evict", write_bytes_per_day=DAY_BLOCKS, **more)
    traffic.world.now = 0.0
    traffic.ask(traffic.new(1))  # the budget counts as used by then
    traffic.world.now = 3600.0
    return traffic


def leave_room(traffic: Traffic, blocks: int) -> None:
    """Use up the budget but for so many blocks."""
    budgeted = traffic.world.plane.control.lowers[0].budgeted
    assert budgeted is not None
    budget = budgeted.budget
    budget.advance(traffic.world.now)
    budget.record_admitted(budget.free - blocks)
    assert budget.free == blocks


@BOTH
def test_nothing_is_decided_before_rows_are_short(kind: str) -> None:
    traffic = traffic_of(kind)
    prompt = traffic.new(8)
    traffic.ask(prompt)
    counters = traffic.world.plane.control.counters(1)
    assert not any(traffic.written(prompt))
    assert traffic.world.plane.dirty_rows == 9
    assert not counters.skipped
    assert counters.computed_again == 0


@BOTH
def test_what_is_chosen_takes_those_before_it_along_although_they_are_not_evicted(kind: str) -> None:
    traffic = traffic_of(kind)
    prompt, other = traffic.new(8), traffic.new(9)
    traffic.ask(prompt)
    traffic.ask(other)
    rows = traffic.world.plane.control.cpu.directory
    assert traffic.written(prompt) == [True] * 8
    assert [key(n) in rows for n in prompt] == [True] * 7 + [False]
    traffic.world.check()


@BOTH
def test_without_room_for_all_of_a_prompt_its_front_is_written(kind: str) -> None:
    traffic = traffic_of(kind)
    prompt = traffic.new(8)
    traffic.ask(prompt)
    leave_room(traffic, 4)  # one of them for the block of the first request, which is evicted before
    traffic.ask(traffic.new(15))
    assert traffic.written(prompt) == [True] * 3 + [False] * 5
    counters = traffic.world.plane.control.counters(1)
    assert counters.skipped[SkipReason.NOT_ADMITTED] == 4, "the last one is still in its row"
    assert key(prompt[3]) in traffic.world.plane.control.cpu.directory
    assert not counters.dropped
    traffic.world.check()


@BOTH
def test_what_was_refused_is_decided_anew_once_it_was_used_and_is_evicted_again(kind: str) -> None:
    traffic = traffic_of(kind)
    world, prompt = traffic.world, traffic.new(4)
    traffic.ask(prompt)
    leave_room(traffic, 0)
    traffic.ask(traffic.new(12))
    assert not any(traffic.written(prompt))
    counters = world.plane.control.counters(1)
    assert counters.skipped[SkipReason.NOT_ADMITTED] == 1, "the block of the first request"
    world.now += 3600.0
    traffic.ask(prompt)
    traffic.ask(traffic.new(12))
    assert traffic.written(prompt) == [True] * 4


def test_what_comes_again_from_the_engine_after_it_was_refused_is_counted() -> None:
    traffic = traffic_of()
    prompt = traffic.new(4)
    traffic.ask(prompt)
    leave_room(traffic, 0)
    for _ in range(3):
        traffic.ask(traffic.new(12))
    traffic.ask(prompt)
    assert traffic.world.plane.control.counters(1).computed_again == 4


@BOTH
def test_closing_spends_what_is_left_of_the_budget_on_the_warmest(kind: str) -> None:
    traffic = traffic_of(kind)
    world, cold, warm = traffic.world, traffic.new(6), traffic.new(6)
    traffic.ask(cold)
    traffic.ask(warm)
    leave_room(traffic, 4)
    world.plane.close(world.now)
    world.plane.drain(world.now)
    world.step()
    world.run_all()
    assert traffic.written(warm) == [True] * 4 + [False] * 2
    assert not any(traffic.written(cold))
    assert world.plane.dirty_rows == 0
    world.check()


@BOTH
def test_a_hint_writes_a_row_with_those_before_it(kind: str) -> None:
    traffic = traffic_of(kind)
    world, prompt = traffic.world, traffic.new(6)
    traffic.ask(prompt)
    world.plane.hint(Demote([key(prompt[3])], "s"), world.now)
    world.step()
    world.run_all()
    assert traffic.written(prompt) == [True] * 4 + [False] * 2
    world.check()


def test_a_hint_writes_no_more_than_the_budget_allows_and_that_from_the_root_on() -> None:
    traffic = traffic_of()
    world, prompt = traffic.world, traffic.new(6)
    traffic.ask(prompt)
    leave_room(traffic, 2)
    budget = world.plane.control.lowers[0].budgeted.budget  # type: ignore[union-attr]
    budget.record_sent(budget.left_of_day - 2)
    world.plane.hint(Demote([key(prompt[3])], "s"), world.now)
    world.step()
    world.run_all()
    assert traffic.written(prompt) == [True] * 2 + [False] * 4
    assert world.plane.control.counters(1).dropped[DropReason.WRITE_BUDGET] == 2
    world.check()


def test_rows_are_given_up_for_one_that_waits_and_their_share_of_the_budget_is_given_back() -> None:
    traffic = traffic_of()
    lower = traffic.world.plane.control.lowers[0]
    assert lower.budgeted is not None
    budget, prompt = lower.budgeted.budget, traffic.new(4)
    traffic.ask(prompt)
    budget.advance(traffic.world.now)
    before, keys = budget.free, [key(n) for n in prompt]
    for name in keys:
        assert lower.budgeted.admit_parent(name)
    assert budget.free == before - 4
    lower.budgeted.on_give_up(keys)
    assert budget.free == before
    lower.budgeted.on_give_up(keys)
    assert budget.free == before, "once"


def decides(free: int) -> tuple[ReuseModel, BudgetedAdmission]:
    models, budget = RequestModels(), WriteBudget(DAY_BLOCKS)
    model, admission = models.of(ReuseModel), BudgetedAdmission(models, budget, rows=16)
    model.advance(0.0)
    admission.on_offer([])
    model.begin_request(RequestUse(RequestId("a"), 3600.0, [key(n) for n in range(8)], GroupIndex(0), 8))
    admission.on_offer([])
    budget.record_admitted(budget.free - free)
    return model, admission


def absent(_: OffloadKey) -> bool:
    return False


def test_a_block_is_not_chosen_after_one_that_cannot_be_sent() -> None:
    _, admission = decides(HOUR_BLOCKS)
    assert not admission.select_evicted(key(7), absent, lambda other: other == key(2))
    assert list(admission.select_evicted(key(1), absent, absent)) == [key(1), key(0)]


def test_what_is_below_or_on_its_way_ends_those_that_are_taken_along() -> None:
    _, admission = decides(HOUR_BLOCKS)
    there = {key(n) for n in range(3)}
    assert list(admission.select_evicted(key(5), there.__contains__, absent)) == [key(5), key(4), key(3)]


def test_the_blocks_of_as_many_rows_are_known_by_their_prompts() -> None:
    models = RequestModels()
    BudgetedAdmission(models, WriteBudget(1), rows=1 << 20)
    assert models.of(ReuseModel).keep_prompts()._kept == RECENT_KEYS_MAX
