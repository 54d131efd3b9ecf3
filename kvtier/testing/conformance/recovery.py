"""Tests of the blocks that outlive a tier, each in its namespace and epoch, and nothing that was reset or damaged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.testing.conformance.base import PLACE, ConformanceBase, make_keys
from kvtier.testing.driver import Driver
from kvtier.testing.trace import in_fresh_loop
from kvtier.tier.contract import AnswersLookups, LookupResult, Resettable
from kvtier.types.jobs import BlockStatus, JobResult
from kvtier.types.keys import OffloadKey


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
                    assert outcome.status in (BlockStatus.MISSING, BlockStatus.CORRUPT, BlockStatus.FAILED), outcome

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
    async def test_damaged_blocks_are_noticed(self, tmp_path: Path) -> None:
        names = self.names(2)
        async with self.opened(tmp_path) as driver:
            assert all(outcome.ok for outcome in (await driver.store(names)).values())
        if not self.damage(tmp_path / PLACE):
            pytest.skip("this tier says that nothing of it can be damaged from outside")
        async with self.opened(tmp_path) as driver:
            held = await present(driver, names)
            kept = [key for key, there in zip(names, held, strict=True) if there]
            for key, outcome in (await driver.load(kept)).items():
                assert not outcome.ok, f"key {key.hex()} was loaded although it was damaged"
            assert all(outcome.ok for outcome in (await driver.store(names)).values())
            assert all(outcome.ok for outcome in (await driver.load(names)).values()), "stored anew they are good again"

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
