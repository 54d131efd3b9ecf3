"""The side of each GPU process: copies between vLLM's blocks and rows of the shared region."""

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from vllm.config.vllm import get_current_vllm_config_or_none
from vllm.v1.kv_offload.base import CanonicalKVCaches, LoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.base import GPULoadStoreSpec as VLLMBlocks

from kvtier.aio.loop_thread import LoopThread
from kvtier.client.connection import Participant
from kvtier.client.worker import WorkerConnection, WorkerLink, reads_only
from kvtier.engines.vllm.compat import LOGGER
from kvtier.engines.vllm.engine_config import root_modules
from kvtier.engines.vllm.identity import worker_note
from kvtier.engines.vllm.primary.model_weights import ModelWeights
from kvtier.engines.vllm.primary.wire import RowsSpec, copy_job
from kvtier.engines.vllm.settings import EnginePlan, engine_identity, worker_layout
from kvtier.errors import ResourceError
from kvtier.stack.assembly import to_fence
from kvtier.tier.contract import FencesCopies, TierContext
from kvtier.tier.registry import discover
from kvtier.types.geometry import Geometry, KVLayout
from kvtier.types.jobs import JobKind, JobResult, TransferJob

_log = logging.getLogger(LOGGER)

OPEN_SECONDS = 600.0
CLOSE_SECONDS = 5.0
COPY_SECONDS = 120.0
"""More than the copies that can be queued take, less than the 300 s after which vLLM gives a step up."""
WAIT_PART_SECONDS = 1.0
"""That time is waited for in parts: one in which this process was frozen counts once."""
LOAD_SECONDS = 30.0
"""How long it may take to tell the stack process that weights are loaded; else loading them fails."""


def loaded_models() -> tuple[list[nn.Module], bool]:
    """The models that this worker has built, and whether their memory is there at all times: sleep takes it away."""
    config = get_current_vllm_config_or_none()
    return ([], False) if config is None else (root_modules(config), not config.model_config.enable_sleep_mode)


class KVTierWorker(OffloadingWorker):  # type: ignore[misc]
    """The copies of one rank, whose ends it reports to the stack process.

    The gpu tier's jobs are named from its side: it loads what vLLM stores, and stores what vLLM loads.
    """

    def __init__(self, plan: EnginePlan, rank: int, kv_caches: CanonicalKVCaches) -> None:
        self._factor = plan.namespace.layout.block_size_factor
        self._running: dict[int, Future[TransferResult]] = {}
        self._gpu = discover().get(plan.gpu.type)(plan.gpu)
        self._fenced: Sequence[FencesCopies] = ()
        refs = [[(ref.tensor_idx, ref.page_size_bytes) for ref in group] for group in kv_caches.group_data_refs]
        layout = worker_layout(plan.namespace.layout, refs)
        tensors = [entry.tensor for entry in kv_caches.tensors]
        self._connection: WorkerConnection | None = None
        self._weights: ModelWeights | None = None
        self._thread = LoopThread("kvtier-worker", "worker")
        try:
            self._thread.open()
            models, readable = loaded_models()
            note = worker_note(layout, models)
            connection = self._thread.run(lambda: self._open(plan, rank, layout, tensors, note), OPEN_SECONDS)
            self._weights = ModelWeights(models, self._on_load, readable=readable)
            connection.compare = self._weights.compare
            self._thread.run(self._weights.open, OPEN_SECONDS)
        except BaseException:
            self.shutdown()
            raise

    async def _open(
        self, plan: EnginePlan, rank: int, layout: KVLayout, tensors: Sequence[torch.Tensor], note: str
    ) -> WorkerConnection:
        """Connect to the stack process and map its rows."""
        nominal = Geometry(plan.namespace.layout, 1)  # the stack process has the alignment
        context = TierContext("cpu", nominal, plan.namespace, time.monotonic, rank)
        opening = replace(context, name="gpu", kv_caches=tensors)

        async def open_rows(link: WorkerLink) -> None:
            geometry, mapped = link.attach(context)
            await self._open_gpu(replace(opening, geometry=replace(geometry, layout=layout), rows=mapped))

        identity = await asyncio.to_thread(engine_identity, plan)
        process = Participant("worker", rank, note, reads_only=reads_only(identity, rank, tensors))
        self._connection = WorkerConnection(identity, process, self._gpu, open_rows)
        await self._connection.open(plan.required)
        return self._connection

    async def _open_gpu(self, context: TierContext) -> None:
        opened = await self._gpu.open(context)
        self._fenced = to_fence([self._gpu])
        _log.info("worker %d copies between GPU blocks and rows: %s", context.worker, opened.mode)
        for note in opened.notes:
            _log.warning("tier gpu: %s", note)

    def submit_store(self, job_id: int, src_spec: VLLMBlocks, dst_spec: LoadStoreSpec) -> bool:
        """Begin to copy GPU blocks into rows."""
        assert isinstance(dst_spec, RowsSpec)
        job = copy_job(job_id, JobKind.LOAD, dst_spec, src_spec, self._factor)
        return self._begin(job, dst_spec)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: VLLMBlocks, expedited: bool = False) -> bool:
        """Begin to copy rows into GPU blocks. An expedited load, of vLLM 0.33, does not queue behind other copies:
        vLLM waits for it within the step."""
        assert isinstance(src_spec, RowsSpec)
        job = copy_job(job_id, JobKind.STORE, src_spec, dst_spec, self._factor, urgent=expedited)
        return self._begin(job, src_spec)

    def _begin(self, job: TransferJob, rows: RowsSpec) -> bool:
        for copier in self._fenced:
            copier.fence()  # this thread's stream is vLLM's own; the thread that copies has another one
        self._running[job.job_id] = self._thread.start(partial(self._copy, job, rows)).ended
        return True

    async def _copy(self, job: TransferJob, rows: RowsSpec) -> TransferResult:
        assert self._connection is not None
        result = await self._connection.copy(job, rows.number, rows.life, self._carry_out)
        return TransferResult(job.job_id, job.kind is JobKind.LOAD or result.ok, result.bytes_moved, result.seconds)

    async def _carry_out(self, job: TransferJob) -> JobResult:
        result: JobResult = await (self._gpu.load(job) if job.kind is JobKind.LOAD else self._gpu.store(job))
        if job.kind is JobKind.STORE and not result.ok:
            # Once more: the blocks have undefined bytes now, and vLLM's interface has no partial results.
            result = await self._gpu.store(job)
        return result

    def _on_load(self) -> None:
        """A model is about to load weights. Waits until nothing of before is loaded any more."""
        assert self._connection is not None
        self._thread.run(self._connection.on_load, LOAD_SECONDS)

    def get_finished(self) -> list[TransferResult]:
        """Copies that ended since the last call."""
        ended = [job_id for job_id, future in self._running.items() if future.done()]
        return [self._running.pop(job_id).result() for job_id in ended]

    def wait(self, job_ids: set[int]) -> None:
        """Return when none of these copies is in flight. Raises ResourceError if that takes `COPY_SECONDS`.

        vLLM waits before it uses the GPU blocks of these copies for something else. A copy still in flight then would
        store, or overwrite, another block's KV, and no checksum would tell. So this does not return early; and an
        engine that waited on would hang. vLLM ends the engine on an exception.
        """
        in_flight = {self._running[job_id] for job_id in job_ids if job_id in self._running}
        left = COPY_SECONDS
        while in_flight and left > 0:
            part = min(left, WAIT_PART_SECONDS)
            in_flight = wait_for(in_flight, part).not_done
            left -= part
        if in_flight:
            raise ResourceError(
                f"{len(in_flight)} copies between GPU blocks and rows have not ended within {COPY_SECONDS:g} s, "
                "and vLLM needs their GPU blocks"
            )

    def shutdown(self) -> None:
        """End what is in flight, release the region and stop the thread. Idempotent."""
        if self._weights is not None:
            self._weights.release()
        try:
            if self._thread.alive:
                self._thread.run(self._close, 2 * CLOSE_SECONDS)
        finally:
            self._thread.close(CLOSE_SECONDS)

    async def _close(self) -> None:
        if self._connection is not None:
            await self._connection.close()
