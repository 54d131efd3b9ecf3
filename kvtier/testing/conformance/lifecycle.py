"""A tier's life: constructed without I/O, opened once, closed as often as you like, and gone without a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import UsageError
from kvtier.testing.conformance.base import PLACE, ConformanceBase
from kvtier.testing.driver import Driver
from kvtier.testing.trace import in_fresh_loop, leaving_no_trace, refusing_io
from kvtier.tier.contract import AnswersLookups, LoadStore, Opened
from kvtier.types.jobs import BlockStatus, JobResult, TransferJob


async def _refused(tier: LoadStore, job: TransferJob) -> None:
    """A job on a closed tier ends as a UsageError or drops every block; it never moves one."""
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
            await _refused(driver.tier, job)
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
