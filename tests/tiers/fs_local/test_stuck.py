"""A disk that does not answer: every wait has a deadline, what is stuck is told and kept, and nothing else suffers."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from support_fs import Tier, flat, keys, layout, open_tier, open_when_free, options
from support_stack import until

from kvtier.errors import RootBusyError, RootError, UsageError
from kvtier.testing.trace import leaving_no_trace
from kvtier.types.jobs import LOADED, STORED, DropReason, RegionFormat, dropped
from kvtier_fs import FSOptions
from kvtier_fs.format.region_header import RegionPlan
from kvtier_fs.local.folder import SlabFolder
from kvtier_fs.local.opening import Hooks

STUCK_SECONDS = 30.0
"""A call that nobody thaws goes on after this, so that a failing test ends."""


class Frost:
    """Freezes the file calls of chosen roots that would change the disk, as a frozen file system does."""

    def __init__(self) -> None:
        self.thawed = threading.Event()
        self.thawed.set()
        self.roots: set[str] = set()
        self.waiting = 0

    def freeze(self, *roots: Path) -> None:
        self.roots = {str(root) for root in roots}
        self.thawed.clear()

    def thaw(self) -> None:
        self.thawed.set()

    def hooks(self) -> Hooks:
        return Hooks(folder=lambda path, settings: FrozenFolder(path, settings, self))


class FrozenFolder(SlabFolder):
    """A folder on a disk that may be frozen."""

    def __init__(self, path: str, settings: FSOptions, frost: Frost) -> None:
        super().__init__(path, settings)
        self._frost = frost

    def _answer(self) -> None:
        if self.path in self._frost.roots and not self._frost.thawed.is_set():
            self._frost.waiting += 1
            self._frost.thawed.wait(STUCK_SECONDS)

    def write_superblock(self, copy: bytes) -> None:
        self._answer()
        super().write_superblock(copy)

    def write_snapshot(self, data: bytes) -> None:
        self._answer()
        super().write_snapshot(data)

    def allocate(self, plan: RegionPlan, region: int) -> int:
        self._answer()
        return super().allocate(plan, region)


async def in_time(work, seconds: float = 10.0):
    async with asyncio.timeout(seconds):
        return await work


async def test_close_returns_at_its_deadline_although_nothing_was_under_way(tmp_path):
    frost, root, names = Frost(), tmp_path / "root", keys(4)
    with leaving_no_trace():
        async with open_tier(options(root, close_timeout_seconds=0.1), hooks=frost.hooks()) as tier:
            await tier.store_all(names)
            frost.freeze(root)
            for _ in range(2):
                await in_time(tier.backend.close())
                assert tier.backend.counters["close.stuck"] == 1
                with pytest.raises(RootBusyError):
                    async with open_tier(options(root)):
                        pass
            frost.thaw()
            async with open_when_free(options(root)) as other:
                assert other.backend.counters["open.snapshot"] == 1, "its end was an orderly one all the same"
    async with open_tier(options(root)) as tier:
        assert tier.backend.counters["open.snapshot"] == 1
        assert await tier.load(names) == [LOADED] * 4


async def test_one_root_that_is_stuck_does_not_keep_the_others(tmp_path):
    frost, roots = Frost(), (tmp_path / "a", tmp_path / "b")
    async with open_tier(options(*roots, close_timeout_seconds=0.1), hooks=frost.hooks()) as tier:
        await tier.store_all(keys(8))
        frost.freeze(roots[0])
        await in_time(tier.backend.close())
        assert tier.backend.counters["close.stuck"] == 1
        with pytest.raises(RootBusyError):
            async with open_tier(options(roots[0])):
                pass
        async with open_tier(options(roots[1])):
            pass
        frost.thaw()


async def test_a_reset_that_the_disk_does_not_answer_says_so_and_takes_hold_when_it_does(tmp_path):
    frost, root = Frost(), tmp_path / "root"
    old, new = keys(4), keys(4, start=10)
    async with open_tier(options(root, job_timeout_seconds=0.1), hooks=frost.hooks()) as tier:
        await tier.store_all(old)
        frost.freeze(root)
        with pytest.raises(RootError, match="does not answer"):
            await in_time(tier.backend.reset(1))
        tier.epoch, tier.directory = 1, {}
        assert await tier.store(new) == [dropped(DropReason.RESET)] * 4, "not before the disk knows of the reset"
        frost.thaw()
        await until(lambda: not tier.backend._raising)
        assert await tier.store(new) == [STORED] * 4
        assert await tier.load(new) == [LOADED] * 4
    async with open_tier(options(root)) as tier:
        assert tier.opened.epoch == 1
        assert sorted(tier.opened.recovered.keys) == sorted(new)


async def test_a_reset_that_is_cancelled_goes_on(tmp_path):
    frost, root = Frost(), tmp_path / "root"
    async with open_tier(options(root), hooks=frost.hooks()) as tier:
        await tier.store_all(keys(4))
        frost.freeze(root)
        resetting = asyncio.create_task(tier.backend.reset(1))
        await until(lambda: frost.waiting == 1)
        resetting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await resetting
        frost.thaw()
    async with open_tier(options(root)) as tier:
        assert (tier.opened.epoch, list(tier.opened.recovered.keys)) == (1, [])


async def format_in_vain(tier: Tier, frost: Frost, regions: list[int]) -> list[asyncio.Task[object]]:
    """Stores into new regions, which wait for the disk to make room for them; other stores go where there is some."""
    known, tasks = tier.region_sizes, []
    for region in regions:
        tier.region_sizes = {}
        job = tier.store_job(keys(1, start=100 + region), [tier.format_region(region, 0)])
        tasks.append(asyncio.create_task(tier.backend.store(job)))
    tier.region_sizes = known
    await until(lambda: frost.waiting == len(regions))
    return tasks


async def test_loads_go_on_while_the_disk_makes_no_room(tmp_path):
    """Checks of what was read have threads of their own: calls that hang hold none of them up."""
    frost, root = Frost(), tmp_path / "root"
    settings = options(root, capacity="4MiB", region_bytes="512KiB")
    async with open_tier(settings, layout(65536), hooks=frost.hooks()) as tier:
        names = keys(4)
        await tier.store_all(names)
        frost.freeze(root)
        stuck = await format_in_vain(tier, frost, [2, 3])
        assert await in_time(tier.load(names)) == [LOADED] * 4
        assert await in_time(tier.store(keys(2, start=50))) == [STORED] * 2, "in the region there is"
        frost.thaw()
        assert [flat(await task) for task in stuck] == [[STORED]] * 2


async def test_formats_that_make_no_sense_are_refused(tmp_path):
    async with open_tier(options(tmp_path / "root")) as tier:
        await tier.store_all(keys(2))
        job = tier.store_job(keys(1, start=5))
        size = tier.space.slot_bytes[0]
        for region, slot_bytes in ((-1, size), (tier.space.num_regions, size), (1, 0), (1, size + 1), (1, 1 << 40)):
            with pytest.raises(UsageError, match="cannot hold slots"):
                await tier.backend.store(replace(job, formats=(RegionFormat(region, slot_bytes, 9),)))
        assert flat(await tier.backend.store(job)) == [STORED]
