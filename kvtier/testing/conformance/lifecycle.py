"""Tests of a tier's life: made without I/O, opened once, closed any number of times, gone without a trace.

Blocks that outlive a tier are found in their namespace and epoch, and nothing that was reset or damaged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import UsageError
from kvtier.testing.conformance.base import PLACE, REFUSED, ConformanceBase, make_keys
from kvtier.testing.driver import Driver
from kvtier.testing.trace import in_fresh_loop, leaving_no_trace, refusing_io
from kvtier.tier.contract import AnswersLookups, LoadStore, LookupResult, Opened, Resettable
from kvtier.types.jobs import BlockStatus, JobResult, TransferJob
from kvtier.types.keys import OffloadKey


async def _check_refused(tier: LoadStore, job: TransferJob) -> None:
    """Check that a job on a closed tier ends as a UsageError or drops every block; it never moves one."""
    for call in (tier.load, tier.store):
        try:
            result: JobResult = await call(job)
        except UsageError:
            continue
        statuses = {outcome.status for group in result.outcomes for outcome in group}
        assert statuses <= {BlockStatus.DROPPED}, f"a closed tier answered with {statuses}"


class LifecycleTests(ConformanceBase):
    """Opening and closing."""

    def test_a_constructor_does_no_io(self, tmp_path: Path) -> None:
        place = tmp_path / PLACE
        self.make(place)  # what is imported on first use has been imported now
        with leaving_no_trace(), refusing_io():
            self.make(place)

    @in_fresh_loop
    async def test_an_open_tier_says_what_it_is(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as driver:
            opened, geometry = driver.opened, driver.geometry
            assert opened.capacity_bytes > 0
            assert (opened.space is None) == (isinstance(driver.tier, AnswersLookups)), "only owned tiers have slots"
            assert not len(opened.recovered.keys), "nothing was stored yet"
            if opened.space is not None:
                space = opened.space
                assert len(space.slot_bytes) == geometry.num_groups
                for group, size in enumerate(space.slot_bytes):
                    assert geometry.aligned_bytes(group) <= size <= space.region_bytes
                assert space.num_regions * space.region_bytes <= opened.capacity_bytes

    @in_fresh_loop
    async def test_closing_is_idempotent_and_needs_no_opening(self, tmp_path: Path) -> None:
        never_opened = self.make(tmp_path / PLACE)
        await never_opened.close()
        await never_opened.close()
        async with self.opened(tmp_path) as driver:
            await driver.tier.close()
            await driver.tier.close()

    @in_fresh_loop
    async def test_a_tier_is_opened_once(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as driver:
            with pytest.raises(UsageError):
                await driver.tier.open(driver.context)
            names = self.names(1)
            assert all(outcome.ok for outcome in (await driver.store(names)).values()), "it goes on as before"
            await driver.tier.close()
            with pytest.raises(UsageError):
                await driver.tier.open(driver.context)

    @in_fresh_loop
    async def test_a_tier_without_rows_is_refused(self, tmp_path: Path) -> None:
        tier = self.make(tmp_path / PLACE)
        context = await self.context(tier)
        object.__setattr__(context, "rows", None)
        with pytest.raises(UsageError):
            await tier.open(context)
        await tier.close()

    @in_fresh_loop
    async def test_nothing_moves_before_open_or_after_close(self, tmp_path: Path) -> None:
        unopened = self.make(tmp_path / "another")
        async with self.opened(tmp_path) as driver:
            assert all(outcome.ok for outcome in (await driver.store(self.names(2))).values())
            job = driver.load_job(self.names(2))
            with pytest.raises(UsageError):
                await unopened.load(job)
            with pytest.raises(UsageError):
                await unopened.store(job)
            before = driver.rows.view.copy()
            await driver.tier.close()
            await _check_refused(driver.tier, job)
            assert bool((driver.rows.view == before).all()), "a closed tier wrote into rows"
        await unopened.close()

    @in_fresh_loop
    async def test_many_lives_leave_nothing_behind(self, tmp_path: Path) -> None:
        names = self.names(self.per_group)
        for _ in range(8):
            async with self.opened(tmp_path) as driver:
                assert all(outcome.ok for outcome in (await driver.store(names)).values())
                assert all(outcome.ok for outcome in (await driver.load(names)).values())

    @in_fresh_loop
    async def test_an_open_that_fails_leaves_nothing_behind_and_can_be_closed(self, tmp_path: Path) -> None:
        """The context is broken in a way that any tier must notice late or early: its clock and rows raise."""

        class Broken:
            def __getattr__(self, name: str) -> Any:
                raise RuntimeError("these rows are broken")

        tier = self.make(tmp_path / PLACE)
        context = await self.context(tier)
        object.__setattr__(context, "rows", Broken())
        opened: Opened | None = None
        try:
            opened = await tier.open(context)
        except RuntimeError:
            opened = None
        await tier.close()
        assert opened is None or opened.capacity_bytes > 0
        async with self.opened(tmp_path) as driver:
            assert isinstance(driver, Driver), "the place can be opened afterwards"


async def present(driver: Driver, keys: Sequence[OffloadKey]) -> list[bool]:
    """The keys that an open tier holds: recovered by an owned one, looked up in a shared one."""
    if driver.owned:
        return [key in driver.directory for key in keys]
    assert isinstance(driver.tier, AnswersLookups)
    return [answer is LookupResult.HIT for answer in await driver.tier.lookup(keys)]


class RecoveryTests(ConformanceBase):
    """Reopening, namespaces, reset, damage."""

    @in_fresh_loop
    async def test_what_was_stored_is_found_again_or_not_at_all(self, tmp_path: Path) -> None:
        names = self.names(self.per_group)
        async with self.opened(tmp_path) as driver:
            assert all(outcome.ok for outcome in (await driver.store(names)).values())
            again = names[:2]
            assert all(outcome.ok for outcome in (await driver.store(again)).values()), "stored a second time"
            generations = {key: generation for key, (_, generation) in driver.directory.items()}
        async with self.opened(tmp_path) as driver:
            found = driver.opened.recovered
            assert len(set(found.keys)) == len(found.keys), "each key once"
            assert found.generations.tolist() == sorted(found.generations.tolist()), "from the oldest to the newest"
            assert len(set(found.slots.tolist())) == len(found.keys), "a slot holds one key"
            if driver.owned:
                assert {key: generations[key] for key in found.keys} == {
                    key: generation for key, (_, generation) in driver.directory.items()
                }, "of two copies of a key the newest counts"
            held = await present(driver, names)
            assert all(held) if self.survives_reopen else True
            kept = [key for key, there in zip(names, held, strict=True) if there]
            outcomes = await driver.load(kept) if kept else {}
            assert all(outcome.ok for outcome in outcomes.values()), outcomes
            more = self.names(1, start=300)
            assert all(outcome.ok for outcome in (await driver.store(more)).values()), "and there is room for more"
            assert all(outcome.ok for outcome in (await driver.load(more)).values())

    @in_fresh_loop
    async def test_another_namespace_finds_nothing(self, tmp_path: Path) -> None:
        names = self.names(2)
        async with self.opened(tmp_path) as driver:
            assert all(outcome.ok for outcome in (await driver.store(names)).values())
            directory = dict(driver.directory)
        for other in self.other_namespaces():
            async with self.opened(tmp_path, other) as driver:
                assert not any(await present(driver, names)), f"found in another namespace: {other.manifest()}"
        async with self.opened(tmp_path) as driver:
            held = await present(driver, names)
            assert all(held) if self.survives_reopen else True, "namespaces that only looked have removed nothing"
            kept = [key for key, there in zip(names, held, strict=True) if there]
            assert all(outcome.ok for outcome in (await driver.load(kept)).values())
        for other in self.other_namespaces():
            async with self.opened(tmp_path, other) as driver:
                driver.directory = dict(directory)
                for outcome in (await driver.load(names)).values():
                    assert outcome.status in REFUSED, outcome

    @in_fresh_loop
    async def test_nothing_from_before_a_reset_is_found_after_it(self, tmp_path: Path) -> None:
        old, new = self.names(2), self.names(2, start=400)
        async with self.opened(tmp_path) as driver:
            if not isinstance(driver.tier, Resettable):
                assert not self.survives_reopen, "a tier that outlives the process must be resettable"
                return
            assert all(outcome.ok for outcome in (await driver.store(old)).values())
            await driver.tier.reset(driver.epoch + 1)
            driver.epoch += 1
            for outcome in (await driver.load(old)).values():
                assert not outcome.ok, "a block from before the reset was loaded"
            if not driver.owned:
                assert not any(await present(driver, old))
            for key in old:
                driver.evict(key)
            assert all(outcome.ok for outcome in (await driver.store(new)).values())
            assert all(outcome.ok for outcome in (await driver.load(new)).values())
            epoch = driver.epoch
        async with self.opened(tmp_path) as driver:
            assert not any(await present(driver, old)), "a block from before the reset came back"
            if self.survives_reopen:
                assert driver.opened.epoch == epoch
                assert all(await present(driver, new))
                assert all(outcome.ok for outcome in (await driver.load(new)).values())

    @in_fresh_loop
    async def test_a_store_that_a_reset_overtakes_is_not_found_after_it(self, tmp_path: Path) -> None:
        """Its blocks are those of the epoch that its job names, also where the write ends in the next one."""
        stored = list[OffloadKey]()
        async with self.opened(tmp_path) as driver:
            if not isinstance(driver.tier, Resettable):
                return
            for turns in range(4):
                names = self.names(1, start=500 + 10 * turns)
                stored += names
                storing = asyncio.ensure_future(driver.tier.store(driver.store_job(names)))
                for _ in range(turns):
                    await asyncio.sleep(0)
                driver.epoch += 1
                await driver.tier.reset(driver.epoch)
                await storing
                if not driver.owned:
                    assert not any(await present(driver, stored)), "a block from before the reset is found"
        async with self.opened(tmp_path) as driver:
            assert not any(await present(driver, stored)), "a block from before the reset came back"

    @in_fresh_loop
    async def test_damaged_blocks_are_noticed(self, tmp_path: Path) -> None:
        names = self.names(2)
        async with self.opened(tmp_path) as driver:
            assert all(outcome.ok for outcome in (await driver.store(names)).values())
        if not self.damage(tmp_path / PLACE):
            pytest.skip("nothing of this tier can be damaged from outside")
        async with self.opened(tmp_path) as driver:
            held = await present(driver, names)
            kept = [key for key, there in zip(names, held, strict=True) if there]
            for key, outcome in (await driver.load(kept)).items():
                assert not outcome.ok, f"key {key.hex()} was loaded although it was damaged"
            assert all(outcome.ok for outcome in (await driver.store(names)).values())
            assert all(outcome.ok for outcome in (await driver.load(names)).values()), "stored again they are good"

    @in_fresh_loop
    async def test_two_tiers_at_one_place_see_each_others_blocks(self, tmp_path: Path) -> None:
        """Of shared tiers; an owned one has one owner."""
        if not self.is_shared(tmp_path):
            return
        mine, theirs = make_keys(3), make_keys(3, start=100)
        async with self.opened(tmp_path) as one, self.opened(tmp_path) as other:
            assert all(outcome.ok for outcome in (await one.store(mine)).values())
            assert all(outcome.ok for outcome in (await other.store(theirs)).values())
            for driver in (one, other):
                assert all(await present(driver, [*mine, *theirs]))
                outcomes = await driver.load([*mine, *theirs])
                assert all(outcome.ok for outcome in outcomes.values()), outcomes
            assert isinstance(await self._both_store(one, other, mine[0]), JobResult)

    async def _both_store(self, one: Driver, other: Driver, key: OffloadKey) -> JobResult:
        job = one.store_job([key])
        results = [await one.tier.store(job), await other.tier.store(other.store_job([key]))]
        assert all(result.ok for result in results), "a key that is there may be stored again"
        return results[0]
