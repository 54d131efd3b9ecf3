"""Tests of a tier against a dict, in any order of operations: right bytes or a miss, nothing from before a reset."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from kvtier.testing.conformance.base import REFUSED, ConformanceBase, make_keys
from kvtier.testing.driver import Driver
from kvtier.testing.trace import leaving_no_trace, turns
from kvtier.tier.contract import Resettable
from kvtier.types.jobs import JobKind, JobResult, TransferJob
from kvtier.types.keys import OffloadKey

T = TypeVar("T")

KEYS_OF_GROUP = 12
BLOCKS = st.lists(st.tuples(st.integers(0, 7), st.integers(0, KEYS_OF_GROUP - 1)), min_size=1, max_size=8, unique=True)
TURNS = st.integers(0, 12)


class TierMachine(RuleBasedStateMachine):
    """Operations on one tier. The driver's directory is the dict; `doubtful` are keys whose store was cancelled."""

    suite: ConformanceBase
    place: Path

    def __init__(self) -> None:
        super().__init__()
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        self._doubtful: set[OffloadKey] = set()
        self.driver = self._run(self._open())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    async def _open(self) -> Driver:
        return await self._stack.enter_async_context(self.suite.opened(self.place))

    def _keys(self, blocks: list[tuple[int, int]]) -> list[OffloadKey]:
        groups = len(self.suite.layout.groups)
        return list(dict.fromkeys(make_keys(1, group % groups, number)[0] for group, number in blocks))

    def _known(self, blocks: list[tuple[int, int]]) -> list[OffloadKey]:
        """The keys that can be loaded: in an owned tier only what has a slot."""
        keys = self._keys(blocks)
        return [key for key in keys if key in self.driver.directory] if self.driver.owned else keys

    @rule(blocks=BLOCKS)
    def store(self, blocks: list[tuple[int, int]]) -> None:
        keys = self._keys(blocks)
        outcomes = self._run(self.driver.store(keys))
        self._doubtful -= {key for key in keys if outcomes[key].ok}
        assert all(outcome.ok for outcome in outcomes.values()), outcomes

    @rule(blocks=BLOCKS, shuffle=st.randoms(use_true_random=False))
    def load(self, blocks: list[tuple[int, int]], shuffle: random.Random) -> None:
        keys = self._known(blocks)
        rows = shuffle.sample(range(self.suite.num_rows), len(keys))
        if keys:
            self._judge(self._run(self.driver.load(keys, rows)))

    def _judge(self, outcomes: dict[OffloadKey, Any]) -> None:
        """The bytes were checked by the driver; what the dict holds for sure must be a hit in an owned tier."""
        for key, outcome in outcomes.items():
            certain = self.driver.owned and key in self.driver.directory and key not in self._doubtful
            assert outcome.ok or outcome.status in REFUSED, f"a load was {outcome.status}"
            assert outcome.ok or not certain, f"key {key.hex()} was stored and is {outcome.status}"

    @rule(blocks=BLOCKS, others=BLOCKS)
    def store_and_load_at_once(self, blocks: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
        loading = self._known(blocks)
        storing = [key for key in self._keys(others) if key not in loading]
        if not loading or not storing or len(loading) + len(storing) > self.suite.num_rows:
            return
        self._run(self._both(loading, storing))

    async def _both(self, loading: list[OffloadKey], storing: list[OffloadKey]) -> None:
        driver = self.driver
        load = driver.load_job(loading)
        store = driver.store_job(storing, range(len(loading), len(loading) + len(storing)))
        loaded, stored = await asyncio.gather(driver.tier.load(load), driver.tier.store(store))
        self._judge(driver.loaded(load, loaded))
        outcomes = driver.stored(store, stored)
        self._doubtful -= {key for key, outcome in outcomes.items() if outcome.ok}

    @rule(blocks=BLOCKS, turns_before=TURNS)
    def cancel_a_store(self, blocks: list[tuple[int, int]], turns_before: int) -> None:
        keys = self._keys(blocks)
        job = self.driver.store_job(keys)
        result = self._run(self._run_cancelled(job, turns_before))
        self.driver.rows.view[:] = 0x55
        if result is None:
            self._doubtful |= set(keys)
        else:
            self.driver.stored(job, result)
            self._doubtful -= set(keys)

    @rule(blocks=BLOCKS, turns_before=TURNS)
    def cancel_a_load(self, blocks: list[tuple[int, int]], turns_before: int) -> None:
        keys = self._known(blocks)
        if keys:
            job = self.driver.load_job(keys)
            result = self._run(self._run_cancelled(job, turns_before))
            if result is not None:
                self._judge(self.driver.loaded(job, result))

    async def _run_cancelled(self, job: TransferJob, turns_before: int) -> JobResult | None:
        call = self.driver.tier.load if job.kind is JobKind.LOAD else self.driver.tier.store
        task = asyncio.create_task(call(job))
        await turns(turns_before)
        task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            return None

    @precondition(lambda self: self.driver.owned and self.driver.directory)
    @rule(pick=st.integers(0, 1000))
    def evict(self, pick: int) -> None:
        keys = list(self.driver.directory)
        self.driver.evict(keys[pick % len(keys)])

    @precondition(lambda self: isinstance(self.driver.tier, Resettable))
    @rule()
    def reset(self) -> None:
        driver = self.driver
        assert isinstance(driver.tier, Resettable)
        before = list(driver.directory)
        self._run(driver.tier.reset(driver.epoch + 1))
        driver.epoch += 1
        outcomes = self._run(driver.load(before[: self.suite.num_rows])) if before else {}
        assert not any(outcome.ok for outcome in outcomes.values()), "a block from before the reset was loaded"
        for key in before:
            driver.evict(key)

    @rule()
    def reopen(self) -> None:
        before, epoch = dict(self.driver.directory), self.driver.epoch
        owners = self.driver.owners
        self._run(self._stack.aclose())
        self.driver = self._run(self._open())
        found = self.driver.directory
        if not self.driver.owned:
            return
        if not self.suite.survives_reopen:
            self.driver.epoch = self.driver.opened.epoch
            self._doubtful.clear()
            return
        assert self.driver.opened.epoch == epoch
        lost = [key for key in before if key not in self._doubtful and found.get(key) != before[key]]
        assert not lost, f"stored and not found again: {[key.hex() for key in lost]}"
        for key, (_, generation) in before.items():
            owners.note(key, generation)
        self._doubtful |= {key for key in found if key not in before}

    def teardown(self) -> None:
        try:
            self._run(self._stack.aclose())
        finally:
            self._runner.close()


def run_machine(suite: ConformanceBase, place: Path, limits: settings | None = None) -> None:
    """Run the state machine over the tiers of a suite, each example at a place of its own.

    `limits` are the suite's own when left out. Raises what the failing example raised; Hypothesis prints the steps
    that lead there.
    """
    numbers = itertools.count()

    class Machine(TierMachine):
        def __init__(self) -> None:
            self.suite = suite
            self.place = place / f"example-{next(numbers)}"
            self.place.mkdir()
            super().__init__()

    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    limits = limits or settings(
        max_examples=suite.machine_examples,
        stateful_step_count=suite.machine_steps,
        deadline=None,
        suppress_health_check=checks,
    )
    with leaving_no_trace():
        run_state_machine_as_test(Machine, settings=limits)
