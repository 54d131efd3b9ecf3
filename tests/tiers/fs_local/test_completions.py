"""Completions are told in order and in small portions, each once, whoever raises; a late loop gets larger portions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from kvtier.aio.loop_budget import LATE_SECONDS, LATE_TURN_SECONDS, TURN_SECONDS, TimeBudget
from kvtier_fs.io.contract import IOKind, IORequest
from kvtier_fs.io.loop_engine import Completions


def request(done: Callable[[IORequest, int], None]) -> IORequest:
    return IORequest(IOKind.READ, -1, 0, [], done)


async def all_told(completions: Completions) -> None:
    deadline = time.monotonic() + 10
    while completions.ended:
        assert time.monotonic() < deadline
        await asyncio.sleep(0)


async def test_each_is_told_once_and_in_order_some_in_each_turn() -> None:
    told: list[int] = []
    portions: list[int] = []

    def slowly(_: IORequest, number: int) -> None:
        told.append(number)
        time.sleep(LATE_TURN_SECONDS)  # a turn is over, however late the loop is

    completions = Completions(asyncio.get_running_loop(), TimeBudget(), lambda: portions.append(len(told)))
    completions.complete([(request(slowly), number) for number in range(3)])
    assert told == [0]
    completions.complete([(request(slowly), 3)])
    assert len(completions.ended) == 3
    await all_told(completions)
    assert told == [0, 1, 2, 3]
    assert portions == [1, 2, 3, 4]


async def test_those_behind_one_that_raises_are_told_all_the_same() -> None:
    loop, told = asyncio.get_running_loop(), []
    reported: list[dict[str, object]] = []
    loop.set_exception_handler(lambda _, context: reported.append(context))

    def done(_: IORequest, number: int) -> None:
        told.append(number)
        if number % 2:
            raise ValueError(number)

    completions = Completions(loop, TimeBudget(), lambda: None)
    completions.complete([(request(done), number) for number in range(4)][:1])
    with pytest.raises(ValueError, match="1"):
        completions.complete([(request(done), number) for number in range(1, 4)])
    await all_told(completions)
    await asyncio.sleep(0)
    assert told == [0, 1, 2, 3]
    assert [str(context["exception"]) for context in reported] == ["3"]


async def test_what_comes_after_a_turn_may_raise_and_keeps_nobody_from_being_told() -> None:
    loop, told = asyncio.get_running_loop(), []
    reported: list[dict[str, object]] = []
    loop.set_exception_handler(lambda _, context: reported.append(context))

    def slowly(_: IORequest, number: int) -> None:
        told.append(number)
        time.sleep(LATE_TURN_SECONDS)  # a turn is over, however late the loop is

    def after() -> None:
        raise OSError("no")

    completions = Completions(loop, TimeBudget(), after)
    with pytest.raises(OSError, match="no"):
        completions.complete([(request(slowly), number) for number in range(3)])
    await all_told(completions)
    assert told == [0, 1, 2]
    assert len(reported) == 2


async def test_a_loop_that_came_late_does_more_in_a_turn_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    budget = TimeBudget()
    budget.note_delay(LATE_SECONDS)
    assert budget.seconds == TURN_SECONDS
    budget.note_delay(LATE_SECONDS * 1.01)
    assert budget.seconds == LATE_TURN_SECONDS
    now += 0.2
    assert budget.seconds == LATE_TURN_SECONDS
    now += 0.1
    assert budget.seconds == TURN_SECONDS
