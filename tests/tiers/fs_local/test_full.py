"""Disks that are full: stores are dropped with the reason, loads go on, and all is well once there is room again."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from support_disks import small_disk
from support_fs import Tier, bytes_on_disk, keys, layout, open_tier, options
from support_stack import Engine, fs, load, opened, parts_of, stack_file, statuses, store, whole
from support_stack import keys as engine_keys

from kvtier.errors import RootError
from kvtier.stack import StackParts, TierStack
from kvtier.types.jobs import LOADED, STORED, DropReason, dropped
from kvtier.types.keys import OffloadKey
from kvtier_fs import FSBackend, FSOptions
from kvtier_fs.local.folder import SlabFolder
from kvtier_fs.local.opening import Hooks

MIB = 1 << 20
FULL = dropped(DropReason.DISK_FULL)
Disk = Callable[..., Path]


@pytest.fixture
def disk() -> Iterator[Disk]:
    """Makes a small disk of its own for the test; more words go to mkfs."""
    with ExitStack() as mounts:
        yield lambda *mkfs: mounts.enter_context(small_disk(mkfs=mkfs))


def free_bytes(mount: Path) -> int:
    status = os.statvfs(mount)
    return status.f_bavail * status.f_frsize


def fill_up(mount: Path) -> Path:
    """Take every byte that is left."""
    ballast = mount / "ballast"
    fd = os.open(ballast, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        for size in (MIB, 4096, 512):
            try:
                while True:
                    os.write(fd, bytes(size))
            except OSError:
                continue
        os.fsync(fd)
    finally:
        os.close(fd)
    return ballast


async def store_until_full(tier: Tier, tries: int = 40) -> list[bytes]:
    """Store in region after region until a whole batch is dropped. Returns what was stored."""
    stored: list[bytes] = []
    for number in range(tries):
        free = sum(1 for _ in tier.free_slots(0))
        region = max(tier.region_sizes, default=-1) + 1
        formats = [tier.format_region(region, 0)] if free < 32 and region < tier.space.num_regions else []
        names = keys(32, start=1000 * (number + 1))
        outcomes = await tier.store(names, formats)
        stored += [key for key, outcome in zip(names, outcomes, strict=True) if outcome == STORED]
        assert set(outcomes) <= {STORED, FULL}
        if set(outcomes) == {FULL}:
            return stored
    raise AssertionError("the disk never was full")


def no_support(path: str, settings: FSOptions) -> SlabFolder:
    folder = SlabFolder(path, settings)
    folder.preallocates = False
    return folder


@pytest.mark.parametrize("hooks", [None, Hooks(folder=no_support)], ids=["preallocated", "not preallocated"])
async def test_min_free_bytes_are_kept_and_loads_go_on(disk, hooks):
    mount = disk()
    settings = options(mount / "root", capacity=256 * MIB, region_bytes="4MiB", min_free_bytes=16 * MIB)
    async with open_tier(settings, layout(65536), hooks=hooks) as tier:
        stored = await store_until_full(tier)
        # Without preallocation the last region may not have been written to its end when the next was refused.
        assert 16 * MIB - 64 * 1024 <= free_bytes(mount) < 24 * MIB
        assert len(stored) > 300
        assert await tier.load_all(stored) == [LOADED] * len(stored)
    async with open_tier(settings, layout(65536)) as tier:
        assert sorted(tier.opened.recovered.keys) == sorted(stored)
        assert free_bytes(mount) >= 16 * MIB - 64 * 1024


@pytest.mark.parametrize("hooks", [None, Hooks(folder=no_support)], ids=["preallocated", "not preallocated"])
async def test_a_disk_that_others_fill_drops_stores_until_there_is_room_again(disk, hooks):
    mount = disk()
    settings = options(mount / "root", capacity=48 * MIB, region_bytes="4MiB")
    async with open_tier(settings, layout(65536), hooks=hooks) as tier:
        names = keys(32)
        assert await tier.store(names, [tier.format_region(0, 0)]) == [STORED] * 32
        ballast = fill_up(mount)
        stored = names + await store_until_full(tier)
        assert await tier.load_all(stored) == [LOADED] * len(stored)
        ballast.unlink()
        more = keys(32, start=500)
        assert await tier.store(more) == [STORED] * 32, "the same regions, once there is room"
        assert await tier.load(more) == [LOADED] * 32
    async with open_tier(settings, layout(65536)) as tier:
        assert sorted(tier.opened.recovered.keys) == sorted([*stored, *more])


async def test_a_full_disk_can_be_opened_read_and_closed(disk):
    mount, names = disk(), keys(32)
    settings = options(mount / "root", capacity=32 * MIB, region_bytes="4MiB")
    async with open_tier(settings, layout(65536)) as tier:
        await tier.store(names, [tier.format_region(0, 0)])
    (mount / "root" / "snapshot").unlink()
    ballast = fill_up(mount)
    for _ in range(2):
        async with open_tier(settings, layout(65536)) as tier:
            assert list(tier.opened.recovered.keys)[:32] == names
            assert await tier.load(names) == [LOADED] * 32
            assert await tier.store(keys(4, start=50)) == [STORED] * 4, "in the region there is"
            fill_up(mount)
        assert not (mount / "root" / "snapshot.new").exists()
    ballast.unlink()
    async with open_tier(settings, layout(65536)) as tier:
        assert await tier.load(names) == [LOADED] * 32
    assert (mount / "root" / "snapshot").exists()


async def test_a_full_disk_is_still_read_past_the_page_cache(disk):
    mount, names = disk(), keys(8)
    settings = options(mount / "root", capacity=8 * MIB, direct="auto")
    async with open_tier(settings) as tier:
        if not tier.opened.mode.endswith("direct"):
            pytest.skip("this loop device buffers direct I/O")
        await tier.store_all(names)
    fill_up(mount)
    async with open_tier(options(mount / "root", capacity=8 * MIB, direct="required")) as tier:
        assert tier.opened.mode.endswith("direct")
        assert await tier.load(names) == [LOADED] * 8


async def test_without_room_for_a_new_root_the_error_says_so_and_later_it_works(disk):
    mount = disk()
    (mount / "root").mkdir(mode=0o700)
    ballast = fill_up(mount)
    with pytest.raises(RootError, match=r"the disk is full|No space left"):
        async with open_tier(options(mount / "root", capacity=8 * MIB)):
            pass
    ballast.unlink()
    async with open_tier(options(mount / "root", capacity=8 * MIB)) as tier:
        await tier.store_all(keys(4))


async def test_without_inodes_stores_are_dropped_until_there_are_some(disk):
    mount = disk("-N", "32")
    async with open_tier(options(mount / "root", capacity=8 * MIB)) as tier:
        taken = []
        while os.statvfs(mount).f_favail:
            taken.append(mount / f"taken-{len(taken)}")
            taken[-1].touch()
        assert await tier.store(keys(3), [tier.format_region(0, 0)]) == [FULL] * 3
        taken.pop().unlink()
        assert await tier.store(keys(3)) == [STORED] * 3
        assert await tier.load(keys(3)) == [LOADED] * 3
        assert bytes_on_disk(mount / "root") <= 8 * MIB
    async with open_tier(options(mount / "root", capacity=8 * MIB)) as tier:
        assert list(tier.opened.recovered.keys) == keys(3)


def stack_on(mount: Path, engine: Engine, hooks: Hooks | None, **more: object) -> StackParts:
    """A stack whose fs tier may take more than the disk has."""
    lower = fs(mount / "root", capacity=256 * MIB, region_bytes="4MiB", **more)
    parts = parts_of(stack_file(engine.layout, 64, lower), engine)
    tiers = [*parts.tiers[:-1], FSBackend(parts.tiers[-1].options, hooks)]
    return replace(parts, tiers=tiers)


async def stored(stack: TierStack, engine: Engine, first: int, batches: int) -> list[OffloadKey]:
    """Store batches of blocks, each on the disk before the next; returns their keys."""
    names: list[OffloadKey] = []
    for number in range(batches):
        batch = engine_keys(32, start=first + 32 * number)
        await store(stack, engine, whole(batch))
        assert await stack.drain(20)
        names += batch
    return names


async def loadable(stack: TierStack, engine: Engine, names: list[OffloadKey]) -> int:
    """How many of these can be loaded, every byte right."""
    good = 0
    for start in range(0, len(names), 32):
        good += statuses(await load(stack, engine, whole(names[start : start + 32], 32))).count("loaded")
    return good


@pytest.mark.parametrize("hooks", [None, Hooks(folder=no_support)], ids=["preallocated", "not preallocated"])
async def test_a_full_disk_keeps_what_is_new_and_evicts_what_is_old(disk, monkeypatch, hooks):
    """First full up to `min_free_bytes`, then filled up by others, then with room again: no store is ever dropped."""
    monkeypatch.setattr("kvtier.control.tiers.placement.PAUSE_SECONDS", 0.2)
    mount, engine = disk(), Engine(layout(65536), 64)
    async with opened(stack_on(mount, engine, hooks, min_free_bytes=24 * MIB)) as stack:
        names = await stored(stack, engine, 0, 30)
        tier = stack.stats().tiers["fs"]
        assert (tier.dropped, tier.failed, tier.breaker) == ({}, 0, "closed")
        assert tier.evictions > 300
        assert free_bytes(mount) >= 24 * MIB - 64 * 1024
        assert await loadable(stack, engine, names[-320:]) == 320
        ballast = fill_up(mount)
        names = await stored(stack, engine, 10_000, 30)
        assert await loadable(stack, engine, names[-320:]) == 320
        ballast.unlink()
        before = stack.stats().tiers["fs"].evictions
        assert stack.stats().tiers["fs"].dropped == {}
    async with opened(stack_on(mount, engine, hooks, min_free_bytes=0)) as stack:
        names += await stored(stack, engine, 20_000, 10)
        assert stack.stats().tiers["fs"].evictions == 0 < before, "there is room again, and it is used"
        assert await loadable(stack, engine, names[-640:]) == 640


async def test_a_disk_full_from_the_start_drops_with_the_reason_and_recovers(disk, monkeypatch):
    monkeypatch.setattr("kvtier.control.tiers.placement.PAUSE_SECONDS", 0.2)
    mount, engine = disk(), Engine(layout(65536), 64)
    async with opened(stack_on(mount, engine, None)) as stack:
        ballast = fill_up(mount)
        lost = await stored(stack, engine, 0, 4)
        tier = stack.stats().tiers["fs"]
        assert (tier.dropped, tier.stored, tier.breaker) == ({"disk_full": 128}, 0, "closed")
        ballast.unlink()
        number = itertools.count(1)
        async with asyncio.timeout(20):
            while not stack.stats().tiers["fs"].stored:
                await stored(stack, engine, 10_000 * next(number), 1)
        names = await stored(stack, engine, 5_000, 4)
        assert set(stack.locate(names[:64])) == {"fs"}
        assert await loadable(stack, engine, names) == 128
        assert await loadable(stack, engine, lost) == 0
