"""A GPU tier on the CUDA device made of host memory, its rows, and the engine's work on the device."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from unittest import mock

import numpy as np
import torch
from support_cuda import FakeCuda, FakeStream
from support_gpu import MmapRows, Worker, context, job, make_worker, naive_copy, transfer

from kvtier.tier.contract import Opened
from kvtier.types.geometry import Geometry, GroupLayout, KVLayout, TensorRef
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import TransferJob
from kvtier_gpu import GPUBackend, GPUOptions
from kvtier_gpu.engines import batch_copy, kernel_copy, pinned_region, plan_copier
from kvtier_gpu.engines.plan_copier import CopyPath

PAGE = 64
LAYOUT = KVLayout(
    (GroupLayout((TensorRef(0, PAGE), TensorRef(1, 2 * PAGE))), GroupLayout((TensorRef(2, PAGE),))), block_size_factor=2
)
GEOMETRY = Geometry(LAYOUT, alignment=4096)
BLOCKS, ROWS = 40, 24


class Stand:
    """A worker of the layout above with its rows, on a device."""

    def __init__(self, device: FakeCuda, seed: int) -> None:
        self.device = device
        self.random = np.random.default_rng(seed)
        self.worker = make_worker(GEOMETRY, BLOCKS, "plain", self.random)
        self.rows = MmapRows(GEOMETRY, ROWS)

    def opened(self, copies: str = "batch") -> AbstractAsyncContextManager[GPUBackend]:
        return opened(self.device, GEOMETRY, self.worker, self.rows, copies=copies)

    def job(
        self,
        generation: int,
        sizes: tuple[int, int] = (3, 2),
        rows: Sequence[int] = range(ROWS),
        blocks: Sequence[int] = range(BLOCKS),
    ) -> TransferJob:
        """Random whole blocks of both groups in random rows, all different, of those that may be taken."""
        places = self.random.permutation(np.array(rows)).tolist()
        groups = []
        for group, count in enumerate(sizes):
            taken = self.random.permutation(np.array(blocks))[: count * 2]
            mine, places = places[:count], places[count:]
            groups.append(transfer(group, GPURuns.whole(taken, 2), mine, generation))
        return job(*groups, job_id=generation)

    def wipe(self, work: TransferJob) -> None:
        """Zeros in the blocks of a job."""
        for group in work.groups:
            for ref in LAYOUT.groups[group.group].refs:
                self.worker.tensors[ref.tensor][group.runs.gpu_blocks] = 0

    def wanted(self, work: TransferJob) -> np.ndarray:
        """The rows as a job leaves them if the tensors stay as they are."""
        want = self.rows.view.copy()
        naive_copy(GEOMETRY, work, 0, self.worker.tensors, want, to_gpu=False)
        return want


@contextmanager
def small(descriptors: int = 4, staging_bytes: int = 100, path: CopyPath | None = None) -> Iterator[None]:
    """Few copies in a call, short pieces of the kernel, little staging, and each row pinned apart from the others.
    `path`: what the rule takes."""
    rule = plan_copier.path_by_rule if path is None else lambda *_, **__: path
    with (
        mock.patch.object(plan_copier, "path_by_rule", rule),
        mock.patch.object(batch_copy, "DESCRIPTORS_MAX", descriptors),
        mock.patch.object(kernel_copy, "PIECES_MAX", descriptors),
        mock.patch.object(kernel_copy, "PIECE_BYTES", PAGE * 3 // 2),
        mock.patch("kvtier_gpu.engines.cuda.STAGING_BYTES", staging_bytes),
        mock.patch.object(pinned_region, "PIECE_BYTES", 1),
    ):
        yield


async def opening(
    device: FakeCuda, geometry: Geometry, worker: Worker, rows: MmapRows, *, index: int = 0, copies: str = "batch"
) -> tuple[GPUBackend, Opened]:
    """An open tier on the device, for one worker."""
    device.own(worker.tensors)
    tier = GPUBackend(GPUOptions(cuda_copies=copies, urgent_lane=True), device)
    about = await tier.open(context(geometry, worker.tensors, rows, index))
    device.calls.clear()
    device.launches.clear()
    return tier, about


@asynccontextmanager
async def opened(
    device: FakeCuda, geometry: Geometry, worker: Worker, rows: MmapRows, *, index: int = 0, copies: str = "batch"
) -> AsyncIterator[GPUBackend]:
    """An open tier, and that it leaves nothing behind."""
    tier, _ = await opening(device, geometry, worker, rows, index=index, copies=copies)
    try:
        yield tier
    finally:
        await tier.close()
        assert device.violations == []
        assert device.pinned == {}


def compute(device: FakeCuda, stream: FakeStream, storages: Sequence[torch.Tensor], value: int) -> None:
    """Have a stream of the engine change every byte of some memory, later."""

    def change() -> None:
        for storage in storages:
            storage.bitwise_xor_(value)

    with device.entered(stream):
        device.enqueue(stream, change)
