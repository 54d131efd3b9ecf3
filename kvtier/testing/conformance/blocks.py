"""Blocks in and out, byte for byte, one outcome for each; many jobs at once, cancelled ones, and a tier that closes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvtier.errors import UsageError
from kvtier.testing.conformance.base import REFUSED, ConformanceBase, make_keys
from kvtier.testing.driver import Driver
from kvtier.testing.trace import in_fresh_loop, turns
from kvtier.tier.contract import AnswersLookups, LookupResult
from kvtier.types.jobs import BlockStatus, DropReason, JobKind, JobResult, RowGroup, TransferJob
from kvtier.types.keys import GroupIndex, JobId, OffloadKey, make_key

HASH_BYTES = (1, 7, 8, 20, 32, 36, 64, 255, 3000)


class BlockTests(ConformanceBase):
    """Storing and loading."""

    @in_fresh_loop
    async def test_blocks_of_every_group_come_back_byte_for_byte(self, tmp_path: Path) -> None:
        rng = random.Random(3)
        async with self.opened(tmp_path) as driver:
            names = self.names(self.per_group)
            assert all(outcome.ok for outcome in (await driver.store(names)).values())
            for _ in range(4):
                wanted = rng.sample(names, rng.randint(1, len(names)))
                rows = rng.sample(range(self.num_rows), len(wanted))
                outcomes = await driver.load(wanted, rows)
                assert {outcome.status for outcome in outcomes.values()} == {BlockStatus.LOADED}, outcomes

    @in_fresh_loop
    async def test_jobs_of_one_block_come_back_too(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as driver:
            for key in self.names(2):
                assert (await driver.store([key], [self.num_rows - 1]))[key].ok
            for key in self.names(2):
                assert (await driver.load([key], [0]))[key].status is BlockStatus.LOADED

    @in_fresh_loop
    async def test_a_store_changes_no_row_and_a_load_only_its_own(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as driver:
            names = self.names(2)
            job = driver.store_job(names)
            before = driver.rows.view.copy()
            driver.stored(job, await driver.tier.store(job))
            assert np.array_equal(driver.rows.view, before), "a store changed a row"
            rows = list(range(1, 2 * len(names), 2))[: len(names)]
            job = driver.load_job(names, rows)
            before = driver.rows.view.copy()
            driver.loaded(job, await driver.tier.load(job))
            others = [row for row in range(self.num_rows) if row not in rows]
            assert np.array_equal(driver.rows.view[others], before[others]), "a load changed a row it was not given"

    @in_fresh_loop
    async def test_a_larger_alignment_of_the_stack_is_respected(self, tmp_path: Path) -> None:
        for factor in (2, 3):
            (tmp_path / str(factor)).mkdir()
            async with self.opened(tmp_path / str(factor), factor=factor) as driver:
                names = self.names(self.per_group)
                assert all(outcome.ok for outcome in (await driver.store(names)).values())
                outcomes = await driver.load(names)
                assert {outcome.status for outcome in outcomes.values()} == {BlockStatus.LOADED}, outcomes

    @in_fresh_loop
    async def test_a_job_says_how_much_it_moved(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as driver:
            geometry, names = driver.geometry, self.names(2)
            least = sum(2 * geometry.kv_bytes_per_offloaded_block(group) for group in range(geometry.num_groups))
            most = sum(2 * geometry.aligned_bytes(group) for group in range(geometry.num_groups))
            job = driver.store_job(names)
            stored = await driver.tier.store(job)
            driver.stored(job, stored)
            job = driver.load_job(names)
            loaded = await driver.tier.load(job)
            driver.loaded(job, loaded)
            for result in (stored, loaded):
                assert result.ok
                assert least <= result.bytes_moved <= most
                assert result.seconds >= 0

    @in_fresh_loop
    async def test_a_job_of_nothing_moves_nothing(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as driver:
            nothing = RowGroup(GroupIndex(0), (), ())
            for number, kind in enumerate(JobKind, start=1):
                for groups in ((), (nothing,)):
                    job = TransferJob(JobId(number), kind, groups, None, driver.epoch)
                    result = await (driver.tier.load if kind is JobKind.LOAD else driver.tier.store)(job)
                    assert (result.job_id, result.outcomes, result.bytes_moved) == (job.job_id, ((),) * len(groups), 0)

    @in_fresh_loop
    async def test_what_was_never_stored_is_no_hit_and_harms_no_neighbour(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as driver:
            known, unknown = make_keys(3), make_keys(3, start=1000)
            assert all(outcome.ok for outcome in (await driver.store(known)).values())
            driver.store_job(unknown)  # gives them places, but nothing is stored there
            mixed = [key for pair in zip(known, unknown, strict=True) for key in pair]
            outcomes = await driver.load(mixed)
            assert [outcomes[key].status for key in known] == [BlockStatus.LOADED] * 3
            for key in unknown:
                expected = REFUSED if driver.owned else (BlockStatus.MISSING,)
                assert outcomes[key].status in expected, f"an unknown key was {outcomes[key].status}"

    @in_fresh_loop
    async def test_lookups_tell_present_from_absent(self, tmp_path: Path) -> None:
        """Of shared tiers only; the control plane answers for owned ones."""
        async with self.opened(tmp_path) as driver:
            if not isinstance(driver.tier, AnswersLookups):
                return
            known, unknown = self.names(2), self.names(2, start=1000)
            assert all(outcome.ok for outcome in (await driver.store(known)).values())
            answers = await driver.tier.lookup([*known, *unknown])
            assert list(answers) == [LookupResult.HIT] * len(known) + [LookupResult.MISS] * len(unknown)
            assert list(await driver.tier.lookup([])) == []

    @in_fresh_loop
    async def test_a_slot_gives_only_its_own_key_and_generation(self, tmp_path: Path) -> None:
        """For owned tiers; in a shared one keys suffice, and this stores a key again."""
        async with self.opened(tmp_path) as driver:
            first, second, third = make_keys(3)
            assert all(outcome.ok for outcome in (await driver.store([first, second, third])).values())
            if not driver.owned:
                assert (await driver.store([second]))[second].ok
            else:
                slot, generation = driver.directory[second]
                for wrong in (generation + 1000, generation - 1):
                    driver.directory[second] = slot, wrong
                    outcomes = await driver.load([first, second, third])
                    assert outcomes[second].status in REFUSED, "a block of another generation was loaded"
                    assert all(outcomes[key].ok for key in (first, third)), "its neighbours are none the worse"
                stranger = make_keys(1, start=2000)[0]
                driver.directory[stranger] = slot, generation
                assert (await driver.load([stranger]))[stranger].status in REFUSED, "another key's block was loaded"
                driver.directory[second] = slot, generation
                del driver.directory[stranger]
            outcomes = await driver.load([first, second, third])
            assert {outcome.status for outcome in outcomes.values()} == {BlockStatus.LOADED}, outcomes

    @in_fresh_loop
    async def test_a_slot_that_is_used_again_holds_the_new_block_only(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as driver:
            old = self.names(self.per_group)
            assert all(outcome.ok for outcome in (await driver.store(old)).values())
            places = {key: driver.directory[key] for key in old}
            for key in old:
                driver.evict(key)
            new = self.names(self.per_group, start=500)
            assert all(outcome.ok for outcome in (await driver.store(new)).values())
            outcomes = await driver.load(new)
            assert {outcome.status for outcome in outcomes.values()} == {BlockStatus.LOADED}, outcomes
            reused = {slot for slot, _ in driver.directory.values()}
            gone = [key for key in old if places[key][0] in reused]
            assert gone or not driver.owned
            if driver.owned:
                driver.directory.update({key: places[key] for key in gone})
                for key, outcome in (await driver.load(gone)).items():
                    assert not outcome.ok, f"key {key.hex()} was loaded from a slot that was used again"

    @in_fresh_loop
    async def test_keys_of_any_length_come_back_or_are_dropped_as_too_long(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as driver:
            names = [make_key(bytes(range(1, 8)) * length, 0)[-(length + 4) :] for length in HASH_BYTES]
            keys = [OffloadKey(name) for name in names]
            for key in keys:
                outcome = (await driver.store([key]))[key]
                if outcome.ok:
                    assert (await driver.load([key]))[key].status is BlockStatus.LOADED
                else:
                    assert outcome.reason is DropReason.KEY_TOO_LONG, f"a key of {len(key)} bytes was {outcome}"
                    assert len(key) > 36, "engines use keys as short as this"

    @in_fresh_loop
    async def test_a_job_past_its_deadline_ends_and_tells_the_truth(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as driver:
            names = self.names(2)
            assert all(outcome.ok for outcome in (await driver.store(names)).values())
            job = replace(driver.load_job(names), deadline=driver.context.clock() - 1.0)
            outcomes = driver.loaded(job, await driver.tier.load(job))
            assert {outcome.status for outcome in outcomes.values()} <= {BlockStatus.LATE, BlockStatus.LOADED}
            others = self.names(1, start=50)
            job = replace(driver.store_job(others), deadline=driver.context.clock() - 1.0)
            driver.stored(job, await driver.tier.store(job))
            kept = [key for key in [*names, *others] if key in driver.directory]
            assert set(names) <= set(kept)
            assert all(outcome.ok for outcome in (await driver.load(kept)).values()), "later jobs are none the worse"


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
                    assert outcome.ok or outcome.status in REFUSED, f"a block of a cancelled store was {outcome.status}"
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
