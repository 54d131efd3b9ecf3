"""vLLM's tiering spec where there is no GPU: its own worker copies on CUDA and XPU devices only.

Region, manager and secondary tiers are vLLM's. The worker copies pages of the only group of one worker by torch.
"""

from __future__ import annotations

import torch
from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class TieringOnCPU(TieringOffloadingSpec):
    """`TieringOffloadingSpec` with a worker for a KV cache in host memory."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                self.config.engine_id, self.num_chunks, 0, self.kv_bytes_per_chunk, self.cpu_page_size_per_worker
            )
            self._worker = HostWorker(region, self.num_chunks, [entry.tensor for entry in kv_caches.tensors])
        return self._worker


class HostWorker(OffloadingWorker):
    """Copies at once, in the calling thread: a row is one block's page of each tensor, one after another."""

    def __init__(self, region: SharedOffloadRegion, num_chunks: int, tensors: list[torch.Tensor]) -> None:
        self._region = region
        self._rows = region.base_tensor.view(num_chunks, -1)
        self._tensors = tensors
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec) -> bool:
        for block, chunk in zip(src_spec.block_ids.tolist(), dst_spec.block_ids.tolist(), strict=True):
            for tensor, part in zip(self._tensors, self._parts(chunk), strict=True):
                part.copy_(tensor[block])
        return self._done(job_id)

    def submit_load(self, job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec) -> bool:
        for chunk, block in zip(src_spec.block_ids.tolist(), dst_spec.block_ids.tolist(), strict=True):
            for tensor, part in zip(self._tensors, self._parts(chunk), strict=True):
                tensor[block].copy_(part)
        return self._done(job_id)

    def _parts(self, chunk: int) -> list[torch.Tensor]:
        sizes = [tensor.shape[1] for tensor in self._tensors]
        return list(self._rows[chunk, : sum(sizes)].split(sizes))

    def _done(self, job_id: int) -> bool:
        self._finished.append(TransferResult(job_id, True))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._tensors, self._rows = [], torch.empty(0)
        self._region.cleanup()
