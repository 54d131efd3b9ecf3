"""Stacks opened and closed for ever, and one stack under jobs that fail: what the process holds stays the same."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import random
import shutil
import statistics
from pathlib import Path
from typing import Any

from support_stack import PLAIN, Engine, disk_tier, keys, opened, parts_of, stack_file, whole
from support_stack_tiers import LOAD, STORE

from faults.machine.belongings import belongings, left_behind
from kvtier.policy import POLICIES
from kvtier.types.keys import RequestId
from kvtier_fs.io.uring import probe_uring
from kvtier_fs.testing import FaultyIO, IOFault, IOFaultKind, seeded
from tests.shutdown.test_leaks import lives

LIVES_AT_ONCE = 12
WARM_LIVES = 12
JOBS_FOR_AN_OPEN = 100
JOBS_AT_ONCE = 1000
TASKS = 8
BYTES_PER_LIFE_MAX = 4_000
"""Growth of resident memory, the median of batches."""
BYTES_PER_JOB_MAX = 16
FAULTS = (
    (0.01, IOFault(IOFaultKind.ERROR)),
    (0.01, IOFault(IOFaultKind.SHORT)),
    (0.01, IOFault(IOFaultKind.LOSE)),
    (0.01, IOFault(IOFaultKind.MISDIRECT)),
)


def resident_bytes() -> int:
    """Resident memory of this process, without what only waits to be collected or given back to the system."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


class Growth:
    """Growth of resident memory in batches of equal work."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._last = resident_bytes()

    def begin(self) -> None:
        """A batch begins here."""
        self._last = resident_bytes()

    def end(self) -> None:
        """A batch ends here, and the next begins."""
        now = resident_bytes()
        self._steps.append(now - self._last)
        self._last = now

    @property
    def batches(self) -> int:
        return len(self._steps)

    @property
    def p50(self) -> int:
        """The median growth of a batch, in bytes."""
        return int(statistics.median(self._steps)) if self._steps else 0

    @property
    def total(self) -> int:
        return sum(self._steps)


async def opens(budget: Any, tally: Any) -> None:
    """Open, use, cancel, misuse and close stacks; every other batch through io_uring where there is any."""
    rng = random.Random(budget.seed)
    engines = ["threads"] if probe_uring() else ["threads", "io_uring"]
    for engine in engines:
        await lives(WARM_LIVES, rng, budget.folder / engine, engine)
    before = belongings()
    growth = {engine: Growth() for engine in engines}
    for number in range(-(-budget.count // LIVES_AT_ONCE)):
        engine = engines[number % len(engines)]
        growth[engine].begin()
        await lives(LIVES_AT_ONCE, rng, budget.folder / engine, engine)
        growth[engine].end()
        tally.iterations += LIVES_AT_ONCE
        tally.notes[f"stacks opened, {engine}"] += LIVES_AT_ONCE
        left = left_behind(before)
        tally.leaks += len(left)
        tally.expect(not left, f"after {tally.iterations} lives were left: {left}")
    for engine, grown in growth.items():
        per_life = grown.p50 // LIVES_AT_ONCE
        tally.notes[f"resident growth of a life, p50 bytes, {engine}"] = per_life
        tally.notes[f"resident growth in all, KiB, {engine}"] = grown.total >> 10
        if grown.batches >= 10:
            tally.leaks += per_life > BYTES_PER_LIFE_MAX
            tally.expect(per_life <= BYTES_PER_LIFE_MAX, f"a life over {engine} costs {per_life} bytes")


async def jobs(budget: Any, tally: Any) -> None:
    """One stack of either layout, loads and stores without end over a disk that fails one request in thirty."""
    count = budget.count * (JOBS_FOR_AN_OPEN if budget.long else JOBS_FOR_AN_OPEN // 2)
    for layout in ("slab", "files"):
        await _Load(budget, tally, layout).run(count // 2)


class _Load:
    """Several tasks at once on one stack; every block that counts as loaded is compared."""

    def __init__(self, budget: Any, tally: Any, layout: str) -> None:
        self.rng, self.tally, self.layout = random.Random(f"{budget.seed} {layout}"), tally, layout
        self.root: Path = budget.folder / f"jobs-{layout}"
        self.engine = Engine(PLAIN, 8 * TASKS)
        self.names = keys(96)
        self.requests = 0
        self.io = FaultyIO(seeded(budget.seed, FAULTS))

    async def run(self, count: int) -> None:
        size = {"slab": 1 << 20, "files": 2 << 20}[self.layout]
        policy = self.rng.choice(list(POLICIES))
        self.tally.notes[f"rounds with {policy}"] += 1
        disk = disk_tier(self.layout, self.root, capacity=size, name="fs")
        slab = {"policy": policy} if self.layout == "slab" else {}
        parts = parts_of(stack_file(PLAIN, 24, disk | slab, cpu={"policy": policy}), self.engine)
        parts.tiers[-1] = self.io.tier(parts.tiers[-1].options)
        async with opened(parts) as stack:
            await self._batch(stack, min(count, JOBS_AT_ONCE))
            before, growth = belongings(), Growth()
            done = JOBS_AT_ONCE
            while done < count:
                await self._batch(stack, min(count - done, JOBS_AT_ONCE))
                done += JOBS_AT_ONCE
                growth.end()
                left = left_behind(before)
                self.tally.leaks += len(left)
                self.tally.expect(not left, f"{self.layout}: after {done} jobs were left: {left}")
            stats = stack.stats().tiers["fs"]
            self.tally.notes["blocks that failed or were refused"] += stats.failed + stats.corrupt + stats.missing
        self.tally.notes["requests that were made to fail"] += sum(self.io.injected.values())
        if growth.batches >= 4:
            per_job = growth.p50 // JOBS_AT_ONCE
            self.tally.notes[f"resident growth of 1000 jobs, p50 bytes, {self.layout}"] = (
                growth.p50 * 1000 // JOBS_AT_ONCE
            )
            self.tally.leaks += per_job > BYTES_PER_JOB_MAX
            self.tally.expect(per_job <= BYTES_PER_JOB_MAX, f"{self.layout}: a job costs {per_job} bytes")
        shutil.rmtree(self.root)

    async def _batch(self, stack: Any, count: int) -> None:
        shares = [count // TASKS] * TASKS
        await asyncio.gather(*(self._task(stack, number, share) for number, share in enumerate(shares)))
        assert await stack.drain(60), "a batch was never drained"
        stack.take_events()  # as an embedder does; events that nobody takes are kept, up to a bound
        stack.check_integrity()

    async def _task(self, stack: Any, number: int, count: int) -> None:
        for _ in range(count):
            one = whole(self.rng.sample(self.names, 4), 8 * number)
            self.requests += 1
            request = stack.request(RequestId(str(self.requests)), one.keys)
            if self.rng.random() < 0.4:
                self.engine.compute(one)
                result = await stack.run(stack.job(STORE, [one]))
                self.tally.notes["store jobs"] += 1
            else:
                result = await stack.run(stack.job(LOAD, [one]))
                wrong = self.engine.wrong(one, result.outcomes[0])
                self.tally.wrong_bytes += len(wrong)
                self.tally.expect(not wrong, f"{self.layout}: {wrong[:2]}")
                self.tally.notes["load jobs"] += 1
                self.tally.notes["blocks loaded and compared"] += sum(outcome.ok for outcome in result.outcomes[0])
            request.end(self.requests % 500)


def leaks_and_soak(budget: Any, tally: Any) -> Any:
    """`count` stacks opened and closed, then a hundred (in the short run fifty) times as many jobs with errors."""
    asyncio.run(opens(budget, tally))
    asyncio.run(jobs(budget, tally))
    tally.expect(tally.notes["requests that were made to fail"] > 0, "no request was made to fail")
    return tally
