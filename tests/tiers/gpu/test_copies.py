"""Jobs move exactly the bytes they name, between any tensors and any rows, and touch nothing else."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support_counts import examples
from support_gpu import MmapRows, Worker, context, job, make_worker, naive_copy, transfer
from support_gpu_cases import NUM_BLOCKS, NUM_ROWS, Case, cases, check_outcomes, total

from kvtier.types.geometry import Geometry, GroupLayout, KVLayout, TensorRef
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import JobResult
from kvtier_gpu import GPUBackend, GPUOptions


async def both_ways(case: Case, rows: MmapRows, workers: list[Worker], threads: int) -> list[JobResult]:
    tiers = [GPUBackend(GPUOptions(copy_threads=threads)) for _ in workers]
    results = []
    for index, (tier, worker) in enumerate(zip(tiers, workers, strict=True)):
        await tier.open(context(case.geometry, worker.tensors, rows, index))
    try:
        results += await asyncio.gather(*(tier.load(case.jobs[0]) for tier in tiers))
        results += await asyncio.gather(*(tier.store(case.jobs[1]) for tier in tiers))
    finally:
        for tier in tiers:
            await tier.close()
    return results


@examples(120)
@given(cases(), st.integers(1, 3))
def test_every_byte_lands_where_it_belongs_and_no_other_byte_changes(case: Case, threads: int) -> None:
    geometry, rng = case.geometry, np.random.default_rng(case.seed)
    rows = MmapRows(geometry, NUM_ROWS)
    rows.view[:] = rng.integers(0, 256, rows.view.shape, dtype=np.uint8)
    workers = [make_worker(geometry, NUM_BLOCKS, case.style, rng) for _ in range(geometry.world_size)]
    want_region = rows.view.copy()
    for index, worker in enumerate(workers):
        naive_copy(geometry, case.jobs[0], index, worker.tensors, want_region, to_gpu=False)
    before = [[storage.clone() for storage in worker.storages] for worker in workers]

    results = asyncio.run(both_ways(case, rows, workers, threads))

    assert (rows.view == want_region).all()
    for index, (worker, old) in enumerate(zip(workers, before, strict=True)):
        have = worker.bytes()
        worker.fill_from(old)
        naive_copy(geometry, case.jobs[1], index, worker.tensors, want_region, to_gpu=True)
        assert worker.holds(have)
    for there, back in zip(results[: len(workers)], results[len(workers) :], strict=True):
        check_outcomes(case, there, back)
    moved = [total(geometry, case.jobs[0])] * len(workers) + [total(geometry, case.jobs[1])] * len(workers)
    assert [result.bytes_moved for result in results] == moved
    rows.close()


@pytest.mark.parametrize(
    ("page_bytes", "pages"), [(64, 9000), (1000, 3000), (12_289, 700), (65_536, 160), (600_001, 12), (1 << 20, 9)]
)
@pytest.mark.parametrize("scattered", [True, False])
async def test_large_jobs_are_exact_at_every_page_size(page_bytes: int, pages: int, scattered: bool) -> None:
    """Big enough for several shares, full batches, overlapping pieces and long extents."""
    rng = np.random.default_rng(page_bytes)
    geometry = Geometry(KVLayout((GroupLayout((TensorRef(0, page_bytes),)),)))
    tensor = torch.from_numpy(rng.integers(0, 256, (pages, page_bytes), dtype=np.uint8))
    original = tensor.clone()
    rows = MmapRows(geometry, pages)
    tier = GPUBackend(GPUOptions())
    await tier.open(context(geometry, [tensor], rows))
    ids = rng.permutation(pages) if scattered else np.arange(pages)
    places = rng.permutation(pages) if scattered else np.arange(pages)
    work = job(transfer(0, GPURuns.whole(ids), places))
    assert (await tier.load(work)).ok
    assert (rows.view[places] == original.numpy()[ids]).all()
    tensor.zero_()
    assert (await tier.store(work)).ok
    assert (tensor == original).all()
    await tier.close()
    rows.close()
