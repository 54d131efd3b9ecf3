"""The CUDA engine on a device made of host memory: which bytes move, in what order, and what the driver is told."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support_counts import examples
from support_cuda import ANY_ORDER, IN_STREAM_ORDER, FakeCuda
from support_cuda_tier import BLOCKS, GEOMETRY, PAGE, ROWS, Stand, compute, opened, small
from support_gpu import MmapRows, job, make_worker, naive_copy, transfer
from support_gpu_cases import NUM_BLOCKS, NUM_ROWS, Case, cases, check_outcomes, total

from kvtier.types.geometry import Geometry, GroupLayout, KVLayout, TensorRef
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import JobResult
from kvtier_gpu.engines import batch_copy, pinned_region
from kvtier_gpu.engines.plan_copier import CopyPath

PATHS = st.sampled_from([path.value for path in CopyPath])


@examples(150)
@given(cases(), PATHS, st.integers(1, 6), st.integers(1, 5000), st.booleans())
def test_every_byte_lands_where_it_belongs_and_no_other_byte_changes(
    case: Case, copies: str, descriptors: int, staging_bytes: int, urgent: bool
) -> None:
    """Layouts with several groups and tensors, strided and packed, with parts of blocks and holes. The engine's work on
    the GPU blocks is still waiting when each job is submitted."""
    with small(descriptors, staging_bytes):
        asyncio.run(both_ways(case, copies, urgent))


async def both_ways(case: Case, copies: str, urgent: bool) -> None:
    geometry, rng, index = case.geometry, np.random.default_rng(case.seed), case.seed % case.geometry.world_size
    device = FakeCuda(case.seed)
    rows = MmapRows(geometry, NUM_ROWS)
    rows.view[:] = rng.integers(0, 256, rows.view.shape, dtype=np.uint8)
    worker = make_worker(geometry, NUM_BLOCKS, case.style, rng)
    twin = make_worker(geometry, NUM_BLOCKS, case.style, np.random.default_rng(0))
    want = rows.view.copy()
    there, back = case.jobs
    back.urgent = urgent
    twin.fill_from(worker.storages)
    results: list[JobResult] = []
    async with opened(device, geometry, worker, rows, index=index, copies=copies) as tier:
        for work, value, to_gpu in ((there, 0x5A, False), (back, 0xC3, True)):
            compute(device, device.default, worker.storages, value)
            for storage in twin.storages:
                storage.bitwise_xor_(value)
            naive_copy(geometry, work, index, twin.tensors, want, to_gpu)
            tier.fence()
            results.append(await (tier.store(work) if to_gpu else tier.load(work)))
            assert results[-1].bytes_moved == total(geometry, work)
        device.default.synchronize()
        assert (rows.view == want).all()
        assert worker.holds(twin.bytes())
    check_outcomes(case, *results)
    del device
    rows.close()


@pytest.mark.parametrize("copies", list(CopyPath))
@pytest.mark.parametrize("deaf", [False, True])
async def test_a_copy_waits_for_the_work_that_each_stream_was_given_before_it(
    copies: str, deaf: bool, seed: int
) -> None:
    """On a device whose streams do not wait it takes the bytes of before: the test sees that."""
    stand = Stand(FakeCuda(seed, deaf=deaf), seed)
    device, streams = stand.device, [stand.device.new_stream(False, reluctant=True) for _ in range(2)]
    async with stand.opened(copies) as tier:
        for stream, value in zip(streams, (0x11, 0x22), strict=True):
            with device.entered(stream):
                compute(device, stream, stand.worker.storages, value)
                tier.fence()
        work, old = stand.job(1), [storage.clone() for storage in stand.worker.storages]
        assert (await tier.load(work)).ok
        for stream in streams:
            stream.synchronize()
        in_time = bool((stand.rows.view == stand.wanted(work)).all())
        stand.worker.fill_from(old)
        assert in_time is not deaf
        assert bool((stand.rows.view == stand.wanted(work)).all()) is deaf


async def test_without_a_fence_the_stream_counts_that_was_current_at_open(seed: int) -> None:
    stand = Stand(FakeCuda(seed), seed)
    device, stream = stand.device, stand.device.new_stream(False, reluctant=True)
    with device.entered(stream):
        async with stand.opened() as tier:
            compute(device, stream, stand.worker.storages, 0x77)
            work = stand.job(1)
            assert (await tier.load(work)).ok
            assert (stand.rows.view == stand.wanted(work)).all()


async def test_a_copy_to_the_gpu_ends_before_its_job_does(seed: int) -> None:
    """The engine's next work on the blocks, on any stream, finds the bytes there."""
    stand = Stand(FakeCuda(seed), seed)
    stand.rows.view[:] = stand.random.integers(0, 256, stand.rows.view.shape, dtype=np.uint8)
    async with stand.opened() as tier:
        work, twin = stand.job(1), make_worker(GEOMETRY, BLOCKS, "plain", np.random.default_rng(0))
        twin.fill_from(stand.worker.storages)
        assert (await tier.store(work)).ok
        naive_copy(GEOMETRY, work, 0, twin.tensors, stand.rows.view, to_gpu=True)
        assert stand.worker.holds(twin.bytes())


async def test_all_pieces_of_a_share_go_in_one_call_and_neighbours_are_one_piece(seed: int) -> None:
    stand = Stand(FakeCuda(seed), seed)
    device = stand.device
    work = job(
        transfer(0, GPURuns.whole([7, 30, 2, 9], 2), [5, 4]), transfer(1, GPURuns.whole([6, 7, 20, 21], 2), [9, 10])
    )
    async with stand.opened() as tier:
        assert (await tier.load(work)).ok
        assert (await tier.store(work)).ok
    to_rows, to_gpu = device.calls
    # group 0: of each page a piece from each tensor; group 1: the pages of a row follow each other on both sides
    assert sorted(to_rows.lengths) == sorted(to_gpu.lengths) == [PAGE] * 4 + [2 * PAGE] * 6
    assert (to_rows.order, to_gpu.order) == (IN_STREAM_ORDER, ANY_ORDER)
    assert to_rows.stream != to_gpu.stream
    assert 0 not in (to_rows.stream, to_gpu.stream)


async def test_pieces_beyond_the_bound_of_a_call_go_in_further_calls(seed: int) -> None:
    page, count = 8, 2 * batch_copy.DESCRIPTORS_MAX + 5
    geometry = Geometry(KVLayout((GroupLayout((TensorRef(0, page),)),)))
    device, rows = FakeCuda(seed), MmapRows(geometry, count)
    worker = make_worker(geometry, count, "plain", np.random.default_rng(seed))
    order = np.arange(count)[::-1].copy()
    async with opened(device, geometry, worker, rows) as tier:
        assert (await tier.load(job(transfer(0, GPURuns.whole(order), range(count))))).ok
    assert [call.count for call in device.calls] == [batch_copy.DESCRIPTORS_MAX] * 2 + [5]
    assert (rows.view == worker.tensors[0].numpy()[order]).all()


async def test_pieces_of_the_kernel_are_short_and_of_a_launch_few(seed: int) -> None:
    """300 rows of one piece of 20 KiB and one of 5 bytes, which a warp each copies in parts of 8 KiB."""
    lengths, count = (20 << 10, 5), 300
    geometry = Geometry(KVLayout((GroupLayout(tuple(TensorRef(at, length) for at, length in enumerate(lengths))),)))
    device, rows = FakeCuda(seed), MmapRows(geometry, count)
    worker = make_worker(geometry, count, "plain", np.random.default_rng(seed))
    order = np.arange(count)[::-1].copy()
    async with opened(device, geometry, worker, rows, copies="kernel") as tier:
        assert (await tier.load(job(transfer(0, GPURuns.whole(order), range(count))))).ok
        want = worker.bytes()
        for tensor in worker.tensors:
            tensor.zero_()
        assert (await tier.store(job(transfer(0, GPURuns.whole(order), range(count))))).ok
    assert device.launches == [1200] * 2
    assert worker.holds(want)


async def test_no_piece_reaches_from_one_row_into_the_next(seed: int) -> None:
    """Rows are pinned in pieces, and a driver refuses a copy that reaches into another piece."""
    geometry = Geometry(KVLayout((GroupLayout((TensorRef(0, 4096),)),)), alignment=4096)
    for copies in CopyPath:
        device, rows = FakeCuda(seed), MmapRows(geometry, 8)
        worker = make_worker(geometry, 8, "plain", np.random.default_rng(seed))
        with mock.patch.object(pinned_region, "PIECE_BYTES", 3 * 4096):
            async with opened(device, geometry, worker, rows, copies=copies) as tier:
                assert (await tier.load(job(transfer(0, GPURuns.whole(range(8)), range(8))))).ok
        assert (rows.view == worker.tensors[0].numpy()).all()


async def test_an_urgent_load_passes_what_is_stuck_before_it(seed: int) -> None:
    stand = Stand(FakeCuda(seed), seed)
    async with stand.opened() as tier:
        before = set(stand.device.streams)
        stuck_load, stuck_store = stand.job(1), stand.job(2)
        held = stand.device.streams[-3:-1]
        for stream in held:
            stream.held = True
        waiting = [asyncio.create_task(tier.store(stuck_load)), asyncio.create_task(tier.load(stuck_store))]
        assert (await tier.store(replace(stand.job(3), urgent=True))).ok
        assert not any(task.done() for task in waiting)
        assert set(stand.device.streams) == before
        for stream in held:
            stand.device.release(stream)
        assert all(result.ok for result in await asyncio.gather(*waiting))


async def test_many_jobs_at_once_are_exact(seed: int) -> None:
    """Jobs over disjoint rows and blocks in both directions, on a device that does their pieces in any order."""
    random = np.random.default_rng(seed)
    for copies in CopyPath:
        stand = Stand(FakeCuda(seed), seed)
        rows = random.permutation(ROWS).reshape(6, 4)
        blocks = random.permutation(BLOCKS)[:36].reshape(6, 6)
        groups = [
            (transfer(0, GPURuns.whole(ids[:4], 2), two[:2], 1), transfer(1, GPURuns.whole(ids[4:], 2), two[2:3], 1))
            for ids, two in zip(blocks, rows, strict=True)
        ]
        jobs = [job(*pair, job_id=number) for number, pair in enumerate(groups)]
        async with stand.opened(copies) as tier:
            want = stand.rows.view.copy()
            for work in jobs:
                naive_copy(GEOMETRY, work, 0, stand.worker.tensors, want, to_gpu=False)
            content = stand.worker.bytes()
            with small(descriptors=3):
                assert all(result.ok for result in await asyncio.gather(*map(tier.load, jobs)))
                assert (stand.rows.view == want).all()
                for work in jobs:
                    stand.wipe(work)
                calls = (tier.store(replace(work, urgent=number % 2 == 0)) for number, work in enumerate(jobs))
                assert all(result.ok for result in await asyncio.gather(*calls))
        assert stand.worker.holds(content)
