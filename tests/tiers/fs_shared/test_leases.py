"""Layout files: what a dead process left behind goes, what a live one writes stays, a kill shows nothing partial."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import threading
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from support_files import account_is_true, disk_bytes, open_files, options, temporaries
from support_fs import keys
from support_stack import until

from kvtier.types.jobs import LOADED, STORED
from kvtier_fs.shared.bucket import Bucket
from kvtier_fs.shared.folder import TreeFolder
from kvtier_fs.shared.leases import FolderLeases, Holder, this_process
from kvtier_fs.shared.root import FilesHooks

ME = this_process()


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def folder(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def lease(folder: int, number: int, holder: Holder, clock: Clock) -> FolderLeases:
    """A lease somebody took."""
    taken = FolderLeases(folder, f"{number:016x}", holder, clock, seconds=60)
    taken.take()
    return taken


def ended_process() -> int:
    """The id of a process that has ended."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def test_processes_of_this_boot_are_asked_for_by_pid_and_start_time(folder):
    clock = Clock()
    ours = lease(folder, 1, ME, clock)
    alive = lease(folder, 2, ME, clock)
    dead = lease(folder, 3, replace(ME, pid=ended_process()), clock)
    reused = lease(folder, 4, replace(ME, started=ME.started - 1), clock)
    assert not ours.expired(ours.name)
    assert not ours.expired(alive.name)
    assert ours.expired(dead.name)
    assert ours.expired(reused.name), "the pid belongs to another process by now"
    assert ours.expired("f" * 16), "a lease that is not there"
    clock.now += 10_000
    assert not ours.expired(alive.name), "a live process needs no heartbeat here"


ONE_THREAD_LEFT = """
import ctypes, sys, threading
threading.Thread(target=sys.stdin.read).start()
print("ready", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_lives_until_its_last_thread_has_ended(folder):
    """A killed process may have a thread in a system call that it cannot be torn from, and that still changes files."""
    ours = lease(folder, 1, ME, Clock())
    command = [sys.executable, "-c", ONE_THREAD_LEFT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            stat = Path(f"/proc/{process.pid}/stat")
            while (fields := stat.read_text().rpartition(")")[2].split())[0] != "Z":
                pass
            other = lease(folder, 2, replace(ME, pid=process.pid, started=int(fields[19])), Clock())
            assert not ours.expired(other.name)
        finally:
            process.kill()
            process.wait()
    assert ours.expired(other.name)


@pytest.mark.parametrize("elsewhere", [{"boot": "another"}, {"pid_namespace": 1}, {"boot": "another", "host": "b"}])
def test_other_hosts_and_containers_are_judged_by_their_heartbeat(folder, elsewhere):
    clock = Clock()
    ours = lease(folder, 1, ME, clock)
    other = lease(folder, 2, replace(ME, pid=ended_process(), **elsewhere), clock)
    assert not ours.expired(other.name)
    clock.now += 59
    assert not ours.expired(other.name)
    other.beat()
    clock.now += 59
    assert not ours.expired(other.name), "it beat"
    clock.now += 59
    assert not ours.expired(other.name), "seen anew 59 seconds ago"
    clock.now += 1
    assert ours.expired(other.name)


def test_a_lease_that_another_host_removes_while_it_is_read_is_none(folder, monkeypatch):
    ours, other = (lease(folder, number, ME, Clock()) for number in (1, 2))
    assert not ours.expired(other.name)

    def stale(fd, length, offset):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr("os.pread", stale)
    assert ours.expired(other.name)


def test_a_damaged_lease_is_judged_by_its_heartbeat(folder, tmp_path):
    clock = Clock()
    ours = lease(folder, 1, ME, clock)
    for damage in (b"", b"x" * 100, b"KVTIERLE"):
        (tmp_path / ("a" * 16)).write_bytes(damage)
        assert not ours.expired("a" * 16)
        clock.now += 60
        assert ours.expired("a" * 16)


def test_a_lease_that_was_swept_while_its_holder_stood_still_is_taken_anew(folder):
    clock = Clock()
    ours = lease(folder, 1, ME, clock)
    slow = lease(folder, 2, replace(ME, boot="another"), clock)
    assert ours.dead() == []
    clock.now += 60
    assert ours.dead() == [slow.name]
    ours.remove(slow.name)
    assert ours.expired(slow.name)
    slow.beat()
    assert not ours.expired(slow.name)


def leave_temporary(root: Path, holder: Holder, number: int) -> Path:
    """What a process that died in a store leaves behind: a lease and a temporary of full size."""
    fd = os.open(root / "leases", os.O_RDONLY | os.O_DIRECTORY)
    try:
        name = lease(fd, number, holder, Clock()).name
    finally:
        os.close(fd)
    left = root / "bucket-00" / f"new-{name}-1"
    left.write_bytes(bytes(20480))
    return left


async def test_only_the_temporaries_of_dead_processes_are_swept(tmp_path):
    root = tmp_path / "root"
    async with open_files(options(root, capacity=2 << 20)) as tier:
        await tier.store(keys(4))
        dead = leave_temporary(root, replace(ME, pid=ended_process()), 1)
        alive = leave_temporary(root, ME, 2)
        far = leave_temporary(root, replace(ME, boot="another"), 3)
        orphan = root / "bucket-00" / f"new-{'9' * 16}-1"
        orphan.write_bytes(b"")
        small = root / f"new-{'9' * 16}-2"
        small.write_bytes(b"")
        await tier.backend.sweep()
        assert [path.exists() for path in (dead, orphan, small, alive, far)] == [False, False, False, True, True]
        assert tier.counters["temporary.swept"] == 2
        assert account_is_true(tier), "the temporaries that stayed count"
        assert await tier.load(keys(4)) == [LOADED] * 4
    assert len(os.listdir(root / "leases")) == 2


class SlowToPublish(TreeFolder):
    """Waits between the writing of a superblock and its publishing."""

    written, go_on = threading.Event(), threading.Event()

    def _publish_once(self, temporary):
        self.written.set()
        assert self.go_on.wait(60)
        super()._publish_once(temporary)


async def test_a_root_that_is_made_by_two_at_once_is_not_swept_from_under_the_slower(tmp_path):
    """Every temporary has a lease, that of a superblock too."""
    async with AsyncExitStack() as stack:
        slow = asyncio.create_task(
            stack.enter_async_context(open_files(options(tmp_path / "root"), hooks=FilesHooks(folder=SlowToPublish)))
        )
        assert await asyncio.get_running_loop().run_in_executor(None, SlowToPublish.written.wait, 60)
        async with open_files(options(tmp_path / "root")) as fast:
            await fast.backend.sweep()
            assert len(temporaries(tmp_path)) == 1
            await fast.store(keys(4))
            SlowToPublish.go_on.set()
            tier = await slow
            assert await tier.load(keys(4)) == [LOADED] * 4
            assert temporaries(tmp_path) == []


async def test_what_belongs_to_a_lease_that_cannot_be_read_stays_and_is_in_nobodys_way(tmp_path):
    root = tmp_path / "root"
    async with open_files(options(root, capacity=2 << 20)) as tier:
        await tier.store(keys(4))
        (root / "leases" / ("e" * 16)).mkdir()
        dead = leave_temporary(root, replace(ME, pid=ended_process()), 1)
        unknown = root / "bucket-00" / f"new-{'e' * 16}-1"
        unknown.write_bytes(bytes(8192))
        await tier.backend.sweep()
        assert (dead.exists(), unknown.exists()) == (False, True)
        assert await tier.store(keys(4, start=10)) == [STORED] * 4
        assert account_is_true(tier)


async def test_temporaries_count_until_they_are_swept(tmp_path):
    root = tmp_path / "root"
    settings = options(root, capacity=2 << 20)
    async with open_files(settings) as tier:
        await tier.store(keys(100))
        before = await tier.present(keys(100))
        for number in range(20):
            leave_temporary(root, ME, number)
    async with open_files(settings) as tier:
        await tier.store(keys(30, start=200))
        assert disk_bytes(root) <= 2 << 20
        assert await tier.present(keys(100) + keys(30, start=200)) <= before - 19


async def test_a_heartbeat_is_written_and_the_lease_given_up(tmp_path):
    root = tmp_path / "root"
    hooks = FilesHooks(lease_seconds=0.006)
    async with open_files(options(root), hooks=hooks) as tier:
        (name,) = os.listdir(root / "leases")
        first = os.stat(root / "leases" / name).st_mtime_ns
        os.unlink(root / "leases" / name)
        await tier.backend._root.call(tier.backend._root.leases.beat)
        assert os.stat(root / "leases" / name).st_mtime_ns >= first
    assert os.listdir(root / "leases") == []


async def test_a_lease_is_renewed_while_a_sweep_takes_long(tmp_path, monkeypatch):
    root, began, go_on = tmp_path / "root", threading.Event(), threading.Event()

    def stands_still(bucket):
        began.set()
        go_on.wait()
        return False

    async with open_files(options(root)) as tier:
        await tier.store(keys(4))
    monkeypatch.setattr(Bucket, "has_temporaries", stands_still)
    async with open_files(options(root), hooks=FilesHooks(lease_seconds=0.6)) as tier:
        try:
            await until(began.is_set)
            lease = root / "leases" / tier.backend._root.lease
            seen = lease.stat().st_mtime_ns
            await until(lambda: lease.stat().st_mtime_ns > seen)
        finally:
            go_on.set()
