"""The side of each GPU process: copies between vLLM's blocks and rows of the shared region."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import replace
from typing import Any, TypeVar

from vllm.v1.kv_offload.base import CanonicalKVCaches, LoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.base import GPULoadStoreSpec as VLLMBlocks

from kvtier.config import build_tiers
from kvtier.errors import ConfigError, UsageError
from kvtier.geometry import Geometry, KVLayout
from kvtier.integrations.vllm.identity import worker_note
from kvtier.integrations.vllm.plan import EnginePlan
from kvtier.integrations.vllm.settings import worker_layout
from kvtier.integrations.vllm.transfers import RowsSpec, load_job, store_job
from kvtier.jobs import JobResult, TransferJob
from kvtier.loadstore import JoinsRows, KVCaches, TierContext
from kvtier.registry import discover
from kvtier.stack.assembly import resolve_alignment

OPEN_SECONDS = 600.0
CLOSE_SECONDS = 5.0
T = TypeVar("T")


class KVTierWorker(OffloadingWorker):  # type: ignore[misc]
    """One rank's copies. Stores that fail leave their rows unstamped, which is all the scheduler needs to know."""

    def __init__(self, plan: EnginePlan, rank: int, kv_caches: CanonicalKVCaches) -> None:
        self._factor = plan.namespace.layout.block_size_factor
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvtier-worker", daemon=True)
        self._running: dict[int, Future[TransferResult]] = {}
        self._tiers = build_tiers(plan.stack)
        gpu = discover().get("gpu")
        self._gpu = gpu(gpu.Options(type="gpu"))
        self._thread.start()
        try:
            refs = [[(ref.tensor_idx, ref.page_size_bytes) for ref in group] for group in kv_caches.group_data_refs]
            layout = worker_layout(plan.namespace.layout, refs)
            tensors = KVCaches([entry.tensor for entry in kv_caches.tensors])
            self._await(self._open(plan, rank, layout, tensors, worker_note(layout)), OPEN_SECONDS)
        except BaseException:
            self.shutdown()
            raise

    async def _open(self, plan: EnginePlan, rank: int, layout: KVLayout, tensors: KVCaches, note: str) -> None:
        cpu = self._tiers[0]
        if not isinstance(cpu, JoinsRows):
            raise ConfigError("workers in processes of their own cannot map its region", "stack.tiers[0]")
        nominal = Geometry(plan.namespace.layout, await resolve_alignment(self._tiers))
        context = TierContext("cpu", nominal, plan.namespace, time.monotonic, plan.engine_id, worker=rank)
        rows = await cpu.join(context, note)
        geometry = replace(nominal, layout=layout)
        await self._gpu.open(replace(context, name="gpu", geometry=geometry, kv_caches=tensors, rows=rows))

    def submit_store(self, job_id: int, src_spec: VLLMBlocks, dst_spec: LoadStoreSpec) -> bool:
        """Begin to copy GPU blocks into rows."""
        assert isinstance(dst_spec, RowsSpec)
        self._begin(job_id, store_job(job_id, dst_spec, src_spec, self._factor), stores=True)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: VLLMBlocks) -> bool:
        """Begin to copy rows into GPU blocks."""
        assert isinstance(src_spec, RowsSpec)
        self._begin(job_id, load_job(job_id, src_spec, dst_spec, self._factor), stores=False)
        return True

    def _begin(self, job_id: int, job: TransferJob, *, stores: bool) -> None:
        self._running[job_id] = asyncio.run_coroutine_threadsafe(self._copy(job_id, job, stores), self._loop)

    async def _copy(self, job_id: int, job: TransferJob, stores: bool) -> TransferResult:
        if stores:
            result: JobResult = await self._gpu.load(job)
            return TransferResult(job_id, True, result.bytes_moved, result.seconds)
        result = await self._gpu.store(job)
        if not result.ok:
            result = await self._gpu.store(job)  # the blocks hold anything now; vLLM has no other way to hear of it
        return TransferResult(job_id, result.ok, result.bytes_moved, result.seconds)

    def get_finished(self) -> list[TransferResult]:
        """Copies that ended since the last call."""
        ended = [job_id for job_id, future in self._running.items() if future.done()]
        return [self._running.pop(job_id).result() for job_id in ended]

    def wait(self, job_ids: set[int]) -> None:
        """Return when none of these copies is under way."""
        wait_for([self._running[job_id] for job_id in job_ids if job_id in self._running])

    def shutdown(self) -> None:
        """End what is under way, let go of the region and stop the thread. Idempotent."""
        if self._loop.is_closed():
            return
        try:
            self._await(self._close(), 2 * CLOSE_SECONDS)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_SECONDS)
            if not self._thread.is_alive():
                self._loop.close()

    async def _close(self) -> None:
        await self._gpu.close()
        await self._tiers[0].close()

    def _await(self, work: Coroutine[Any, Any, T], timeout_seconds: float) -> T:
        if self._loop.is_closed():
            work.close()
            raise UsageError("the worker is shut down")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_seconds)
