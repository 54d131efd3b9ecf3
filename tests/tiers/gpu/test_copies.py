"""Jobs move exactly the bytes they name, between any tensors and any rows, and touch nothing else."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_gpu import MmapRows, Worker, context, job, make_worker, naive_copy, naive_whole_rows, runs_of, transfer

from kvtier.types.geometry import Geometry, GroupLayout, KVLayout, TensorRef
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import JobResult, TransferJob
from kvtier_gpu import GPUBackend, GPUOptions
from kvtier_gpu.copy_plan import RegionShape, group_tables, plan_job, split
from kvtier_gpu.engines.contract import Direction
from kvtier_gpu.engines.gather import GatherCopier, group_tensors, staging_bytes
from kvtier_gpu.kv_tensors import describe_tensors

NUM_BLOCKS = 17
NUM_ROWS = 9


@dataclass
class Case:
    geometry: Geometry
    style: str
    seed: int
    jobs: tuple[TransferJob, TransferJob]


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    page = st.one_of(st.integers(1, 40), st.sampled_from([64, 1000, 4096]))
    groups, tensor = [], 0
    for _ in range(draw(st.integers(1, 3))):
        sizes = draw(st.lists(page, min_size=1, max_size=3))
        groups.append(GroupLayout(tuple(TensorRef(tensor + i, size) for i, size in enumerate(sizes))))
        tensor += len(sizes)
    layout = KVLayout(tuple(groups), draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    return Geometry(layout, draw(st.sampled_from([1, 64, 4096])))


@st.composite
def jobs(draw: st.DrawFn, geometry: Geometry) -> TransferJob:
    """Runs with heads, tails, holes and blocks without any run, over distinct rows and distinct GPU blocks."""
    rows = draw(st.permutations(range(NUM_ROWS)))
    groups = []
    for group in draw(st.permutations(range(geometry.num_groups))):
        count = draw(st.integers(0, min(3, len(rows))))
        mine, rows = rows[:count], rows[count:]
        free = list(draw(st.one_of(st.permutations(range(NUM_BLOCKS)), st.just(range(NUM_BLOCKS)))))
        pieces = []
        for block in draw(st.permutations(range(count))):
            subs = draw(st.sets(st.integers(0, geometry.factor - 1)))
            if draw(st.booleans()):
                subs = set(range(geometry.factor))
            for first in sorted(subs):
                if pieces and pieces[-1][0] == block and pieces[-1][1] + len(pieces[-1][2]) == first:
                    pieces[-1][2].append(free.pop(0))
                else:
                    pieces.append((block, first, [free.pop(0)]))
        groups.append(transfer(group, runs_of(pieces), mine, generation=draw(st.integers(1, 2**40))))
    return job(*groups)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    geometry = draw(geometries())
    style = draw(st.sampled_from(["plain", "strided", "packed"]))
    return Case(geometry, style, draw(st.integers(0, 2**32)), (draw(jobs(geometry)), draw(jobs(geometry))))


def total(geometry: Geometry, work: TransferJob) -> int:
    return sum(len(one.runs.gpu_blocks) * geometry.page_bytes(one.group) for one in work.groups)


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


@settings(max_examples=120, deadline=None)
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
        for storage, was in zip(worker.storages, old, strict=True):
            storage.copy_(was)
        naive_copy(geometry, case.jobs[1], index, worker.tensors, want_region, to_gpu=True)
        assert all((a == b).all() for a, b in zip(have, worker.bytes(), strict=True))
    assert all(result.ok for result in results)
    moved = [total(geometry, case.jobs[0])] * len(workers) + [total(geometry, case.jobs[1])] * len(workers)
    assert [result.bytes_moved for result in results] == moved
    check_stamps(case, rows)
    rows.close()


def check_stamps(case: Case, rows: MmapRows) -> None:
    """Only rows the first job filled whole are stamped; each row's use ended once a job and worker."""
    whole = naive_whole_rows(case.geometry, case.jobs[0])
    generations = {int(row): int(one.generations[i]) for one in case.jobs[0].groups for i, row in enumerate(one.rows)}
    uses = [sum(row in one.rows for work in case.jobs for one in work.groups) for row in range(NUM_ROWS)]
    for worker in range(case.geometry.world_size):
        want = [generations[row] if row in whole else 0 for row in range(NUM_ROWS)]
        assert rows.stamps[worker].tolist() == want
        assert rows.uses[worker].tolist() == uses


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(1, 20000))
def test_staged_copies_move_the_same_bytes(case: Case, part_bytes: int) -> None:
    """The torch operations of the CUDA engine, on CPU tensors and without its streams."""
    geometry, rng = case.geometry, np.random.default_rng(case.seed)
    rows = MmapRows(geometry, NUM_ROWS)
    rows.view[:] = rng.integers(0, 256, rows.view.shape, dtype=np.uint8)
    worker = make_worker(geometry, NUM_BLOCKS, case.style, rng)
    index = case.seed % geometry.world_size
    copier_for(geometry, worker, rows, index)  # building it touches nothing
    want = rows.view.copy()
    naive_copy(geometry, case.jobs[0], index, worker.tensors, want, to_gpu=False)
    run_staged(case, worker, rows, index, (case.jobs[0], Direction.TO_ROWS, part_bytes))
    assert (rows.view == want).all()
    was = [storage.clone() for storage in worker.storages]
    run_staged(case, worker, rows, index, (case.jobs[1], Direction.TO_GPU, part_bytes))
    have = worker.bytes()
    for storage, old in zip(worker.storages, was, strict=True):
        storage.copy_(old)
    naive_copy(geometry, case.jobs[1], index, worker.tensors, want, to_gpu=True)
    assert all((a == b).all() for a, b in zip(have, worker.bytes(), strict=True))


def copier_for(geometry: Geometry, worker: Worker, rows: MmapRows, index: int) -> GatherCopier:
    found = describe_tensors(worker.tensors, geometry)
    groups = group_tensors(geometry, group_tables(geometry, index, found), found)
    staging = torch.zeros(staging_bytes(groups), dtype=torch.uint8)
    return GatherCopier(groups, torch.from_numpy(rows.view.reshape(-1)), staging)


def run_staged(
    case: Case, worker: Worker, rows: MmapRows, index: int, what: tuple[TransferJob, Direction, int]
) -> None:
    work, direction, part_bytes = what
    tables = group_tables(case.geometry, index, describe_tensors(worker.tensors, case.geometry))
    shape = RegionShape(NUM_ROWS, rows.row_bytes, case.geometry.factor)
    plan = plan_job(work, tables, shape, to_gpu=direction is Direction.TO_GPU)
    copier = copier_for(case.geometry, worker, rows, index)
    for part in split(plan, part_bytes):
        for pages in part:
            copier.copy(pages, direction)


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
