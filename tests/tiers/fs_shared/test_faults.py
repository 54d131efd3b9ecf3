"""Layout files: I/O that fails, comes short or never ends; nothing is visible before it is whole, nothing is left."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from dataclasses import replace

import pytest
from support_files import account_is_true, block_files, open_files, options, temporaries
from support_fs import PAGE, TestRows, flat, keys, layout
from support_fs import options as slab_options
from support_fs_engine import FaultyEngine
from support_stack import until

from kvtier.errors import UsageError
from kvtier.tier.contract import TierContext
from kvtier.types.geometry import Geometry
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import (
    CORRUPT,
    LATE,
    LOADED,
    MISSING,
    STORED,
    BlockStatus,
    DropReason,
    GPUGroup,
    JobKind,
    RowGroup,
    TransferJob,
    dropped,
    failed,
)
from kvtier.types.keys import GroupIndex, JobId, make_key
from kvtier.types.namespace import Namespace
from kvtier_fs import FSBackend, SharedFSBackend
from kvtier_fs.io.contract import IOKind
from kvtier_fs.shared.bucket import Bucket
from kvtier_fs.shared.folder import TreeFolder
from kvtier_fs.shared.root import FilesHooks
from kvtier_fs.testing import FaultyIO


def hooks(engine: FaultyEngine, **changes: object) -> FilesHooks:
    return FilesHooks(engine=lambda: engine, **changes)


@pytest.mark.parametrize("kind", ["slab", "files"])
async def test_one_call_makes_a_tier_of_either_type_on_faulty_io(tmp_path, kind):
    io, geometry = FaultyIO(), Geometry(layout(16384), PAGE)
    backend = io.tier((slab_options if kind == "slab" else options)(tmp_path / "root"))
    assert isinstance(backend, SharedFSBackend if kind == "files" else FSBackend)
    rows = TestRows(4, geometry.row_bytes)
    try:
        context = TierContext("fs", geometry, Namespace(geometry.layout), time.monotonic, rows=rows)
        opened = await backend.open(context)
        assert "faulty" in opened.mode
        assert len(io.engines) == 1
    finally:
        await backend.close()


async def test_short_transfers_are_continued(tmp_path):
    engine = FaultyEngine(lambda request: max(512, request.length // 2 // 512 * 512))
    names = keys(4)
    async with open_files(options(tmp_path / "root"), hooks=hooks(engine)) as tier:
        assert await tier.store(names) == [STORED] * 4
        assert await tier.load(names) == [LOADED] * 4
        assert tier.counters["io.short"] > 8


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ECANCELED, 0])
async def test_a_write_that_fails_leaves_nothing_behind(tmp_path, number):
    engine = FaultyEngine()
    names = keys(6)
    async with open_files(options(tmp_path / "root"), hooks=hooks(engine)) as tier:
        engine.fault = lambda request: -number if request.kind is IOKind.WRITE else None
        full = number in (errno.ENOSPC, errno.EDQUOT)
        expected = dropped(DropReason.DISK_FULL) if full else failed(number or errno.EIO)
        assert await tier.store(names) == [expected] * 6
        assert block_files(tmp_path) == temporaries(tmp_path) == []
        assert await tier.present(names) == 0
        assert account_is_true(tier)
        engine.fault = lambda request: None
        assert await tier.store(names) == [STORED] * 6
        assert await tier.load(names) == [LOADED] * 6
        assert account_is_true(tier)


async def test_interrupted_requests_are_asked_again_but_not_for_ever(tmp_path):
    engine = FaultyEngine()
    names = keys(2)
    left = [-errno.EINTR, -errno.EAGAIN, -errno.EINTR]
    engine.fault = lambda request: left.pop() if left else None
    async with open_files(options(tmp_path / "root"), hooks=hooks(engine)) as tier:
        assert await tier.store(names) == [STORED] * 2
        engine.fault = lambda request: -errno.EAGAIN
        assert await tier.load(names) == [failed(errno.EAGAIN)] * 2
        engine.fault = lambda request: None
        assert await tier.load(names) == [LOADED] * 2


async def test_a_read_that_fails_keeps_the_file(tmp_path):
    engine = FaultyEngine()
    names = keys(4)
    async with open_files(options(tmp_path / "root"), hooks=hooks(engine)) as tier:
        await tier.store(names)
        engine.fault = lambda request: -errno.EIO
        assert await tier.load(names) == [failed(errno.EIO)] * 4
        engine.fault = lambda request: -errno.ESTALE
        assert await tier.load(names) == [MISSING] * 4, "removed on another host while it was open"
        engine.fault = lambda request: None
        assert await tier.load(names) == [LOADED] * 4


async def test_every_single_request_of_a_job_may_fail(tmp_path):
    names = keys(3)
    shape = layout(4 << 20)  # several requests for each block
    for fails in range(1, 10**6):
        engine = FaultyEngine()
        count = 0

        def fault(request, fails=fails):
            nonlocal count
            count += 1
            return -errno.EIO if count == fails else None

        engine.fault = fault
        root = tmp_path / str(fails)
        async with open_files(options(root, capacity=64 << 20), shape, rows=3, hooks=hooks(engine)) as tier:
            stored = await tier.store(names)
            assert temporaries(root) == []
            loaded = await tier.load(names)
        bad = [outcome for outcome in stored + loaded if not outcome.ok]
        if count < fails:
            assert bad == []
            break
        assert bad, fails
        assert {outcome.status for outcome in bad} <= {BlockStatus.FAILED, BlockStatus.MISSING}
        assert sum(outcome == failed(errno.EIO) for outcome in bad) == 1
    assert fails > 24


async def test_a_torn_write_that_claims_to_be_whole_is_caught(tmp_path):
    engine = FaultyEngine()
    names = keys(4)
    async with open_files(options(tmp_path / "root"), hooks=hooks(engine)) as tier:
        await tier.store(names)
        for number, key in enumerate(names):  # power was lost: the file is there, its last sectors are not
            fd = os.open(tier.path(key), os.O_RDWR)
            os.pwrite(fd, bytes(512 * (number + 1)), os.fstat(fd).st_size - 512 * (number + 1))
            os.close(fd)
        assert await tier.present(names) == 4
        assert await tier.load(names) == [CORRUPT] * 4
        assert await tier.present(names) == 0


async def test_a_block_is_invisible_until_it_is_whole(tmp_path):
    engine = FaultyEngine()
    names = keys(4)
    settings = options(tmp_path / "root")
    async with open_files(settings, hooks=hooks(engine)) as tier, open_files(settings) as other:
        engine.hold = lambda request: request.kind is IOKind.WRITE
        storing = asyncio.create_task(tier.store(names))
        await engine.holding.wait()
        assert await tier.present(names) == await other.present(names) == 0
        assert await other.load(names) == [MISSING] * 4
        await other.backend.sweep()
        assert len(temporaries(tmp_path)) >= 1, "somebody else's live temporary"
        engine.let_go()
        assert await storing == [STORED] * 4
        assert await other.load(names) == [LOADED] * 4


async def test_a_cancelled_job_ends_only_when_its_rows_are_free(tmp_path):
    engine = FaultyEngine()
    names = keys(4)
    async with open_files(options(tmp_path / "root"), hooks=hooks(engine)) as tier:
        await tier.store(names)
        engine.hold = lambda request: True
        loading = asyncio.create_task(tier.load(names))
        while len(engine.held) < 4:
            await engine.holding.wait()
            await asyncio.sleep(0)
        loading.cancel()
        done, _ = await asyncio.wait([loading], timeout=0.05)
        assert not done
        engine.let_go()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert await tier.load(names) == [LOADED] * 4


async def test_a_job_past_its_deadline_moves_nothing(tmp_path):
    names = keys(4)
    async with open_files(options(tmp_path / "root")) as tier:
        for row, key in enumerate(names):
            tier.fill(row, key)
        assert flat(await tier.backend.store(tier.job(JobKind.STORE, names, time.monotonic() - 1))) == [LATE] * 4
        assert block_files(tmp_path) == []


async def test_close_reports_what_is_stuck_and_ends_at_its_deadline(tmp_path):
    engine = FaultyEngine()
    names = keys(3)
    async with open_files(options(tmp_path / "root", close_timeout_seconds=0.2), hooks=hooks(engine)) as tier:
        engine.hold = lambda request: True
        storing = asyncio.create_task(tier.store(names))
        while len(engine.held) < 3:
            await engine.holding.wait()
            await asyncio.sleep(0)
        await tier.backend.close()
        assert tier.counters["close.stuck"] == 3
        assert await storing == [LATE] * 3
        engine.let_go()
        assert await tier.present(names) == 0
        await tier.backend.close()
        assert tier.counters["close.stuck"] == 0
        assert block_files(tmp_path) + temporaries(tmp_path) == [], "a job that was told late leaves nothing"


async def test_close_takes_its_time_once_however_much_is_stuck(tmp_path, monkeypatch):
    thawed, waiting, seconds = threading.Event(), threading.Event(), 3.0
    write = os.pwritev

    def frozen(*given):
        waiting.set()
        thawed.wait()
        return write(*given)

    async with open_files(options(tmp_path / "root", close_timeout_seconds=seconds)) as tier:
        monkeypatch.setattr("kvtier_fs.io.threads.os.pwritev", frozen)
        storing = asyncio.create_task(tier.store(keys(3)))
        try:
            await until(waiting.is_set)
            began = time.monotonic()
            await tier.backend.close()
            assert time.monotonic() - began < 1.5 * seconds
            assert tier.counters["close.stuck"] > 0
        finally:
            thawed.set()
        assert not any(outcome.ok for outcome in await storing)


async def test_a_loop_ends_while_the_disk_under_a_store_hangs(tmp_path):
    """What `asyncio.run` does at the end: it cancels what still runs, and waits for it."""
    engine, thawed, settings = FaultyEngine(), threading.Event(), options(tmp_path / "root", close_timeout_seconds=0.1)
    async with open_files(settings, hooks=hooks(engine)) as tier:
        engine.hold = lambda request: True
        storing = asyncio.create_task(tier.store(keys(3)))
        while len(engine.held) < 3:
            await engine.holding.wait()
            await asyncio.sleep(0)
        root = tier.backend._root
        calls = [root.files.submit(thawed.wait) for _ in range(root.files._limit)]
        try:
            await tier.backend.close()
            moving = list(tier.backend._moving)
            assert (len(moving), await storing) == (3, [LATE] * 3)
            for task in moving:
                task.cancel()
            ended, _ = await asyncio.wait(moving, timeout=20)
            assert ended == {*moving}
        finally:
            thawed.set()
        for call in calls:
            await asyncio.wrap_future(call)
        engine.let_go()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not engine.running
        await tier.backend.close()
        assert tier.counters["close.stuck"] == 0


class FrozenFolder(TreeFolder):
    """A root whose file system stands still until `thawed` is set: whoever asks for an epoch waits."""

    def __init__(self, path, options) -> None:
        super().__init__(path, options)
        self.thawed = threading.Event()
        self.thawed.set()

    def epoch(self, namespace):
        self.thawed.wait()
        return super().epoch(namespace)

    def durable_epoch(self, namespace):
        self.thawed.wait()
        return super().durable_epoch(namespace)

    def leave(self):
        self.thawed.wait()
        super().leave()


async def test_a_frozen_file_system_costs_jobs_at_their_deadline_and_close_at_its_own(tmp_path):
    names = keys(4)
    settings = options(tmp_path / "root", close_timeout_seconds=0.1, io_threads=2)
    async with open_files(settings, hooks=FilesHooks(folder=FrozenFolder)) as tier:
        assert await tier.store(names) == [STORED] * 4
        frozen = tier.backend._root.folder
        frozen.thawed.clear()
        try:
            for kind in (JobKind.LOAD, JobKind.STORE, JobKind.LOAD):
                job = tier.job(kind, names, time.monotonic() + 0.05)
                move = tier.backend.load if kind is JobKind.LOAD else tier.backend.store
                assert flat(await move(job)) == [LATE] * 4
            await tier.backend.close()
            assert tier.counters["close.stuck"] > 0
        finally:
            frozen.thawed.set()
        await tier.backend.close()
        assert tier.counters["close.stuck"] == 0
    assert len(block_files(tmp_path)) == 4
    assert temporaries(tmp_path) == []


async def test_late_blocks_of_a_frozen_file_system_leave_nothing_behind(tmp_path):
    names = keys(4)
    async with open_files(options(tmp_path / "root", io_threads=1), hooks=FilesHooks(folder=FrozenFolder)) as tier:
        before, frozen = asyncio.all_tasks(), tier.backend._root.folder
        frozen.thawed.clear()
        try:
            for row, key in enumerate(names):
                tier.fill(row, key)
            for move, kind in ((tier.backend.store, JobKind.STORE), (tier.backend.load, JobKind.LOAD)):
                assert flat(await move(tier.job(kind, names, time.monotonic() + 0.5))) == [LATE] * 4
            await until(lambda: asyncio.all_tasks() == before)
        finally:
            frozen.thawed.set()
        assert await tier.store(names) == [STORED] * 4


async def test_late_blocks_behind_a_reset_of_a_frozen_file_system_leave_one_task(tmp_path):
    names = keys(4)
    async with open_files(options(tmp_path / "root", io_threads=1), hooks=FilesHooks(folder=FrozenFolder)) as tier:
        before, frozen = asyncio.all_tasks(), tier.backend._root.folder
        frozen.thawed.clear()
        epoch = tier.backend._epoch.now + 1
        try:
            for row, key in enumerate(names):
                tier.fill(row, key)
            for _ in range(3):
                job = replace(tier.job(JobKind.STORE, names, time.monotonic() + 0.3), epoch=epoch)
                assert flat(await tier.backend.store(job)) == [LATE] * 4
            await until(lambda: len(asyncio.all_tasks() - before) == 1)
        finally:
            frozen.thawed.set()
        await until(lambda: asyncio.all_tasks() == before)
        assert tier.backend._epoch.raised == epoch


async def test_close_closes_no_folder_under_a_call_that_works_in_it(tmp_path, monkeypatch):
    """A descriptor's number may belong to another folder of this process by then."""
    order, began, go_on = [], threading.Event(), threading.Event()
    leave = TreeFolder.leave

    def stands_still(bucket):
        began.set()
        go_on.wait()
        order.append("the call ends")
        return False

    def leaves(folder):
        order.append("folders are closed")
        leave(folder)

    async with open_files(options(tmp_path / "root")) as tier:
        await tier.store(keys(4))
        monkeypatch.setattr(Bucket, "has_temporaries", stands_still)
        monkeypatch.setattr(TreeFolder, "leave", leaves)
        sweeping = asyncio.create_task(tier.backend.sweep())
        assert await asyncio.get_running_loop().run_in_executor(None, began.wait, 60)
        sweeping.cancel()
        closing = asyncio.create_task(tier.backend.close())
        done, _ = await asyncio.wait([closing], timeout=0.05)
        go_on.set()
        assert not done
        await closing
        assert order[-1] == "folders are closed"
        assert "the call ends" in order


async def test_a_full_disk_drops_stores_and_goes_on_loading(tmp_path):
    names = keys(8)
    async with open_files(options(tmp_path / "root")) as tier:
        await tier.store(names)
    async with open_files(options(tmp_path / "root", min_free_bytes=1 << 60)) as tier:
        more = keys(4, start=100)
        assert await tier.store(more) == [dropped(DropReason.DISK_FULL)] * 4
        assert await tier.present(more) == 0
        left = [key for key in names if tier.path(key).exists()]
        assert await tier.load(left) == [LOADED] * len(left)
        assert account_is_true(tier)


async def test_jobs_that_make_no_sense_are_refused(tmp_path):
    async with open_files(options(tmp_path / "root")) as tier:
        (key,) = keys(1)
        wrong = [RowGroup(g, (key,), rows) for g, rows in [(0, [99]), (0, [-1]), (0, [0, 1]), (1, [0]), (5, [0])]]
        for group in (*wrong, GPUGroup(GroupIndex(0), (key,), GPURuns.whole([0]))):
            job = TransferJob(JobId(1), JobKind.LOAD, (group,))
            with pytest.raises(UsageError):
                await tier.backend.load(job)
        assert await tier.present([make_key(b"x", 7)]) == 0, "a group that this layout does not have"
    with pytest.raises(UsageError):
        await tier.load([key])
