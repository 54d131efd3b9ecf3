"""What the device refuses, and a device in error for good, are outcomes of the blocks concerned and of no others."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable
from dataclasses import replace

import numpy as np
import pytest
from support_cuda import FakeCuda
from support_cuda_tier import BLOCKS, GEOMETRY, ROWS, Stand, small
from support_gpu import job, naive_copy
from support_stack import until

from kvtier.types.jobs import DropReason, JobResult, TransferJob, dropped, failed
from kvtier_gpu import GPUBackend
from kvtier_gpu.engines.plan_copier import CopyPath

FAILED = failed(errno.EIO)
MANY_NAMES = ("cuMemcpyBatchAsync", "the copy kernel")
TIER_DOWN = dropped(DropReason.TIER_DOWN)


def moved(tier: GPUBackend, work: TransferJob, to_gpu: bool) -> Awaitable[JobResult]:
    return tier.store(work) if to_gpu else tier.load(work)


def some_blocks(work: TransferJob, positions: list[int]) -> TransferJob:
    """A job of one group with these of its blocks alone."""
    (one,) = (group for group in work.groups if group.keys)
    at = np.array(positions, dtype=np.int64)
    keys = tuple(one.keys[i] for i in positions)
    part = replace(one, keys=keys, rows=one.rows[at], generations=one.generations[at], runs=one.runs.select(at))
    return job(part)


async def check_partial(stand: Stand, tier: GPUBackend, work: TransferJob, to_gpu: bool, missed: set[int]) -> None:
    """Run a job of group 0 of which the blocks at the positions `missed` must fail, and then all of it."""
    (group,) = (one for one in work.groups if one.keys)
    rows, good = group.rows.tolist(), [i for i in range(len(group.keys)) if i not in missed]
    before, had, want = stand.worker.bytes(), stand.rows.view.copy(), stand.rows.view.copy()
    kept = some_blocks(work, good)
    result = await moved(tier, work, to_gpu)
    outcomes = next(of for of in result.outcomes if of)
    assert [i for i, one in enumerate(outcomes) if not one.ok] == sorted(missed)
    assert all(outcomes[i] == FAILED for i in missed)
    assert result.bytes_moved == len(good) * 2 * GEOMETRY.page_bytes(0)
    if to_gpu:
        assert (stand.rows.view == had).all()
    else:
        naive_copy(GEOMETRY, kept, 0, stand.worker.tensors, want, to_gpu=False)
        others = [row for row in range(ROWS) if row not in {rows[i] for i in missed}]
        assert (stand.rows.view[others] == want[others]).all()
        assert stand.worker.holds(before)
    assert (await moved(tier, work, to_gpu)).ok


@pytest.mark.parametrize("to_gpu", [False, True])
@pytest.mark.parametrize("refused", [{0}, {1}, {3}, {0, 2}, {0, 1, 2, 3}])
async def test_a_refused_call_fails_its_own_blocks(to_gpu: bool, refused: set[int], seed: int) -> None:
    """Of each block four pieces, and of each call four: some of them are copied although it was refused. Nor can they
    be copied alone."""
    stand = Stand(FakeCuda(seed), seed)
    work = stand.job(7, (4, 0))
    with small(descriptors=4):
        async with stand.opened() as tier:
            stand.device.faults.refuse, stand.device.faults.no_single = lambda call: call in refused, True
            await check_partial(stand, tier, work, to_gpu, refused)


@pytest.mark.parametrize("to_gpu", [False, True])
async def test_a_refused_call_concerns_every_block_that_has_pieces_in_it(to_gpu: bool, seed: int) -> None:
    stand = Stand(FakeCuda(seed), seed)
    work = stand.job(7, (4, 0))
    with small(descriptors=6):
        async with stand.opened() as tier:
            stand.device.faults.refuse, stand.device.faults.no_single = lambda call: call == 1, True
            await check_partial(stand, tier, work, to_gpu, {1, 2})


@pytest.mark.parametrize("to_gpu", [False, True])
async def test_a_refused_call_of_gathered_pages_fails_the_blocks_of_its_part(to_gpu: bool, seed: int) -> None:
    """The pieces in staging cross by the driver's call where gathering is faster. Others are not scattered."""
    stand = Stand(FakeCuda(seed), seed)
    work = stand.job(7, (4, 0))
    with small(descriptors=64, staging_bytes=2 * GEOMETRY.page_bytes(0), path=CopyPath.GATHER):
        async with stand.opened("fastest") as tier:
            stand.device.faults.refuse, stand.device.faults.no_single = lambda call: call == 2, True
            before = stand.worker.bytes()
            await check_partial(stand, tier, work, to_gpu, {2})
            assert len(stand.device.calls) == 8
            blocks = some_blocks(work, [2]).groups[0].runs.gpu_blocks
            assert to_gpu or stand.worker.holds(before)
            assert len(blocks) == 2


@pytest.mark.parametrize("path", [CopyPath.KERNEL, CopyPath.BATCH, CopyPath.GATHER])
async def test_what_the_driver_refuses_is_copied_singly(
    path: CopyPath, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Each second call of it, after the check. Some of its copies are made all the same, and once more then."""
    stand = Stand(FakeCuda(seed), seed)
    with small(descriptors=3, staging_bytes=1000, path=path), caplog.at_level(logging.WARNING, "kvtier_gpu"):
        async with stand.opened("fastest") as tier:
            stand.device.faults.refuse = stand.device.faults.refuse_launch = lambda call: call % 2 == 1
            for number in range(1, 4):
                work = stand.job(number, (4, 3))
                want, content = stand.wanted(work), stand.worker.bytes()
                assert (await tier.load(work)).ok
                assert (stand.rows.view == want).all()
                stand.wipe(work)
                assert (await tier.store(replace(work, urgent=number == 2))).ok
                assert stand.worker.holds(content)
    lanes = ["kvtier-to_rows-issue", "kvtier-to_gpu-issue", "kvtier-urgent-issue"]
    refused = f"{MANY_NAMES[path is CopyPath.KERNEL]} refused copies (CUDA error 1), which are made singly"
    assert sorted(record.getMessage() for record in caplog.records) == sorted(f"{lane}: {refused}" for lane in lanes)


@pytest.mark.parametrize("copies", list(CopyPath))
@pytest.mark.parametrize("steps", [0, 1, 2, 5, 9, 14, 23, 40])
async def test_a_lost_device_takes_the_tier_out_of_use(
    copies: str, steps: int, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Wherever it is lost, each block has an outcome, what is loaded is whole, and the log has one line."""
    stand = Stand(FakeCuda(seed), seed)
    rows = stand.random.permutation(ROWS).reshape(4, 6)
    ways = (False, True, False, True)
    half = BLOCKS // 2  # stores to the GPU have blocks of their own, so the bytes of the others are known
    jobs = [
        stand.job(number + 1, (2, 1), mine, range(half, BLOCKS) if to_gpu else range(half))
        for number, (mine, to_gpu) in enumerate(zip(rows, ways, strict=True))
    ]
    with small(descriptors=3), caplog.at_level(logging.WARNING, "kvtier_gpu"):
        async with stand.opened(copies) as tier:
            wants = [stand.wanted(work) for work in jobs]
            stand.device.faults.lost_after = stand.device.steps + steps
            results = await asyncio.gather(*(moved(tier, *one) for one in zip(jobs, ways, strict=True)))
            for work, result, to_gpu, want in zip(jobs, results, ways, wants, strict=True):
                check_lost(stand, work, result, to_gpu, want)
            stand.device.lose()
            await tier.load(jobs[0])
            tier.fence()
            issued = len(stand.device.calls)
            for work, to_gpu in zip(jobs, ways, strict=True):
                assert (await moved(tier, work, to_gpu)).outcomes == ((TIER_DOWN,) * 2, (TIER_DOWN,))
            assert len(stand.device.calls) == issued
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.levelname for record in lines] == ["ERROR"], [record.getMessage() for record in lines]
    assert "out of use" in lines[0].getMessage()


def check_lost(stand: Stand, work: TransferJob, result: JobResult, to_gpu: bool, want: np.ndarray) -> None:
    """What a job on a lost device may have done: whole blocks."""
    assert result.fits(work)
    for group, outcomes in zip(work.groups, result.outcomes, strict=True):
        for row, one in zip(group.rows.tolist(), outcomes, strict=True):
            assert one.ok or one in (FAILED, TIER_DOWN)
            assert not one.ok or to_gpu or (stand.rows.view[row] == want[row]).all()


async def test_a_fence_that_fails_fails_the_copies_after_it(seed: int) -> None:
    """Else they could take what has not been computed. The next good fence of the stream mends it."""
    stand = Stand(FakeCuda(seed), seed)
    device = stand.device
    async with stand.opened() as tier:
        refused = device.new_event

        def no_event(blocking: bool) -> object:
            raise RuntimeError("no event to be had")

        device.new_event = no_event
        tier.fence()
        device.new_event = refused
        result = await tier.load(stand.job(1))
        assert [one for of in result.outcomes for one in of] == [FAILED] * 5
        assert device.calls == []
        tier.fence()
        assert (await tier.load(stand.job(2))).ok


async def test_a_copy_that_never_ends_keeps_its_rows_and_not_the_tier(
    seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvtier_gpu.backend.CLOSE_TIMEOUT_SECONDS", 0.05)
    stand = Stand(FakeCuda(seed), seed)
    work = stand.job(4)
    async with stand.opened() as tier:
        for stream in stand.device.streams:
            stream.held = True
        call = asyncio.create_task(tier.load(work))
        await until(lambda: stand.device.calls)
        await tier.close()
        assert "still in flight" in caplog.text
        assert not call.done()
        assert stand.device.pinned
        for stream in stand.device.streams:
            stand.device.release(stream)
        assert (await call).ok
        assert (stand.rows.view == stand.wanted(work)).all()
        stand.device.pinned.clear()  # left as they are: the process goes on with the memory


async def test_a_cancelled_copy_ends_before_its_rows_are_free(seed: int) -> None:
    stand = Stand(FakeCuda(seed), seed)
    async with stand.opened() as tier:
        for stream in stand.device.streams:
            stream.held = True
        call = asyncio.create_task(tier.load(stand.job(4)))
        await until(lambda: stand.device.calls)
        for _ in range(3):
            call.cancel()
            await asyncio.sleep(0)
        assert not call.done()
        for stream in stand.device.streams:
            stand.device.release(stream)
        with pytest.raises(asyncio.CancelledError):
            await call
