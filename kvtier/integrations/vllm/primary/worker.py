"""The side of each GPU process: copies between vLLM's blocks and rows of the shared region."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import replace

import torch
from vllm.config.vllm import get_current_vllm_config_or_none
from vllm.v1.kv_offload.base import CanonicalKVCaches, LoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.base import GPULoadStoreSpec as VLLMBlocks

from kvtier.aio.loop_thread import LoopThread
from kvtier.config import build_tiers
from kvtier.errors import ConfigError
from kvtier.integrations.vllm.identity import worker_note
from kvtier.integrations.vllm.primary.wire import RowsSpec, copy_job
from kvtier.integrations.vllm.settings import EnginePlan, worker_layout
from kvtier.stack.assembly import resolve_alignment
from kvtier.tier_api.contract import JoinsRows, TierContext
from kvtier.tier_api.registry import discover
from kvtier.types.geometry import Geometry, KVLayout
from kvtier.types.jobs import JobKind, JobResult, TransferJob

OPEN_SECONDS = 600.0
CLOSE_SECONDS = 5.0


def beside_scheduler(plan: EnginePlan) -> bool:
    """True if the scheduler surely is in this process: vLLM runs the only worker inside the engine core then.

    Any other executor, also one that an operator brings along, may start the worker in a process of its own.
    """
    config = get_current_vllm_config_or_none()
    alone = plan.namespace.layout.world_size == 1
    return alone and config is not None and config.parallel_config.distributed_executor_backend == "uni"


class KVTierWorker(OffloadingWorker):  # type: ignore[misc]
    """One rank's copies. The rows of a store that failed stay unstamped, so the scheduler drops them.

    The gpu tier's jobs are named from its side: it loads what vLLM stores, and stores what vLLM loads.
    """

    def __init__(self, plan: EnginePlan, rank: int, kv_caches: CanonicalKVCaches) -> None:
        self._factor = plan.namespace.layout.block_size_factor
        self._running: dict[int, Future[TransferResult]] = {}
        self._tiers = build_tiers(plan.stack)
        gpu = discover().get("gpu")
        self._gpu = gpu(gpu.Options(type="gpu"))
        self._one_process = beside_scheduler(plan)
        refs = [[(ref.tensor_idx, ref.page_size_bytes) for ref in group] for group in kv_caches.group_data_refs]
        layout = worker_layout(plan.namespace.layout, refs)
        tensors = [entry.tensor for entry in kv_caches.tensors]
        self._thread = LoopThread("kvtier-worker", "worker")
        try:
            self._thread.run(self._open(plan, rank, layout, tensors, worker_note(layout)), OPEN_SECONDS)
        except BaseException:
            self.shutdown()
            raise

    async def _open(
        self, plan: EnginePlan, rank: int, layout: KVLayout, tensors: Sequence[torch.Tensor], note: str
    ) -> None:
        cpu = self._tiers[0]
        if not isinstance(cpu, JoinsRows):
            raise ConfigError("workers in processes of their own cannot map its region", "stack.tiers[0]")
        nominal = Geometry(plan.namespace.layout, await resolve_alignment(self._tiers))
        context = TierContext(
            "cpu", nominal, plan.namespace, time.monotonic, plan.engine_id, rank, one_process=self._one_process
        )
        rows = await cpu.join(context, note)
        geometry = replace(nominal, layout=layout)
        await self._gpu.open(replace(context, name="gpu", geometry=geometry, kv_caches=tensors, rows=rows))

    def submit_store(self, job_id: int, src_spec: VLLMBlocks, dst_spec: LoadStoreSpec) -> bool:
        """Begin to copy GPU blocks into rows."""
        assert isinstance(dst_spec, RowsSpec)
        return self._begin(job_id, JobKind.LOAD, dst_spec, src_spec)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: VLLMBlocks) -> bool:
        """Begin to copy rows into GPU blocks."""
        assert isinstance(src_spec, RowsSpec)
        return self._begin(job_id, JobKind.STORE, src_spec, dst_spec)

    def _begin(self, job_id: int, kind: JobKind, rows: RowsSpec, blocks: VLLMBlocks) -> bool:
        job = copy_job(job_id, kind, rows, blocks, self._factor)
        self._running[job_id] = self._thread.start(self._copy(job_id, job)).ended
        return True

    async def _copy(self, job_id: int, job: TransferJob) -> TransferResult:
        if job.kind is JobKind.LOAD:
            result: JobResult = await self._gpu.load(job)
            return TransferResult(job_id, True, result.bytes_moved, result.seconds)
        result = await self._gpu.store(job)
        if not result.ok:
            # Once more: the blocks have undefined bytes now, and vLLM's interface has no partial results.
            result = await self._gpu.store(job)
        return TransferResult(job_id, result.ok, result.bytes_moved, result.seconds)

    def get_finished(self) -> list[TransferResult]:
        """Copies that ended since the last call."""
        ended = [job_id for job_id, future in self._running.items() if future.done()]
        return [self._running.pop(job_id).result() for job_id in ended]

    def wait(self, job_ids: set[int]) -> None:
        """Return when none of these copies is in flight."""
        wait_for([self._running[job_id] for job_id in job_ids if job_id in self._running])

    def shutdown(self) -> None:
        """End what is in flight, release the region and stop the thread. Idempotent."""
        if not self._thread.alive:
            return
        try:
            self._thread.run(self._close(), 2 * CLOSE_SECONDS)
        finally:
            self._thread.close(CLOSE_SECONDS)

    async def _close(self) -> None:
        await self._gpu.close()
        await self._tiers[0].close()
