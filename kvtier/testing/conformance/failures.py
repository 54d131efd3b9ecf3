"""Many jobs at once, jobs that are cancelled, a tier that closes under its jobs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvtier.errors import UsageError
from kvtier.testing.conformance.base import ConformanceBase, make_keys
from kvtier.testing.driver import Driver
from kvtier.testing.trace import in_fresh_loop, turns
from kvtier.types.jobs import BlockStatus, JobKind, JobResult, TransferJob
from kvtier.types.keys import OffloadKey

SENTINEL = 0x55
CANCELLATIONS = 24
TURNS_MAX = 12


async def cancelled(driver: Driver, job: TransferJob, rng: random.Random) -> JobResult | None:
    """Run a job and cancel it after some turns of the loop, more than once. None if it was cancelled indeed."""
    call = driver.tier.load if job.kind is JobKind.LOAD else driver.tier.store
    task = asyncio.create_task(call(job))
    for _ in range(rng.randint(1, 3)):
        await turns(rng.randrange(TURNS_MAX))
        task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        return None


class FailureTests(ConformanceBase):
    """Concurrency and cancellation."""

    @in_fresh_loop
    async def test_jobs_run_side_by_side_without_mixing(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as driver:
            quarter = self.num_rows // 4
            rows = [list(range(i * quarter, (i + 1) * quarter)) for i in range(4)]
            parts = [make_keys(quarter, i % len(self.layout.groups), start=100 * i) for i in range(4)]
            jobs = [driver.store_job(part, place) for part, place in zip(parts, rows, strict=True)]
            for job, result in zip(jobs, await asyncio.gather(*map(driver.tier.store, jobs)), strict=True):
                assert all(outcome.ok for outcome in driver.stored(job, result).values())
            new = make_keys(quarter, 0, start=900)
            loads = [driver.load_job(part, place) for part, place in zip(parts[:3], rows, strict=False)]
            store = driver.store_job(new, rows[3])
            results = await asyncio.gather(*map(driver.tier.load, loads), driver.tier.store(store))
            for job, result in zip(loads, results, strict=False):
                assert all(outcome.ok for outcome in driver.loaded(job, result).values())
            assert all(outcome.ok for outcome in driver.stored(store, results[3]).values())
            outcomes = await driver.load(new)
            assert all(outcome.ok for outcome in outcomes.values())

    @in_fresh_loop
    async def test_one_block_can_be_loaded_into_several_rows_at_once(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as driver:
            key = make_keys(1)[0]
            assert (await driver.store([key]))[key].ok
            jobs = [driver.load_job([key], [row]) for row in range(4)]
            for job, result in zip(jobs, await asyncio.gather(*map(driver.tier.load, jobs)), strict=True):
                assert driver.loaded(job, result)[key].ok

    @in_fresh_loop
    async def test_rows_of_a_cancelled_load_are_written_no_more_once_it_has_returned(self, tmp_path: Path) -> None:
        rng = random.Random(11)
        async with self.opened(tmp_path) as driver:
            names = self.names(self.per_group)
            assert all(outcome.ok for outcome in (await driver.store(names)).values())
            seen = set()
            for _ in range(CANCELLATIONS):
                job = driver.load_job(names)
                result = await cancelled(driver, job, rng)
                seen.add(result is None)
                if result is not None:
                    driver.loaded(job, result)
                driver.rows.view[:] = SENTINEL
                await turns(2 * TURNS_MAX)
                assert bool((driver.rows.view == SENTINEL).all()), "a row was written after its load had returned"
            assert True in seen, "no load was cancelled"
            assert all(outcome.ok for outcome in (await driver.load(names)).values()), "later loads are none the worse"
            driver.rows.view[:] = SENTINEL
            await driver.tier.close()
            assert bool((driver.rows.view == SENTINEL).all()), "a row was written after the tier was closed"

    @in_fresh_loop
    async def test_rows_of_a_cancelled_store_are_read_no_more_once_it_has_returned(self, tmp_path: Path) -> None:
        rng = random.Random(12)
        async with self.opened(tmp_path) as driver:
            keep = self.names(1, start=700)
            assert all(outcome.ok for outcome in (await driver.store(keep)).values())
            names = self.names(self.per_group - 1)
            for _ in range(CANCELLATIONS):
                job = driver.store_job(names)
                result = await cancelled(driver, job, rng)
                driver.rows.view[:] = SENTINEL
                if result is not None:
                    driver.stored(job, result)
                await turns(rng.randrange(TURNS_MAX))
                known = [key for key in names if key in driver.directory]
                for outcome in (await driver.load(known)).values():
                    assert outcome.ok or outcome.status in (
                        BlockStatus.MISSING,
                        BlockStatus.CORRUPT,
                        BlockStatus.FAILED,
                    ), f"a block of a cancelled store was {outcome.status}"
            assert all(outcome.ok for outcome in (await driver.load(keep)).values()), "other blocks are none the worse"
            assert all(outcome.ok for outcome in (await driver.store(names)).values())
            assert all(outcome.ok for outcome in (await driver.load(names)).values())

    @in_fresh_loop
    async def test_places_of_a_cancelled_store_can_be_used_at_once(self, tmp_path: Path) -> None:
        rng = random.Random(13)
        async with self.opened(tmp_path) as driver:
            for round_number in range(CANCELLATIONS // 2):
                old = self.names(self.per_group, start=1000 * round_number)
                job = driver.store_job(old)
                result = await cancelled(driver, job, rng)
                for key in old:
                    driver.evict(key)
                new = self.names(self.per_group, start=1000 * round_number + 500)
                assert all(outcome.ok for outcome in (await driver.store(new)).values()), f"after {result}"
                outcomes = await driver.load(new)
                assert all(outcome.ok for outcome in outcomes.values()), f"late writes of a cancelled store: {outcomes}"
                for key in new:
                    driver.evict(key)

    @in_fresh_loop
    async def test_closing_ends_every_job_with_an_outcome_for_each_block(self, tmp_path: Path) -> None:
        rng = random.Random(14)
        for _ in range(4):
            async with self.opened(tmp_path) as driver:
                half = self.num_rows // 2
                first, second = make_keys(half), make_keys(half, 1, start=100)
                assert all(outcome.ok for outcome in (await driver.store(first)).values())
                jobs = [driver.load_job(first, range(half)), driver.store_job(second, range(half, 2 * half))]
                calls = [driver.tier.load(jobs[0]), driver.tier.store(jobs[1])]
                tasks = [asyncio.create_task(call) for call in calls]
                await turns(rng.randrange(1, TURNS_MAX))
                await driver.tier.close()
                after = driver.rows.view.copy()
                results = await asyncio.gather(*tasks, return_exceptions=True)
                self._check_ended(driver, jobs, results, (first, second))
                assert np.array_equal(driver.rows.view, after), "a row was written after the tier was closed"

    def _check_ended(
        self,
        driver: Driver,
        jobs: Sequence[TransferJob],
        results: Sequence[JobResult | BaseException],
        keys: Sequence[Sequence[OffloadKey]],
    ) -> None:
        for job, result, names in zip(jobs, results, keys, strict=True):
            if isinstance(result, UsageError):
                continue  # it had not begun when the tier was closed
            assert isinstance(result, JobResult), f"a job ended with {result!r}"
            check = driver.loaded if job.kind is JobKind.LOAD else driver.stored
            assert len(check(job, result)) == len(names)
