"""The reasons of the line that requests load nothing of what is stored."""

from __future__ import annotations

import logging
import time

import pytest
from fake_engine import FakeEngine, offloading_config, stack

from kvtier.engines.vllm.engine_config import ENDS_ALONE
from kvtier.engines.vllm.primary import unserved
from kvtier.engines.vllm.primary.served_requests import RequestState
from kvtier.engines.vllm.primary.unserved import UnservedRequests, ends_alone
from kvtier.stack import StackStats
from kvtier.stack.watching.stats import TierStats

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unserved, "FOUND_MAX", 3)
    monkeypatch.setattr(unserved, "MISSED_MAX", 5)


@pytest.fixture(autouse=True)
def shown(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's logger passes nothing on to others."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)


def requests(num_groups: int = 2, ends: str = "", **tier: int) -> UnservedRequests:
    stats = StackStats({"cpu": TierStats(), "fs": TierStats(**tier)}, backlog=0)
    return UnservedRequests(lambda: stats, num_groups, ends)


def request(*groups: int, loaded: bool = False) -> RequestState:
    looked_up = object()
    return RequestState(groups=set(groups), loaded=loaded, request=looked_up)  # type: ignore[arg-type]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if "event=nothing_loaded" in message]


@pytest.mark.parametrize(
    ("world", "groups", "reason"),
    [
        ({"ends": ENDS_ALONE}, (0,), ENDS_ALONE),
        ({"ends": ENDS_ALONE}, (0, 1), ENDS_ALONE),
        ({"ends": ends_alone((), shares_prefixes=False)}, (0,), unserved.OFF),
        ({"evictions": 7}, (0,), unserved.EVICTED),
        ({}, (0,), unserved.OTHER_ENDS),
        ({}, (0, 1), unserved.TOO_FEW_ROWS),
        ({"num_groups": 1}, (0,), unserved.LATE),
    ],
)
def test_requests_that_found_blocks_and_loaded_none_get_the_likeliest_reason(world, groups, reason, caplog):
    counted = requests(**world)
    for _ in range(29):
        counted.on_end(request(*groups))
    assert [reason in line for line in lines(caplog)] == [True]
    counted.on_end(request(*groups))
    assert [line.split()[1] for line in lines(caplog)] == ["requests=3", "requests=30"]


def test_a_load_begins_the_count_again(caplog):
    counted = requests()
    for state in [request(0)] * 2 + [request(0, loaded=True)] + [request(0)] * 2:
        counted.on_end(state)
    assert not lines(caplog)
    counted.on_end(request(0))
    assert len(lines(caplog)) == 1


def test_requests_without_any_block_of_an_engine_before_get_a_line_and_those_of_a_new_store_none(caplog):
    fresh, kept = requests(), requests(recovered=9)
    for counted in (fresh, kept):
        for _ in range(5):
            counted.on_end(request())
    assert len(lines(caplog)) == 1
    assert unserved.FOREIGN in lines(caplog)[0]


def test_a_request_that_looked_nothing_up_does_not_count(caplog):
    counted = requests(recovered=9)
    for _ in range(9):
        counted.on_end(RequestState())
    assert not lines(caplog)


def test_requests_have_none_of_the_blocks_of_an_engine_before(stacks, root, seed, caplog):
    """The figures that say so come from the stack, wherever it is."""
    with FakeEngine(offloading_config(stack(root, 50)), seed) as engine:
        engine.patient = True
        engine.add([1, 2, 3, 4])
        engine.run()
    with FakeEngine(offloading_config(stack(root, 50)), seed) as engine:
        engine.patient = True
        until = time.monotonic() + 60.0
        while not any(tier.recovered for tier in engine.manager._driver.stats().tiers.values()):
            assert time.monotonic() < until
            engine.step()
        for number in range(5):
            engine.add([10 + number, 2, 3])
            engine.run()
        assert engine.manager._driver.stats().tiers.keys() == stacks.stats(engine).tiers.keys()
    assert [unserved.FOREIGN in line for line in lines(caplog)] == [True]
