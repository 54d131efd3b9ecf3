"""Layout files: a lock that is not to be had costs stores, never a wait without end, never the bound."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from support_files import account_is_true, block_files, bucket_locked, open_files, options, temporaries
from support_fs import flat, keys
from support_paths import SUPPORT

from faults.machine import warm
from kvtier.errors import RootError
from kvtier.types.jobs import CORRUPT, LATE, LOADED, PRESENT, STORED, DropReason, JobKind, dropped
from kvtier_fs.shared.bucket import Bucket
from kvtier_fs.shared.folder import LOCK_NAME, LockBusy, with_lock
from kvtier_fs.shared.root import FilesHooks

PEER = SUPPORT / "support_files_peer.py"
QUICK = FilesHooks(lock_seconds=0.1)
BACKLOG = dropped(DropReason.BACKLOG)


@contextmanager
def peer(*arguments: object):
    """Another process; killed at the end."""
    command = [sys.executable, str(PEER), *map(str, arguments)]
    with warm.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def one_bucket(tmp_path) -> object:
    """A root so small that it has a single bucket."""
    return options(tmp_path / "root", capacity=2 << 20)


async def test_a_stopped_process_with_the_lock_costs_stores_and_nothing_else(tmp_path):
    names, more = keys(8), keys(8, start=50)
    async with open_files(one_bucket(tmp_path), hooks=QUICK) as tier:
        assert await tier.store(names) == [STORED] * 8
        with peer("hold", tmp_path / "root", "bucket-00/lock") as holder:
            assert holder.stdout.readline() == "held\n"
            holder.send_signal(signal.SIGSTOP)
            assert await tier.store(more) == [BACKLOG] * 8
            assert tier.counters["lock.timeout"] == 8
            assert temporaries(tmp_path) == []
            assert await tier.load(names) == [LOADED] * 8
            assert await tier.present(names + more) == 8
            # Something corrupt is refused all the same; it is only removed later.
            damaged = tier.path(names[0]).read_bytes()
            tier.path(names[0]).write_bytes(b"?" + damaged[1:])
            assert await tier.load(names) == [CORRUPT] + [LOADED] * 7
            assert tier.path(names[0]).exists()
        assert await tier.store(more) == [STORED] * 8, "the lock of a killed process is free"
        assert await tier.load(names) == [CORRUPT] + [LOADED] * 7
        assert not tier.path(names[0]).exists()


async def test_a_store_waits_for_the_lock_no_longer_than_its_deadline(tmp_path):
    names = keys(4)
    async with open_files(one_bucket(tmp_path), hooks=FilesHooks(lock_seconds=60)) as tier:
        await tier.store(keys(1, start=9))
        with peer("hold", tmp_path / "root", "bucket-00/lock") as holder:
            assert holder.stdout.readline() == "held\n"
            for row, key in enumerate(names):
                tier.fill(row, key)
            clock = tier.backend._context.clock
            job = tier.job(JobKind.STORE, names, clock() + 0.05)
            assert flat(await tier.backend.store(job)) == [LATE] * 4
        # What was let down goes away by itself once it gets its turn.
        assert await tier.store(names) == [STORED] * 4
    assert temporaries(tmp_path) == []


async def test_waiting_for_the_other_stores_of_this_process_is_no_reason_to_drop(tmp_path, monkeypatch):
    """A slow server makes each visit slow; only time in which others keep the lock counts."""
    reserve = Bucket.reserve

    def slowly(bucket, wanted, name):
        time.sleep(0.03)
        return reserve(bucket, wanted, name)

    async with open_files(one_bucket(tmp_path), hooks=FilesHooks(lock_seconds=0.02)) as tier:
        assert await tier.store(keys(1)) == [STORED]
        with bucket_locked(tmp_path / "root" / "bucket-00"):
            assert await tier.store(keys(2, start=50)) == [BACKLOG] * 2
        monkeypatch.setattr(Bucket, "reserve", slowly)
        assert await tier.store(keys(12)) == [PRESENT] + [STORED] * 11
        assert tier.counters["lock.timeout"] == 2
        assert tier.backend._root.buckets[0].refused is None, "what was is forgotten once the lock was had"


async def test_a_reset_that_cannot_be_written_says_so(tmp_path):
    async with open_files(one_bucket(tmp_path), hooks=QUICK) as tier:
        await tier.store(keys(4))
        with peer("hold", tmp_path / "root", "epochs/lock") as holder:
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(RootError, match="stopped or hung"):
                await tier.backend.reset(1)
        await tier.backend.reset(1)
        assert await tier.present(keys(4)) == 0


async def test_a_file_system_without_locks_stores_nothing(tmp_path, monkeypatch):
    names = keys(4)
    async with open_files(one_bucket(tmp_path), hooks=QUICK) as tier:
        await tier.store(names)

        def refuse(fd, operation):
            raise OSError(95, "not supported")

        monkeypatch.setattr("fcntl.flock", refuse)
        assert not any(outcome.ok for outcome in await tier.store(keys(4, start=10)))
        assert await tier.load(names) == [LOADED] * 4
        assert len(block_files(tmp_path)) == 4


async def test_a_lock_file_that_was_replaced_does_not_count(tmp_path):
    async with open_files(one_bucket(tmp_path), hooks=QUICK) as tier:
        await tier.store(keys(1))
        lock = tmp_path / "root" / "bucket-00" / "lock"
        with peer("hold", tmp_path / "root", "bucket-00/lock") as holder:
            assert holder.stdout.readline() == "held\n"
            lock.unlink()
            assert await tier.store(keys(4)) == [PRESENT] + [STORED] * 3, "the new file is the lock for everybody now"


@pytest.mark.parametrize("damage", ["flipped", "missing", "empty", "foreign", "a folder"])
async def test_an_account_that_is_not_whole_is_rebuilt(tmp_path, damage):
    async with open_files(one_bucket(tmp_path)) as tier:
        await tier.store(keys(10))
        account = tmp_path / "root" / "bucket-00" / "account"
        good = account.read_bytes()
        if damage == "flipped":
            account.write_bytes(good[:60] + bytes([good[60] ^ 4]) + good[61:])
        elif damage == "missing":
            account.unlink()
        elif damage == "a folder":
            account.unlink()
            account.mkdir()
        else:
            account.write_bytes(b"" if damage == "empty" else b"x" * len(good))
        stored = await tier.store(keys(5, start=20))
        if damage == "a folder":
            assert not any(outcome.ok for outcome in stored), "never a store without an account"
        else:
            assert stored == [STORED] * 5
            assert account_is_true(tier)
        assert await tier.load(keys(10)) == [LOADED] * 10


async def test_an_account_older_than_the_files_is_found_out_on_the_first_visit(tmp_path):
    account = tmp_path / "root" / "bucket-00" / "account"
    async with open_files(one_bucket(tmp_path)) as tier:
        await tier.store(keys(2))
        old = account.read_bytes()
        await tier.store(keys(40))
    account.write_bytes(old)  # as after a power loss
    async with open_files(one_bucket(tmp_path)) as tier:
        assert await tier.store(keys(1, start=90)) == [STORED]
        assert account_is_true(tier)


async def test_blocks_stored_at_once_by_two_tiers_leave_one_file_each(tmp_path):
    names = keys(30)
    settings = one_bucket(tmp_path)
    async with open_files(settings) as one, open_files(settings) as other:
        results = await asyncio.gather(one.store(names), other.store(names))
        assert all(outcome in (STORED, PRESENT) for outcome in results[0] + results[1])
        assert await one.load(names) == await other.load(names) == [LOADED] * 30
        assert len(block_files(tmp_path)) == 30
        assert account_is_true(one), "what came too late is given back"
    assert temporaries(tmp_path) == []
    assert os.listdir(tmp_path / "root" / "leases") == []


def test_a_child_forked_under_a_lock_does_not_keep_it(tmp_path):
    """Else it would keep the lock of a process that is killed for as long as it lives itself."""

    def fork_and_lock_in_child() -> int:
        child = os.fork()
        if child == 0:
            held = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
            os._exit(str(tmp_path / LOCK_NAME) in held)
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)

    folder_fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert with_lock(folder_fd, lambda: with_lock(folder_fd, lambda: 0)) is LockBusy.BUSY
        assert with_lock(folder_fd, fork_and_lock_in_child) == 0
        assert with_lock(folder_fd, lambda: 7) == 7
    finally:
        os.close(folder_fd)
