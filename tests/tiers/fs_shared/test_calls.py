"""Layout files: the N-th file call fails, for every N. No descriptor is lost, nothing is left, the bytes are right."""

from __future__ import annotations

import errno
import itertools
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support_counts import full_alone
from support_files import account_is_true, open_files, options, temporaries
from support_files_calls import FailingCalls
from support_fs import keys, layout

from kvtier.errors import KVTierError
from kvtier.testing.trace import leaving_no_trace
from kvtier.types.jobs import LOADED, MISSING, PRESENT, STORED, BlockStatus, failed
from kvtier_fs.shared.leases import FolderLeases, this_process

CAPACITY = 240 << 10
LIMIT = 5000


def settings(root: Path):
    return options(root, capacity=CAPACITY, io_threads=2, close_timeout_seconds=10)


@pytest.fixture(scope="module")
def dead_holder():
    """A holder of leases that has ended."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return replace(this_process(), pid=done.pid)


def leave_a_dead_process(root: Path, holder) -> None:
    """A temporary and its lease, for the sweep at opening."""
    (root / "bucket-00").mkdir(mode=0o700, parents=True)
    (root / "leases").mkdir(mode=0o700)
    root.chmod(0o700)
    fd = os.open(root / "leases", os.O_RDONLY | os.O_DIRECTORY)
    try:
        FolderLeases(fd, "d" * 16, holder, float, 60).take()
    finally:
        os.close(fd)
    (root / "bucket-00" / f"new-{'d' * 16}-1").write_bytes(bytes(8192))


async def life(root: Path) -> int:
    """Everything the layout does: open, sweep, store, evict, load, find, remove, reset, prune, close.

    Returns the epoch it has reached durably.
    """
    epoch, names = 0, keys(4)
    async with open_files(settings(root), layout(4096), rows=4) as tier:
        await tier.backend.sweep()
        await tier.store(names)
        for key in names[:2]:
            path = tier.path(key)
            if path.exists():
                os.utime(path, (1, 1))
        await tier.store(names[:1])
        await tier.load(names)
        if tier.path(names[3]).exists():
            os.truncate(tier.path(names[3]), 7000)
        await tier.load(names[3:])
        for start in range(10, 26, 4):
            await tier.store(keys(4, start=start))
        await tier.present(names)
        await tier.backend.reset(1)
        epoch = tier.epoch = 1
        await tier.store(names, version=1)
        await tier.load(names, version=1)
        await tier.backend.sweep()
    return epoch


async def life_afterwards(root: Path, epoch: int) -> None:
    """The disk is well again: nothing is left over, what is there is right, everything works."""
    names = keys(4)
    async with open_files(settings(root), layout(4096), rows=4) as tier:
        assert tier.opened.epoch >= epoch, "a reset that returned is durable"
        await tier.backend.sweep()
        assert temporaries(root) == []
        assert not (root / "leases" / ("d" * 16)).exists(), "what was dead is swept, now or then"
        version = min(tier.opened.epoch, 1)
        assert {outcome.status for outcome in await tier.load(names, version)} <= {"loaded", "missing", "corrupt"}
        assert set(await tier.store(names, version)) <= {STORED, PRESENT}
        assert await tier.load(names, version) == [LOADED] * 4
        assert account_is_true(tier)


async def fail_one_call(root: Path, holder, number: int, code: int) -> FailingCalls:
    """A life with one call that fails, and one without."""
    leave_a_dead_process(root, holder)
    calls, epoch, refused = FailingCalls(number, code), 0, ""
    try:
        with leaving_no_trace():
            try:
                with calls.everywhere():
                    epoch = await life(root)
            except KVTierError as error:
                refused = str(error)
        assert calls.struck or not refused, refused
        with leaving_no_trace():
            await life_afterwards(root, epoch)
    finally:
        print(f"{errno.errorcode[code]} from {calls.struck}")
    return calls


CODES = [errno.EIO, errno.ENOSPC, errno.EACCES, errno.ESTALE]


@pytest.mark.parametrize(
    "code", [*CODES[:2], *(pytest.param(code, marks=full_alone()) for code in CODES[2:])], ids=errno.errorcode.get
)
async def test_some_file_calls_fail(tmp_path, dead_holder, seed, code):
    """Every hundredth; which ones, the seed says."""
    first = random.Random(seed).randrange(1, 101)
    struck = 0
    for number in range(first, LIMIT, 100):
        calls = await fail_one_call(tmp_path / str(number), dead_holder, number, code)
        if not calls.struck:
            break
        struck += 1
    assert struck > 2, "the life has more file calls than that"


@pytest.mark.long
@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
async def test_every_file_call_fails(tmp_path, dead_holder, code):
    met = set()
    for number in itertools.count(1):
        calls = await fail_one_call(tmp_path / str(number), dead_holder, number, code)
        if not calls.struck:
            break
        met.add(calls.struck.split("(")[0])
        assert number < LIMIT
    assert met >= {"open", "close", "mkdir", "fchmod", "flock", "fallocate", "rename_new", "unlink", "utime", "link"}


async def test_a_life_without_faults_does_what_it_is_for(tmp_path, dead_holder):
    root = tmp_path / "root"
    leave_a_dead_process(root, dead_holder)
    calls = FailingCalls(0, 0)
    with calls.everywhere():
        assert await life(root) == 1
    assert calls.count > 300
    async with open_files(settings(root), layout(4096), rows=4) as tier:
        tier.epoch = 1
        assert (await tier.load(keys(1, start=24), 1))[0].status is BlockStatus.MISSING
        assert await tier.load(keys(4), 1) == [LOADED] * 4


async def test_a_stale_handle_at_any_call_of_a_load_or_a_lookup_is_a_miss_at_worst(tmp_path):
    """Another host removed or replaced the file while this one had it open: NFS says ESTALE, wherever it notices."""
    names = keys(3)
    async with open_files(options(tmp_path / "root"), layout(4096)) as tier:
        assert await tier.store(names) == [STORED] * 3
        for number in itertools.count(1):
            for key in names:
                os.utime(tier.path(key), (1, 1))
            calls = FailingCalls(number, errno.ESTALE)
            with calls.everywhere():
                found = await tier.present(names)
                outcomes = await tier.load(names)
            assert set(outcomes) <= {LOADED, MISSING}, calls.struck
            assert found >= 2, f"{calls.struck}: one call concerns one block, or is made again"
            assert outcomes.count(MISSING) <= 1, calls.struck
            if not calls.struck:
                break
        assert number > 20
        assert await tier.load(names) == [LOADED] * 3, "nothing was removed for it"


async def test_a_temporary_that_was_created_but_cannot_be_used_goes_at_once(tmp_path, monkeypatch):
    async with open_files(options(tmp_path / "root"), layout(4096)) as tier:
        await tier.store(keys(2))

        def refused(fd, mode):
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr("os.fchmod", refused)
        before = os.umask(0o700)  # so that the mode of a new file has to be put right
        try:
            assert await tier.store(keys(2, start=10)) == [failed(errno.EPERM)] * 2
        finally:
            os.umask(before)
        assert temporaries(tmp_path) == []
