"""Layout files: what accounts say of the disk. Never too little; too much only until a rule says it is put right."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support_files import account_errors, account_is_true, bucket_locked, open_files, options, temporaries
from support_fs import keys, layout
from support_fs_engine import FaultyEngine

from kvtier.types.jobs import CORRUPT, LOADED, MISSING, PRESENT, STORED, BlockStatus, DropReason, dropped, failed
from kvtier_fs.format.tree_records import decode_account, encode_account
from kvtier_fs.io.contract import IOKind
from kvtier_fs.roots.private_tree import names_in
from kvtier_fs.shared import block_file
from kvtier_fs.shared import bucket as bucket_module
from kvtier_fs.shared.bucket import Bucket
from kvtier_fs.shared.folder import with_lock
from kvtier_fs.shared.leases import FolderLeases, this_process
from kvtier_fs.shared.root import FilesHooks

FILE_BYTES = 4096 + 16384
KEEP_SIZE = 1


def one_bucket(tmp_path: Path):
    """A root so small that it has a single bucket."""
    return options(tmp_path / "root", capacity=2 << 20)


def on(engine: FaultyEngine | None = None, lock_seconds: float = 60) -> FilesHooks:
    """On an engine; a store waits so long for its bucket."""
    return FilesHooks(engine=(lambda: engine) if engine else None, lock_seconds=lock_seconds)


async def held(engine: FaultyEngine, count: int) -> None:
    """Until an engine holds some number of requests back."""
    while len(engine.held) < count:
        await engine.holding.wait()
        await asyncio.sleep(0)


def test_a_folder_is_listed_whole_while_another_listing_is_half_way(tmp_path):
    for number in range(3000):
        (tmp_path / f"{number:040x}").touch()
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with os.scandir(fd) as other:
            next(other)
            assert sorted(names_in(fd)) == sorted(os.listdir(tmp_path))
            assert len({entry.name for entry in other}) == 2999, "and the other goes on from where it was"
    finally:
        os.close(fd)


async def test_two_tiers_that_store_the_same_at_once_leave_true_accounts(tmp_path):
    settings = one_bucket(tmp_path)
    async with open_files(settings) as one, open_files(settings) as other:
        for start in range(0, 120, 30):
            names = keys(30, start=start)
            results = await asyncio.gather(one.store(names), other.store(names))
            assert {outcome.status for result in results for outcome in result} <= {"stored", "present"}
            assert account_is_true(one)
    assert temporaries(tmp_path) == []


async def test_a_file_system_that_cannot_keep_names_apart_is_told_by_a_look(tmp_path, monkeypatch):
    """Where a rename may take a name from somebody (NFS), the header in the place is looked at just before."""
    monkeypatch.setattr(block_file, "rename_new", lambda *args: False)
    engine, names = FaultyEngine(), keys(6)
    settings = one_bucket(tmp_path)
    async with open_files(settings, hooks=on(engine)) as slow, open_files(settings) as fast:
        engine.hold = lambda request: request.kind is IOKind.WRITE
        storing = asyncio.create_task(slow.store(names))
        await held(engine, 6)
        assert await fast.store(names) == [STORED] * 6
        engine.let_go()
        assert await storing == [PRESENT] * 6
        assert account_is_true(slow)
        assert await slow.load(names) == [LOADED] * 6
    assert temporaries(tmp_path) == []


async def test_what_lies_in_a_blocks_place_when_it_is_published_is_replaced_and_given_back(tmp_path):
    engine, (key,) = FaultyEngine(), keys(1)
    async with open_files(one_bucket(tmp_path), hooks=on(engine)) as tier:
        await tier.store(keys(3, start=10))
        engine.hold = lambda request: request.kind is IOKind.WRITE
        storing = asyncio.create_task(tier.store([key]))
        await held(engine, 1)
        tier.path(key).write_bytes(bytes(60_000))
        bucket = tier.backend._root.buckets[0]
        assert bucket.locked(bucket.sweep) is None, "it is charged now"
        engine.let_go()
        assert await storing == [STORED]
        assert account_is_true(tier)
        assert await tier.load([key]) == [LOADED]


async def test_a_temporary_that_gets_its_name_while_its_bucket_is_counted_counts_once(tmp_path, monkeypatch):
    engine, (key,) = FaultyEngine(), keys(1)
    async with open_files(one_bucket(tmp_path), hooks=on(engine)) as tier:
        await tier.store(keys(3, start=10))
        engine.hold = lambda request: request.kind is IOKind.WRITE
        storing = asyncio.create_task(tier.store([key]))
        await held(engine, 1)
        (temporary,) = temporaries(tmp_path)
        count_small, path = Bucket._count_small, tier.path(key)

        def published_meanwhile(self, folder):
            counted = count_small(self, folder)
            os.rename(temporary, path)
            return counted

        monkeypatch.setattr(Bucket, "_count_small", published_meanwhile)
        bucket = tier.backend._root.buckets[0]
        assert bucket.locked(bucket.sweep) is None
        assert account_is_true(tier)
        monkeypatch.undo()
        os.rename(path, temporary)
        engine.let_go()
        assert await storing == [STORED]


async def test_a_block_that_takes_more_of_the_disk_than_was_charged_is_charged_again(tmp_path):
    libc, (key,) = ctypes.CDLL(None, use_errno=True), keys(1)

    def grow(request):
        if request.kind is IOKind.WRITE:
            assert libc.fallocate(request.fd, KEEP_SIZE, ctypes.c_int64(FILE_BYTES), ctypes.c_int64(8192)) == 0

    async with open_files(one_bucket(tmp_path), hooks=on(FaultyEngine(grow))) as tier:
        assert await tier.store([key]) == [STORED]
        assert tier.path(key).stat().st_blocks * 512 > FILE_BYTES, "the test's own growth"
        assert account_is_true(tier)
        assert await tier.load([key]) == [LOADED]


@pytest.mark.parametrize("noticed", ["when it is created", "when it is written"])
async def test_a_block_that_turns_out_too_large_for_its_bucket_is_dropped(tmp_path, monkeypatch, noticed):
    """There is nothing to evict for what it takes beyond its size: no bucket exceeds its share for that."""
    libc, engine = ctypes.CDLL(None, use_errno=True), FaultyEngine()
    more = ctypes.c_int64(1 << 20)

    def grow(fd):
        assert libc.fallocate(fd, KEEP_SIZE, ctypes.c_int64(FILE_BYTES), more) == 0

    async with open_files(options(tmp_path / "root", capacity=600 << 10), hooks=on(engine)) as tier:
        assert tier.backend._root.rules.budget_bytes < more.value
        if noticed == "when it is written":
            engine.fault = lambda request: grow(request.fd) if request.kind is IOKind.WRITE else None
        else:
            allocate = bucket_module.fallocate

            def generous(fd, offset, length):
                allocated = allocate(fd, offset, length)
                grow(fd)
                return allocated

            monkeypatch.setattr(bucket_module, "fallocate", generous)
        assert await tier.store(keys(2)) == [dropped(DropReason.NO_SLOT)] * 2
        assert temporaries(tmp_path) == []
        assert not any(account_errors(tmp_path / "root").values())
        engine.fault = lambda request: None
        monkeypatch.undo()
        assert await tier.store(keys(2)) == [STORED] * 2
        assert account_is_true(tier)


async def test_what_cannot_be_given_back_now_stays_and_stays_charged(tmp_path):
    """The lock is not to be had when a store fails: its temporary is there until the next visit, and is counted."""
    engine, settings = FaultyEngine(), one_bucket(tmp_path)
    failing, names = keys(2), keys(3, start=10)
    async with open_files(settings, hooks=on(engine, lock_seconds=0.1)) as tier:
        await tier.store(names)
        for goes_by in ("the next store", "a sweep", "close"):
            engine.hold = lambda request: request.kind is IOKind.WRITE
            storing = asyncio.create_task(tier.store(failing))
            await held(engine, 2)
            with bucket_locked(tmp_path / "root" / "bucket-00"):
                engine.fault = lambda request: -5
                engine.let_go()
                assert {outcome.status for outcome in await storing} == {BlockStatus.FAILED}
                assert len(temporaries(tmp_path)) == 2
            assert account_is_true(tier), "they are there, and they are charged"
            engine.fault = lambda request: None
            if goes_by == "the next store":
                assert await tier.store(keys(1, start=20)) == [STORED]
            elif goes_by == "a sweep":
                await tier.backend.sweep()
            if goes_by != "close":
                assert temporaries(tmp_path) == []
                assert account_is_true(tier)
    assert temporaries(tmp_path) == []
    async with open_files(settings) as tier:
        assert account_is_true(tier)


async def test_a_temporary_that_others_swept_is_not_given_back_twice(tmp_path, monkeypatch):
    """A process that stood still too long finds its temporaries gone, and the bucket counted without them."""
    engine, settings = FaultyEngine(), one_bucket(tmp_path)
    async with open_files(settings, hooks=on(engine)) as slow, open_files(settings) as other:
        await slow.store(keys(8, start=10))
        engine.hold = lambda request: request.kind is IOKind.WRITE
        storing = asyncio.create_task(slow.store(keys(4)))
        await held(engine, 4)
        monkeypatch.setattr(other.backend._root.leases, "expired", lambda name: name == slow.backend._root.lease)
        await other.backend.sweep()
        assert temporaries(tmp_path) == []
        assert not (tmp_path / "root" / "leases" / slow.backend._root.lease).exists()
        engine.let_go()
        assert not any(outcome.ok for outcome in await storing)
        assert (tmp_path / "root" / "leases" / slow.backend._root.lease).exists(), "taken anew at once"
        assert account_is_true(slow)
        assert await slow.load(keys(8, start=10)) == [LOADED] * 8
        monkeypatch.undo()
        assert await slow.store(keys(4)) == [STORED] * 4


def leave_wrong(root: Path, tier, more: int) -> tuple[str, int]:
    """What a process leaves that was killed between charging a block and creating it. Its lease, what is charged."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    folder = os.open(root / "leases", os.O_RDONLY | os.O_DIRECTORY)
    try:
        lease = FolderLeases(folder, f"{done.pid:016x}", replace(this_process(), pid=done.pid), float, 60)
        lease.take()
    finally:
        os.close(folder)
    tree = tier.backend._root.tree
    for path in sorted(root.glob("bucket-*/account")):
        number = int(path.parent.name[-2:], 16)
        path.write_bytes(encode_account(tree, number, decode_account(path.read_bytes(), tree, number) + more))
    return lease.name, more


async def test_after_a_death_accounts_are_true_from_each_buckets_first_store_after_the_sweep(tmp_path):
    root = tmp_path / "root"
    async with open_files(options(root)) as tier:
        await tier.store(keys(100))
        assert len(account_errors(tmp_path / "root")) > 1, "several buckets"
        lease, more = leave_wrong(root, tier, FILE_BYTES)
        assert set(account_errors(tmp_path / "root").values()) == {more}, "overstated until the sweep"
        await tier.backend.sweep()
        assert not (root / "leases" / lease).exists()
        for start in range(200, 300):
            await tier.store(keys(1, start=start))
            errors = account_errors(tmp_path / "root")
            assert not any(errors.values()), "a bucket has a true account or none"
        assert account_is_true(tier)
        assert len(errors) == len(list(root.glob("bucket-*")))


async def test_the_lease_of_the_dead_stays_until_every_bucket_was_seen_to(tmp_path):
    root = tmp_path / "root"
    async with open_files(options(root), hooks=on(lock_seconds=0.1)) as tier:
        await tier.store(keys(100))
        lease, more = leave_wrong(root, tier, FILE_BYTES)
        with bucket_locked(root / "bucket-00"):
            await tier.backend.sweep()
            assert (root / "leases" / lease).exists(), "its account is still wrong"
        assert account_errors(tmp_path / "root") == {"bucket-00": more}
        await tier.backend.sweep()
        assert not (root / "leases" / lease).exists()
        assert account_errors(tmp_path / "root") == {}


async def test_a_corrupt_block_that_was_removed_is_counted_out_by_the_next_store(tmp_path):
    first, *rest = keys(4)
    async with open_files(one_bucket(tmp_path)) as tier:
        await tier.store([first, *rest])
        os.truncate(tier.path(first), 7777)
        assert await tier.load([first]) == [CORRUPT]
        assert account_errors(tmp_path / "root") == {}, "no account is better than a wrong one"
        assert await tier.store(rest) == [PRESENT] * 3
        assert account_is_true(tier)


async def test_an_error_in_the_middle_of_a_visit_makes_the_next_one_count(tmp_path, monkeypatch):
    async with open_files(one_bucket(tmp_path)) as tier:
        await tier.store(keys(10))

        def broken(fd, offset, length):
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(bucket_module, "fallocate", broken)
        assert await tier.store(keys(2, start=100)) == [failed(errno.EIO)] * 2
        assert not any(account_errors(tmp_path / "root").values()), "no account is better than a wrong one"
        assert not temporaries(tmp_path / "root")
        monkeypatch.undo()
        assert await tier.store(keys(1, start=200)) == [STORED]
        assert account_is_true(tier)


def test_a_child_forked_while_a_lock_was_held_does_not_keep_it(tmp_path):
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    waits, ends = os.pipe()

    def fork() -> int:
        child = os.fork()
        if child == 0:
            os.close(ends)
            os.read(waits, 1)
            os._exit(0)
        return child

    child = with_lock(folder, fork)
    try:
        assert with_lock(folder, lambda: "mine") == "mine", "while the child lives"
    finally:
        os.close(ends)
        os.waitpid(child, 0)
        os.close(waits)
        os.close(folder)


async def test_a_lookup_or_a_load_makes_no_folders(tmp_path):
    async with open_files(options(tmp_path / "root")) as tier:
        assert await tier.present(keys(50)) == 0
        assert await tier.load(keys(50)) == [MISSING] * 50
        assert list((tmp_path / "root").glob("bucket-*")) == []


@pytest.mark.parametrize("fails", [1, 2, 9], ids=["the bucket", "its first folder", "one in the middle"])
async def test_a_bucket_that_was_made_half_is_made_whole_by_the_next_store(tmp_path, monkeypatch, fails):
    settings, (key,) = options(tmp_path / "root", capacity=4 << 30), keys(1)
    async with open_files(settings, layout(4096)) as tier:
        assert tier.backend._root.tree.fan_out == 1
        mkdir, left = os.mkdir, fails

        def full_once(name, mode, **where):
            nonlocal left
            left -= 1
            if not left:
                raise OSError(errno.ENOSPC, "No space left on device")
            mkdir(name, mode, **where)

        monkeypatch.setattr("os.mkdir", full_once)
        assert await tier.store([key]) == [dropped(DropReason.DISK_FULL)]
        assert await tier.store([key]) == [STORED]
        assert await tier.load([key]) == [LOADED]
        assert account_is_true(tier)
