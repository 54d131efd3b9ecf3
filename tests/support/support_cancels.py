"""Loads and stores cancelled at any await, by failing groups, and under loops that end; whose rows are watched."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from support_shutdown import Lives, right_bytes_or_misses
from support_stack import Engine, fs, keys, load, opened, parts_of, stack_file, statuses, store, whole

from kvtier.control.tiers.slot_table import FREE
from kvtier.policy import POLICIES
from kvtier.stack import TierStack
from tests.stack.test_cancel import LARGE, LOAD, STORE, all_rows_come_back, turns

BLOCKS = 72
NAMES = keys(24)
PER_STACK = 50
STACKS_MORE = 12
"""Stacks attacked beyond the count until one had I/O to look at: one of 32 rows has every block in memory."""
LOOPS_CLOSED_SHARE = 0.03
TURNS_MAX = 60
LOOKED_AT = "rows with I/O under way when looked at"


class Rows:
    """Watches a stack's lower tier: which CPU rows its jobs hold, and that none of them is free meanwhile."""

    def __init__(self, tally: Any) -> None:
        self._tally = tally
        self._held: dict[int, list[int]] = {}
        self._stack: TierStack | None = None

    def watch(self, tier: Any) -> None:
        """Stand between the stack and this tier."""
        tier.load, tier.store = self._noting(tier.load), self._noting(tier.store)

    def of(self, stack: TierStack) -> None:
        self._stack = stack

    def _noting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        async def noted(job: Any) -> Any:
            self._held[job.job_id] = [int(row) for group in job.groups for row in group.rows]
            try:
                return await call(job)
            finally:
                del self._held[job.job_id]

        return noted

    def look(self, when: str) -> None:
        """Rows with I/O under way must not be free."""
        assert self._stack is not None
        table = self._stack._assembled.plane.control.cpu.table
        rows = [row for held in self._held.values() for row in held]
        free = [row for row in rows if table.state[row] == FREE]
        self._tally.notes[LOOKED_AT] += len(rows)
        self._tally.wrong_bytes += len(free)
        self._tally.expect(not free, f"{when}: rows {free} are free while their I/O goes on")


class Cancels:
    """One stack after another, each attacked `PER_STACK` times."""

    def __init__(self, budget: Any, tally: Any) -> None:
        self.rng, self.tally, self.folder = random.Random(budget.seed), tally, budget.folder
        self.engine = Engine(LARGE, BLOCKS)
        self.number = 0

    async def run(self, count: int) -> None:
        """Attack `count` times, and on until I/O was once under way when it was looked at: few calls may meet none."""
        counts = [min(PER_STACK, count - first) for first in range(0, count, PER_STACK)]
        for turn, attacks in enumerate([*counts, *counts[:1] * STACKS_MORE]):
            if turn >= len(counts) and self.tally.notes[LOOKED_AT]:
                break
            rows = self.rng.choice((4, 32))
            await self._one_stack(self.folder / f"r{turn % 2}", rows, attacks)

    async def _one_stack(self, root: Path, rows: int, count: int) -> None:
        watch = Rows(self.tally)
        policy = self.rng.choice(list(POLICIES))
        self.tally.notes[f"stacks with {policy}"] += 1
        disk = fs(root, capacity=16 << 20, policy=policy)
        parts = parts_of(stack_file(LARGE, rows, disk, cpu={"policy": policy}), self.engine)
        watch.watch(parts.tiers[-1])
        async with opened(parts) as stack:
            watch.of(stack)
            for start in range(0, len(NAMES), 4):
                await store(stack, self.engine, whole(NAMES[start : start + 4]))
                assert await stack.drain(20)
            for _ in range(count):
                kind = self.rng.choice((self._load, self._load, self._store, self._group))
                await kind(stack, watch)
                self.tally.iterations += 1
            assert statuses(await load(stack, self.engine, whole(NAMES))) == ["loaded"] * len(NAMES)
            await all_rows_come_back(stack, self.engine, rows, f"fresh{root}")

    async def _moment(self, task: asyncio.Task[Any]) -> None:
        """Let a task run to its next await to be tried, or for a random time of up to 50 ms."""
        self.number += 1
        if self.rng.random() < 0.3:
            await asyncio.wait((task,), timeout=self.rng.random() * 0.05)
        else:
            await turns(self.number % TURNS_MAX)

    async def _cancelled(self, task: asyncio.Task[Any], watch: Rows) -> None:
        await self._moment(task)
        under_way = not task.done()
        task.cancel()
        if self.rng.random() < 0.3:
            await turns(self.rng.randint(0, 5))
            task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        self.tally.notes["cancelled under way"] += under_way and task.cancelled()
        watch.look("after a cancel")

    async def _load(self, stack: TierStack, watch: Rows) -> None:
        chosen = self.rng.sample(NAMES, self.rng.randint(1, 24))
        one = whole(chosen, self.rng.randint(0, 40))
        before = self.engine.snapshot()
        task = asyncio.create_task(stack.run(stack.job(LOAD, [one])))
        await self._cancelled(task, watch)
        await self._untouched([one], before)
        watch.look("after a cancelled load")

    async def _untouched(self, groups: list[Any], before: list[np.ndarray]) -> None:
        """No byte changes once a load has raised, none beside its blocks ever did."""
        at_once = self.engine.snapshot()
        await turns(self.rng.randint(0, 40))
        same = all(np.array_equal(a, b) for a, b in zip(at_once, self.engine.snapshot(), strict=True))
        beside = self.engine.untouched(before, groups)
        self.tally.wrong_bytes += (not same) + (not beside)
        self.tally.expect(same and beside, "GPU blocks changed after a cancelled load had raised, or beside it")

    async def _store(self, stack: TierStack, watch: Rows) -> None:
        names = keys(self.rng.randint(1, 8), start=self.rng.randint(100, 160))
        one = whole(names, 40)
        self.engine.compute(one)
        await self._cancelled(asyncio.create_task(stack.run(stack.job(STORE, [one]))), watch)
        self.engine.wipe()
        await turns(self.rng.randint(0, 10))
        watch.look("after a cancelled store")
        await self._compare(stack, whole(names, 40))

    async def _compare(self, stack: TierStack, one: Any) -> None:
        """What a cancelled store left is whole blocks or none."""
        result = await stack.run(stack.job(LOAD, [one]))
        wrong = self.engine.wrong(one, result.outcomes[0])
        self.tally.wrong_bytes += len(wrong)
        self.tally.expect(not wrong, f"a cancelled store left wrong bytes: {wrong[:2]}")
        self.tally.notes["blocks compared"] += sum(outcome.ok for outcome in result.outcomes[0])

    async def _group(self, stack: TierStack, watch: Rows) -> None:
        """Three loads and a failure in one TaskGroup."""
        groups = [whole(self.rng.sample(NAMES, 12), 24 * i) for i in range(3)]
        before = self.engine.snapshot()

        async def fail_soon() -> None:
            await turns(self.rng.randint(0, TURNS_MAX))
            raise ValueError("one of us failed")

        try:
            async with asyncio.TaskGroup() as group:
                for one in groups:
                    group.create_task(stack.run(stack.job(LOAD, [one])))
                group.create_task(fail_soon())
        except* ValueError:
            self.tally.notes["groups that failed"] += 1
        watch.look("after a failed group")
        await self._untouched(groups, before)


def asyncio_cancel(budget: Any, tally: Any) -> Any:
    """Cancel `count` calls, a few of them by closing the loop under a whole process's transfers."""
    closed = max(1, int(budget.count * LOOPS_CLOSED_SHARE))
    _loops_closed(budget, tally, closed)
    asyncio.run(Cancels(budget, tally).run(budget.count - closed))
    # How many calls are under way depends on how fast the machine ends them: a twentieth shows that the attack works.
    enough = tally.iterations // 20
    tally.expect(tally.notes["cancelled under way"] > enough, "hardly a call was cancelled under way")
    tally.expect(tally.notes[LOOKED_AT] > 0, "no row had I/O under way when looked at")
    return tally


def _loops_closed(budget: Any, tally: Any, count: int) -> None:
    lives = Lives(budget.folder)
    for number in range(count):
        root = budget.folder / f"loop-{number}"
        ended = lives.live("loop_closed", root, "threads", "exit")
        tally.hangs += ended.status is None
        tally.expect(ended.status == 3, f"a loop was closed under transfers: {ended}")
        tally.notes["transfers under way when the loop closed"] += ended.said[0]["running"] if ended.said else 0
        tally.notes["blocks compared"] += asyncio.run(_reopened(tally, root))
        tally.iterations += 1


async def _reopened(tally: Any, root: Path) -> int:
    try:
        return await right_bytes_or_misses(root, "threads")
    except AssertionError as broken:
        tally.wrong_bytes += 1
        tally.expect(False, f"{root.name}: {broken!r}")
        return 0
