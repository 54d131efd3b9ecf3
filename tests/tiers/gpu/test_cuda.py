"""The GPU tier on a CUDA device: the same bytes as on the CPU, in order with the compute stream, each way to copy."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from support_gpu import MmapRows, context, job, make_worker, naive_copy, runs_of, transfer

from kvtier.tier.contract import Opened
from kvtier.types.geometry import Geometry, GroupLayout, KVLayout, TensorRef
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import LOADED, DropReason, dropped
from kvtier_gpu import GPUBackend, GPUOptions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
NUM_BLOCKS, NUM_ROWS = 40, 12
COPIES = ["fastest", "kernel", "batch", "gather", "single"]
GEOMETRY = Geometry(
    KVLayout(
        (
            GroupLayout((TensorRef(0, 1000), TensorRef(1, 333))),
            GroupLayout((TensorRef(2, 4096), TensorRef(3, 8192))),
            GroupLayout((TensorRef(4, 512 << 10),)),
        ),
        world_size=2,
        block_size_factor=3,
    ),
    alignment=4096,
)


def skip_unless_used(opened: Opened, copies: str) -> None:
    """Skip where the kernel or the driver's call is not to be had; the other ways always are."""
    if copies in ("kernel", "batch") and copies not in opened.mode:
        pytest.skip("; ".join(opened.notes))


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("style", ["plain", "strided", "packed"])
async def test_bytes_are_exact_both_ways_and_nothing_else_changes(style: str, copies: str) -> None:
    rng = np.random.default_rng(3)
    worker = make_worker(GEOMETRY, NUM_BLOCKS, style, rng, "cuda")
    twin = make_worker(GEOMETRY, NUM_BLOCKS, style, np.random.default_rng(3))
    rows = MmapRows(GEOMETRY, NUM_ROWS)
    rows.view[:] = rng.integers(0, 256, rows.view.shape, dtype=np.uint8)
    want = rows.view.copy()
    tier = GPUBackend(GPUOptions(device="cuda", cuda_copies=copies, urgent_lane=True))
    opened = await tier.open(context(GEOMETRY, worker.tensors, rows, 1))
    assert opened.mode.startswith("cuda:0, 3 streams, pinned rows; ")
    print(opened.mode, *opened.notes, sep="\n")
    skip_unless_used(opened, copies)
    pieces = [(0, 1, [7, 8]), (1, 0, [30, 2, 19]), (2, 0, [5]), (2, 2, [11])]
    work = job(*(transfer(group, runs_of(pieces), [group, group + 4, 11 - group], 5) for group in range(3)))
    back = job(*(transfer(group, runs_of(pieces), [group + 4, group, 11 - group]) for group in range(3)))
    partial = dropped(DropReason.PARTIAL)
    assert (await tier.load(work)).outcomes == ((partial, LOADED, partial),) * 3
    naive_copy(GEOMETRY, work, 1, twin.tensors, want, to_gpu=False)
    assert (rows.view == want).all()
    assert (await tier.store(replace(back, urgent=True))).ok
    naive_copy(GEOMETRY, back, 1, twin.tensors, want, to_gpu=True)
    assert worker.holds(twin.bytes())
    await tier.close()
    rows.close()


@pytest.mark.parametrize("copies", COPIES)
async def test_copies_see_what_the_compute_stream_was_given_before_them(copies: str) -> None:
    page = 64 << 10
    geometry = Geometry(KVLayout((GroupLayout((TensorRef(0, page),)),)))
    tensor = torch.zeros(64, page, dtype=torch.uint8, device="cuda")
    rows = MmapRows(geometry, 64)
    tier = GPUBackend(GPUOptions(cuda_copies=copies))
    skip_unless_used(await tier.open(context(geometry, [tensor], rows)), copies)
    compute = torch.cuda.Stream()
    order = np.random.default_rng(1).permutation(64)
    work = job(transfer(0, GPURuns.whole(order), order))
    for value in range(1, 6):
        with torch.cuda.stream(compute):
            torch.cuda._sleep(20_000_000)
            tensor.fill_(value)
            tier.fence()
        assert (await tier.load(work)).ok
        assert (rows.view == value).all()
        rows.view[:] = value + 100
        with torch.cuda.stream(compute):
            torch.cuda._sleep(20_000_000)
            tensor.zero_()
            tier.fence()
        assert (await tier.store(work)).ok
        with torch.cuda.stream(compute):
            assert bool((tensor == value + 100).all())
    await tier.close()
    rows.close()


@pytest.mark.parametrize("copies", COPIES)
async def test_many_jobs_at_once_are_exact(copies: str) -> None:
    page, blocks = 2048, 512
    geometry = Geometry(KVLayout((GroupLayout((TensorRef(0, page), TensorRef(1, page))),), block_size_factor=2))
    rng = np.random.default_rng(8)
    worker = make_worker(geometry, blocks, "plain", rng, "cuda")
    before = worker.bytes()
    rows = MmapRows(geometry, blocks)
    tier = GPUBackend(GPUOptions(cuda_copies=copies))
    skip_unless_used(await tier.open(context(geometry, worker.tensors, rows)), copies)
    ids = rng.permutation(blocks)
    jobs = [job(transfer(0, GPURuns.whole(ids[i : i + 32], 2), range(i // 2, i // 2 + 16))) for i in range(0, 512, 32)]
    assert all(result.ok for result in await asyncio.gather(*(tier.load(work) for work in jobs)))
    for tensor in worker.tensors:
        tensor.zero_()
    torch.cuda.synchronize()
    results = await asyncio.gather(*(tier.store(work) for work in jobs))
    assert all(result.ok for result in results)
    assert worker.holds(before)
    await tier.close()
    rows.close()


LOST = """
import asyncio, logging
import numpy as np, torch
from support_gpu import MmapRows, context, job, transfer
from kvtier.types.geometry import Geometry, GroupLayout, KVLayout, TensorRef
from kvtier.types.gpu_runs import GPURuns
from kvtier_gpu import GPUBackend, GPUOptions

async def main():
    geometry = Geometry(KVLayout((GroupLayout((TensorRef(0, 4096),)),)))
    tensor = torch.zeros(64, 4096, dtype=torch.uint8, device="cuda")
    rows = MmapRows(geometry, 64)
    tier = GPUBackend(GPUOptions())
    await tier.open(context(geometry, [tensor], rows))
    work = job(transfer(0, GPURuns.whole(range(64)), range(64)))
    torch._assert_async(torch.zeros(1, device="cuda"))  # an assertion on the device, which ends its context
    tier.fence()
    results = [await tier.load(work), await tier.load(work), await tier.store(work)]
    print([str(result.outcomes[0][0].reason or result.outcomes[0][0].errno) for result in results])
    await tier.close()

logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
asyncio.run(main())
"""


def test_a_device_in_error_for_good_ends_every_job_and_no_engine() -> None:
    """In a process of its own: there is no way back for the device's context."""
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", LOST], env=os.environ | paths, capture_output=True, text=True, timeout=300, check=False
    )
    assert "['5', 'tier_down', 'tier_down'] 0" in run.stdout, run.stdout + run.stderr
    assert run.stderr.count("ERROR the GPU tier is out of use") == 1, run.stderr
