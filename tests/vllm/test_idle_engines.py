"""Engines without requests beside a stack process: others may have their rows, and one step takes the last figures."""

from __future__ import annotations

import time

import pytest
from fake_engine import FakeEngine, offloading_config, stack
from support_served_stacks import ServedStacks

from kvtier.engines.vllm.primary import client_driver

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("stacks")]


def lent(stacks: ServedStacks, engine: FakeEngine) -> int:
    """Rows that are lent to all engines."""
    return int(stacks.call(engine, lambda: stacks.stack_of(engine).quotas.lent))


def until_none_is_lent(stacks: ServedStacks, engine: FakeEngine) -> None:
    """Without a step of any engine."""
    until = time.monotonic() + 60.0
    while lent(stacks, engine):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("as_0_33", [False, True])
def test_no_store_waits_for_rows_after_a_rest(stacks, root, seed, as_0_33):
    with FakeEngine(offloading_config(stack(root, 400)), seed, as_0_33=as_0_33) as engine:
        for number in range(5):
            engine.add([number] * 8)
            engine.run()
            until_none_is_lent(stacks, engine)
        assert (engine.counts["stored chunks"], engine.counts["store refused"], engine.wrong) == (40, 0, 0)


def test_an_engine_stores_into_the_rows_that_another_one_has_given_back(stacks, root, seed):
    tiers = stack(root, 24)  # of which three are lent ahead to each of two engines
    with FakeEngine(offloading_config(tiers), seed) as one, FakeEngine(offloading_config(tiers), seed) as two:
        for engine, first in ((one, 0), (two, 0), (one, 100), (two, 200)):
            engine.patient = True
            for number in range(4):
                engine.add([first, number, number])
                engine.run()
            until_none_is_lent(stacks, one)
        assert two.counts["hit chunks"] >= 4 * 3
        assert (one.counts["store refused"], two.counts["store refused"]) == (0, 0)
        assert (one.counts["stored chunks"], two.counts["stored chunks"]) == (18, 9)


def test_one_step_takes_the_last_figures(stacks, root, seed, monkeypatch):
    monkeypatch.setattr("kvtier.engines.vllm.metrics.INTERVAL_SECONDS", 1e6)
    monkeypatch.setattr(client_driver, "IDLE_SECONDS", 1.0)  # in which the answer comes
    with FakeEngine(offloading_config(stack(root, 50)), seed) as engine:
        for number in range(3):
            engine.add([number] * 4)
            while engine.waiting or engine.running or engine.unsubmitted or any(engine.batches):
                engine.step()
            steps = 0
            while engine.manager.has_pending_work():
                engine.step()
                steps += 1
            assert steps == 1
            assert engine.told.data["data"]["kvtier_stored_blocks_total"]["cpu",] == 4 * (number + 1)


def test_an_engine_takes_no_step_for_figures_of_a_process_that_has_ended(stacks, root, seed):
    with FakeEngine(offloading_config(stack(root, 50)), seed) as engine:
        engine.add([1, 2, 3])
        engine.run()
        stacks.end_process(engine)
        stacks.eventually(engine, lambda: not engine.manager._driver.client.core.connected)
        assert not engine.manager.has_pending_work()
