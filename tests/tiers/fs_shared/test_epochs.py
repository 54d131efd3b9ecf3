"""Layout files: a reset stays reset, for everybody; recency is written now and then; what is outdated goes."""

from __future__ import annotations

import asyncio
import os

import pytest
from support_files import block_files, open_files, options
from support_fs import keys

from kvtier.types.jobs import LOADED, MISSING, PRESENT, STORED, DropReason, dropped
from kvtier_fs.shared.block_file import Temporary
from kvtier_fs.shared.root import FilesHooks


async def until_pruned(tier) -> None:
    """Until the removal that a reset began has ended."""
    pruning = [task for task in tier.backend._background if task.get_coro().__name__ == "prune"]
    await asyncio.gather(*pruning)


async def test_nothing_from_before_a_reset_is_found_after_a_reopen(tmp_path):
    settings, names = options(tmp_path / "root"), keys(20)
    async with open_files(settings) as tier:
        await tier.store(names)
        await tier.backend.reset(1)
        assert await tier.present(names) == 0
        tier.epoch = 1
        assert await tier.load(names) == [MISSING] * 20
    async with open_files(settings) as tier:
        assert tier.opened.epoch == 1
        assert await tier.present(names) == 0
        assert await tier.load(names) == [MISSING] * 20
        assert await tier.store(names, version=1) == [STORED] * 20
        assert await tier.load(names, version=1) == [LOADED] * 20


async def test_a_reset_is_durable_before_it_returns(tmp_path, monkeypatch):
    async with open_files(options(tmp_path / "root")) as tier:
        await tier.store(keys(4))
        synced, sync = [], os.fsync

        def watched(fd):
            synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), tmp_path / "root"))
            sync(fd)

        monkeypatch.setattr("os.fsync", watched)
        await tier.backend.reset(1)
        first, second = synced[-2:]
        assert first.startswith("epochs/"), "the file"
        assert second == "epochs", "and its name"


async def test_blocks_from_before_a_reset_are_pruned_and_others_stay(tmp_path):
    settings, names = options(tmp_path / "root"), keys(20)
    async with open_files(settings, tag="a") as tier, open_files(settings, tag="b") as other:
        await tier.store(names)
        await other.store(names)
        await tier.backend.reset(1)
        await until_pruned(tier)
        assert tier.counters["pruned"] == 20
        assert len(block_files(tmp_path)) == 20
        assert await other.load(names) == [LOADED] * 20


async def test_a_process_that_has_not_reset_hits_nothing_and_stores_nothing(tmp_path):
    settings, names = options(tmp_path / "root"), keys(8)
    async with open_files(settings) as one, open_files(settings) as other:
        await one.store(names)
        assert await other.load(names) == [LOADED] * 8
        await one.backend.reset(1)
        assert await other.present(names) == 0
        assert await other.load(names) == [MISSING] * 8
        assert await other.store(names) == [dropped(DropReason.RESET)] * 8
        one.epoch = 1
        assert await one.store(names, version=1) == [STORED] * 8
        assert await other.load(names) == [MISSING] * 8
        assert len(block_files(tmp_path)) == 8, "what one process may not use it does not remove either"
        await other.backend.reset(1)
        other.epoch = 1
        assert await other.load(names, version=1) == [LOADED] * 8


async def test_an_epoch_never_falls_back(tmp_path):
    settings, names = options(tmp_path / "root"), keys(4)
    async with open_files(settings) as tier:
        await tier.backend.reset(5)
        await tier.backend.reset(3)
        tier.epoch = 5
        await tier.store(names)
        assert await tier.load(names) == [LOADED] * 4
    async with open_files(settings) as tier:
        assert tier.opened.epoch == 5
        assert await tier.present(names) == 4


@pytest.mark.parametrize("damage", ["one copy", "both copies", "missing", "a link"])
async def test_an_epoch_that_cannot_be_read_makes_misses_not_hits(tmp_path, damage):
    settings, names = options(tmp_path / "root"), keys(4)
    async with open_files(settings) as tier:
        await tier.store(names)
        (path,) = [path for path in (tmp_path / "root" / "epochs").iterdir() if path.name != "lock"]
        good = path.read_bytes()
        bad = bytes([*good[:40], good[40] ^ 1, *good[41:]])
        if damage == "one copy":
            path.write_bytes(bad)
        elif damage == "both copies":
            path.write_bytes(bad[:168] + bytes([bad[168] ^ 1]) + bad[169:])
        else:
            path.rename(tmp_path / "elsewhere")
            if damage == "a link":
                path.symlink_to(tmp_path / "elsewhere")
        whole = damage == "one copy"
        assert await tier.present(names) == (4 if whole else 0)
        assert await tier.load(names) == [LOADED if whole else MISSING] * 4
        if not whole:
            assert await tier.store(names) == [dropped(DropReason.RESET)] * 4
    if whole:
        return
    async with open_files(settings, new_epoch=1 << 41) as tier:
        assert tier.opened.is_new_epoch, "nobody can tell how far it was"
        assert tier.opened.epoch == 1 << 41
        assert await tier.present(names) == 0
        assert await tier.store(names, version=1) == [STORED] * 4


async def test_recency_is_written_at_most_once_a_minute_and_orders_eviction(tmp_path):
    now = 1_000_000.0
    hooks = FilesHooks(wall=lambda: now)
    settings, names = options(tmp_path / "root", capacity=2 << 20), keys(60)
    async with open_files(settings, hooks=hooks) as tier:
        assert await tier.store(names) == [STORED] * 60
        (stored,) = {os.stat(tier.path(key)).st_mtime for key in names}
        assert stored == now
        now += 59
        assert await tier.load(names[:10]) == [LOADED] * 10
        assert tier.counters["touched"] == 0
        assert {os.stat(tier.path(key)).st_mtime for key in names} == {stored}
        now += 1
        for _ in range(3):
            assert await tier.load(names[:10]) == [LOADED] * 10
        assert tier.counters["touched"] == 10
        assert {os.stat(tier.path(key)).st_mtime for key in names[:10]} == {now}
        await tier.store(keys(60, start=100))
        assert tier.counters["evicted"] > 20
        assert await tier.present(names[:10]) == 10, "what was used last stays longest"
        assert await tier.present(names[10:]) < 30


async def test_a_store_that_finds_its_block_there_counts_as_a_use_once_a_minute(tmp_path):
    now = 1_000_000.0
    hooks = FilesHooks(wall=lambda: now)
    settings, names = options(tmp_path / "root", capacity=2 << 20), keys(60)
    used = names[:10]

    def times():
        return {os.stat(tier.path(key)).st_mtime for key in used}

    async with open_files(settings, hooks=hooks) as tier:
        assert await tier.store(names) == [STORED] * 60
        now += 59
        assert await tier.store(used) == [PRESENT] * 10
        assert times() == {now - 59}, "too soon"
        assert tier.counters["touched"] == 0
        now += 1
        for _ in range(3):
            assert await tier.store(used) == [PRESENT] * 10
        assert times() == {now}
        assert tier.counters["touched"] == 10, "once, by whichever"
        assert await tier.load(used) == [LOADED] * 10
        assert tier.counters["touched"] == 10
        await tier.store(keys(60, start=100))
        assert tier.counters["evicted"] > 20
        assert await tier.present(used) == 10, "what was asked to be stored again stays longest"
        assert await tier.present(names[10:]) < 30


async def test_a_time_from_a_host_whose_clock_is_ahead_is_put_right_by_the_next_use(tmp_path):
    now, (first, second) = 1_000_000.0, keys(2)
    async with open_files(options(tmp_path / "root"), hooks=FilesHooks(wall=lambda: now)) as tier:
        await tier.store([first, second])
        for key in (first, second):
            os.utime(tier.path(key), (now + 3600, now + 3600))
        assert await tier.load([first]) == [LOADED]
        assert await tier.store([second]) == [PRESENT]
        assert {os.stat(tier.path(key)).st_mtime for key in (first, second)} == {now}


async def test_a_store_of_an_epoch_that_is_over_does_not_claim_the_newer_block(tmp_path):
    """Only a race can bring it so far: the epoch rose after the job had read it."""
    async with open_files(options(tmp_path / "root")) as tier:
        (key,) = keys(1)
        await tier.backend.reset(1)
        await until_pruned(tier)  # it has the buckets' locks meanwhile
        tier.epoch = 1
        assert await tier.store([key]) == [STORED]
        bucket = tier.backend._root.buckets[tier.backend._expect(key, 0).place.bucket]
        late = tier.backend._expect(key, 0)
        temporary = Temporary(tier.backend._root.temporary())
        assert bucket.locked(lambda: bucket.reserve(late, temporary)) == dropped(DropReason.RESET)
        assert await tier.load([key]) == [LOADED]
