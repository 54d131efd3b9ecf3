"""Layout files: a full disk. Evict and try once more, then drop with the reason; loads go on; stores come back."""

from __future__ import annotations

import errno
import os

import pytest
from support_files import account_is_true, block_files, open_files, options, temporaries
from support_files_mount import fill, small_disk, used_bytes
from support_fs import keys, layout
from support_fs_engine import FaultyEngine

from kvtier.errors import RootError
from kvtier.types.jobs import LOADED, PRESENT, STORED, DropReason, dropped
from kvtier_fs.io.contract import IOKind
from kvtier_fs.shared import bucket as bucket_module
from kvtier_fs.shared.leases import FolderLeases
from kvtier_fs.shared.root import FilesHooks

FULL = dropped(DropReason.DISK_FULL)
NUMBERS = [errno.ENOSPC, errno.EDQUOT]
FILE_BYTES = 4096 + 16384
EAGER = FilesHooks(full_seconds=0, lock_seconds=60)
"""Never tired of evicting for a full disk: what a store ends with does not depend on the speed of the machine."""


def on(engine: FaultyEngine, full_seconds: float = 1.0) -> FilesHooks:
    return FilesHooks(engine=lambda: engine, full_seconds=full_seconds, lock_seconds=60)


def writes_fail(number: int, times: int = 10**9):
    """A fault for so many writes, though their files were allocated."""
    left = times

    def fault(request):
        nonlocal left
        if request.kind is not IOKind.WRITE or not left:
            return None
        left -= 1
        return -number

    return fault


@pytest.mark.parametrize("number", NUMBERS)
async def test_a_write_without_room_evicts_the_oldest_and_is_done_again(tmp_path, number):
    engine, names = FaultyEngine(), keys(20)
    settings = options(tmp_path / "root", capacity=2 << 20)
    async with open_files(settings, hooks=on(engine)) as tier:
        for key in names:
            assert await tier.store([key]) == [STORED]
        engine.fault = writes_fail(number, times=1)
        new = keys(1, start=50)
        assert await tier.store(new) == [STORED]
        assert await tier.load([*names[1:], *new]) == [LOADED] * 20
        assert await tier.present(names[:1]) == 0, "the oldest made room"
        assert (tier.counters["full.retried"], tier.counters["evicted"]) == (1, 1)
        assert temporaries(tmp_path) == []
        assert account_is_true(tier)


@pytest.mark.parametrize("number", NUMBERS)
async def test_where_evicting_is_no_help_stores_drop_and_few_blocks_are_given_up(tmp_path, number):
    engine, names = FaultyEngine(), keys(90)
    settings = options(tmp_path / "root", capacity=4 << 20)
    async with open_files(settings, hooks=on(engine, full_seconds=3600)) as tier:
        assert await tier.store(names) == [STORED] * 90
        engine.fault = writes_fail(number)
        for start in range(100, 400, 30):
            assert await tier.store(keys(30, start=start)) == [FULL] * 30
        given_up = tier.counters["evicted"]
        assert 0 < given_up <= 8 + settings.io_depth, "others have the room: the rest is worth more than the attempt"
        assert sum(outcome == LOADED for outcome in await tier.load(names)) == 90 - given_up, "loads go on"
        assert temporaries(tmp_path) == []
        engine.fault = lambda request: None
        assert await tier.store(keys(30, start=500)) == [STORED] * 30, "at once when there is room again"
        assert account_is_true(tier)


async def test_after_a_while_evicting_is_tried_again_one_at_a_time(tmp_path):
    engine, names = FaultyEngine(), keys(40)
    settings = options(tmp_path / "root", capacity=2 << 20)
    async with open_files(settings, hooks=on(engine, full_seconds=0)) as tier:
        await tier.store(names)
        engine.fault = writes_fail(errno.ENOSPC)
        for number in range(1, 12):
            assert await tier.store(keys(1, start=100 + number)) == [FULL]
            assert tier.counters["evicted"] == number
        engine.fault = writes_fail(errno.ENOSPC, times=1)
        assert await tier.store(keys(1, start=200)) == [STORED]


@pytest.mark.parametrize("place", ["create", "account"])
async def test_no_inode_or_no_block_for_a_small_file_evicts_as_well(tmp_path, monkeypatch, place):
    """ENOSPC where a file is created, and where the account is written: at the first opening with O_CREAT."""
    settings, names = options(tmp_path / "root", capacity=2 << 20), keys(10)
    async with open_files(settings) as tier:
        await tier.store(names)
    async with open_files(settings) as tier:
        call = "open_plain" if place == "create" else "plain_file"
        opened, left = getattr(bucket_module, call), 1

        def full_once(folder_fd, name, flags, *close):
            nonlocal left
            if flags & os.O_CREAT and left:
                left -= 1
                raise OSError(errno.ENOSPC, "No space left on device")
            return opened(folder_fd, name, flags, *close)

        monkeypatch.setattr(bucket_module, call, full_once)
        assert await tier.store(keys(1, start=50)) == [STORED]
        assert not left
        assert account_is_true(tier)
        assert await tier.load(keys(1, start=50)) == [LOADED]


async def test_a_disk_smaller_than_the_capacity_holds_what_fits_it(tmp_path):
    with small_disk(3 << 20) as disk:
        settings, names = options(disk / "root", capacity=64 << 20), keys(400)
        async with open_files(settings, rows=4, hooks=EAGER) as tier:
            outcomes = await tier.store(names)
            assert set(outcomes) <= {STORED, FULL}
            assert outcomes.count(STORED) > 300
            there = [key for key in names if tier.path(key).exists()]
            assert len(there) * FILE_BYTES > 0.7 * (3 << 20)
            assert await tier.load(there) == [LOADED] * len(there)
            assert temporaries(disk) == []
            assert account_is_true(tier)


async def test_others_fill_the_disk_and_go(tmp_path):
    with small_disk(4 << 20) as disk:
        settings, names = options(disk / "root", capacity=2 << 20), keys(60)
        async with open_files(settings) as tier:
            assert await tier.store(names) == [STORED] * 60
            fill(disk / "rest")
            outcomes = await tier.store(keys(30, start=100))
            assert set(outcomes) <= {STORED, FULL}
            left = [key for key in names if tier.path(key).exists()]
            assert await tier.load(left) == [LOADED] * len(left)
            assert len(left) >= 60 - 30
            (disk / "rest").unlink()
            assert await tier.store(keys(30, start=200)) == [STORED] * 30
            assert account_is_true(tier)
            assert temporaries(disk) == []


async def test_inodes_run_out(tmp_path):
    with small_disk(64 << 20, inodes=120) as disk:
        settings, names = options(disk / "root", capacity=32 << 20), keys(200)
        async with open_files(settings, rows=4, hooks=EAGER) as tier:
            outcomes = await tier.store(names)
            assert set(outcomes) <= {STORED, FULL}
            assert outcomes.count(STORED) > 100
            there = [key for key in names if tier.path(key).exists()]
            assert len(there) > 10
            assert await tier.load(there) == [LOADED] * len(there)
            assert temporaries(disk) == []
        async with open_files(settings) as tier:
            assert await tier.present(there) >= len(there) - 3, "it opens though there is no inode for a lease"
            assert set(await tier.store(there[-5:])) == {PRESENT}
            for path in block_files(disk)[:20]:
                path.unlink()
            assert await tier.store(keys(4, start=900)) == [STORED] * 4


async def test_a_process_starts_on_a_full_disk_in_the_place_of_the_oldest_blocks(tmp_path):
    with small_disk(2 << 20) as disk:
        settings, names = options(disk / "root", capacity=16 << 20), keys(200)
        async with open_files(settings) as tier:
            await tier.store(names)
        fill(disk / "rest")
        there = len(block_files(disk))
        async with open_files(settings) as tier:
            assert len(block_files(disk)) == there - 1
            assert await tier.present(names) == there - 1


async def test_a_new_root_on_a_full_disk_is_refused_with_the_reason(tmp_path):
    with small_disk(1 << 20) as disk:
        fill(disk / "rest")
        with pytest.raises(RootError, match="the disk is full"):
            async with open_files(options(disk / "root"), layout(4096)):
                pass


async def test_min_free_bytes_are_kept_by_evicting_and_then_by_dropping(tmp_path):
    with small_disk(4 << 20) as disk:
        settings = options(disk / "root", capacity=4 << 20, min_free_bytes=2 << 20)
        async with open_files(settings, rows=4, hooks=EAGER) as tier:
            outcomes = await tier.store(keys(300))
            assert set(outcomes) <= {STORED, FULL}
            assert outcomes.count(STORED) > 200
            assert await tier.present(keys(300)) * FILE_BYTES > 1 << 20
            assert used_bytes(disk) <= 2 << 20
            assert account_is_true(tier)


async def test_a_bucket_with_nothing_to_evict_gets_room_from_another(tmp_path):
    engine, names = FaultyEngine(), keys(200)
    async with open_files(options(tmp_path / "root"), hooks=on(engine)) as tier:
        folders = {tier.path(key).parent for key in names}
        assert len(folders) > 2
        (*_, empty) = sorted(folders)
        full = [key for key in names if tier.path(key).parent != empty][:20]
        assert await tier.store(full) == [STORED] * 20
        engine.fault = writes_fail(errno.ENOSPC, times=1)
        new = [key for key in names if tier.path(key).parent == empty][:1]
        assert await tier.store(new) == [STORED]
        assert await tier.present(full) == 19
        assert account_is_true(tier)


async def test_a_disk_with_no_room_for_an_account_gets_it_by_evicting(tmp_path):
    with small_disk(2 << 20) as disk:
        async with open_files(options(disk / "root")) as tier:
            assert await tier.store(keys(40)) == [STORED] * 40
            for path in (disk / "root").glob("bucket-*/account"):
                path.unlink()
            fill(disk / "rest")
            for key in keys(4, start=100):  # one after another, so that none takes the room made for another
                assert await tier.store([key]) == [STORED]
            assert account_is_true(tier)


async def test_an_account_that_cannot_be_written_is_not_trusted_as_it_was(tmp_path, monkeypatch):
    settings, names = options(tmp_path / "root", capacity=2 << 20), keys(20)
    account = tmp_path / "root" / "bucket-00" / "account"
    async with open_files(settings) as tier:
        await tier.store(names[:2])
        old = account.read_bytes()
        await tier.store(names)
    account.write_bytes(old)  # as after a power loss
    async with open_files(settings) as tier:

        def no_room(fd, data):
            monkeypatch.undo()
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(bucket_module, "write_all", no_room)
        assert await tier.store(names[:1]) == [PRESENT]
        assert await tier.store(keys(1, start=50)) == [STORED]
        assert account_is_true(tier)


async def test_a_disk_that_stays_full_does_not_have_its_buckets_counted_again_and_again(tmp_path, monkeypatch):
    async with open_files(
        options(tmp_path / "root", capacity=2 << 20), hooks=FilesHooks(full_seconds=3600, lock_seconds=60)
    ) as tier:
        await tier.store(keys(40))

        def no_room(fd, offset, length):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(bucket_module, "fallocate", no_room)
        counted = tier.counters["bucket.scanned"]
        assert await tier.store(keys(200, start=100)) == [FULL] * 200
        assert tier.counters["bucket.scanned"] <= counted + 1
        assert account_is_true(tier)


async def test_a_reset_and_a_new_namespace_find_room_on_a_full_disk(tmp_path):
    with small_disk(2 << 20) as disk:
        settings, names = options(disk / "root", capacity=16 << 20), keys(200)
        async with open_files(settings, tag="a") as tier:
            await tier.store(names)
        fill(disk / "rest")
        there = len(block_files(disk))
        async with open_files(settings, tag="b") as tier:
            assert tier.opened.epoch == 0
            fill(disk / "more")
            await tier.backend.reset(3)
        assert there - 5 <= len(block_files(disk)) < there, "in the place of a few blocks"
        async with open_files(settings, tag="b") as tier:
            assert tier.opened.epoch == 3


async def test_a_new_root_on_a_full_disk_says_so(tmp_path, monkeypatch):
    def full(leases: FolderLeases) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "root" / "bucket-00").mkdir(parents=True)  # its superblock was removed, its buckets were not
    (tmp_path / "root").chmod(0o700)
    monkeypatch.setattr(FolderLeases, "take", full)
    with pytest.raises(RootError, match="the disk is full"):
        async with open_files(options(tmp_path / "root")):
            pass
