"""A scheduler and workers in vLLM's manner around the real classes of the adapter, without a model.

It scans prefixes from the left and windows from the right as vLLM does, allocates GPU blocks, loads what was a hit,
checks every byte of it, "computes" the rest by writing what a block of that key holds, and offers it for storing.
Two batches are in flight: what a step schedules is executed by the workers two steps later, as with asynchronous
scheduling. The order of calls is that of the installed release, or of vLLM 0.33 if asked for.
"""

from __future__ import annotations

import hashlib
import random
import time
import uuid
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    OffloadingManager,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from kvtier.engines.vllm import KVTierSpec

PAGE = 4096
AS_0_33 = hasattr(OffloadingManager, "on_reset_flushed")
"""The installed release ends a step after its stores, and says when the copies from before a reset have ended."""
BATCHES_IN_FLIGHT = 2


def offloading_config(stack: dict[str, Any], **changes: Any) -> OffloadingConfig:
    """What vLLM's connector hands to a spec. `group_ids`, `world_size`, `factor`, `engine_id`, `extra` can be told."""
    group_ids = changes.pop("group_ids", (0,))
    world_size = changes.pop("world_size", 1)
    return OffloadingConfig(
        groups=tuple(OffloadingGroupConfig(16, (f"layer.{group}",), group) for group in group_ids),
        worker_kv_bytes_per_block=changes.pop("page_bytes", PAGE),
        enable_kv_cache_events=True,
        extra_config={"spec_name": "KVTierSpec", "stack": stack, **changes.pop("extra", {})},
        engine_id=changes.pop("engine_id", uuid.uuid4().hex),
        model=OffloadingModelConfig(changes.pop("model", "fake"), "float32"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=changes.pop("factor", 1)),
        parallel=OffloadingParallelConfig(
            **{
                "rank": 0,
                "world_size": world_size,
                "tp_size": world_size,
                "pp_size": 1,
                "pcp_size": 1,
                "dcp_size": 1,
                "data_parallel_index": 0,
                "data_parallel_size": 1,
                "data_parallel_rank_local": None,
                "is_parallelism_agnostic": False,
                **changes.pop("parallel", {}),
            }
        ),
        **changes,
    )


def stack(root: Path, rows: int, *, row_bytes: int = PAGE, **fs: Any) -> dict[str, Any]:
    """A CPU tier of so many rows above a disk."""
    return {
        "namespace": "fake",
        "close_timeout_seconds": 3.0,
        "tiers": [
            {"type": "cpu", "cpu_bytes_to_use": rows * row_bytes, "huge_pages": False},
            {"type": "fs", "roots": [str(root)], "capacity": "32MiB", "region_bytes": "1MiB", **fs},
        ],
    }


def content(key: bytes, worker: int, sub: int, page: int = PAGE) -> torch.Tensor:
    """What worker `worker`'s page of sub-block `sub` of a key holds."""
    word = hashlib.sha256(b"%b/%d/%d" % (key, worker, sub)).digest()
    return torch.frombuffer(bytearray(word * (page // 32)), dtype=torch.int8)


@dataclass(eq=False)
class Request:
    """A prompt: so many chunks a group, named after its prefix; `window` chunks of the later groups are enough."""

    context: ReqContext
    keys: list[list[bytes]]
    blocks: list[list[int]] = field(default_factory=list)
    hit: int = 0
    state: str = "waiting"
    jobs: int = 0
    waited: int = 0


@dataclass(eq=False)
class Job:
    """A transfer as it is sent to the workers."""

    number: int
    request: Request
    keys: list[bytes]
    rows: Any
    blocks: GPULoadStoreSpec
    stores: bool
    pending: int


class Model(torch.nn.Linear):
    """What the workers have loaded."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def load_weights(self, weights: list[float]) -> set[str]:
        with torch.no_grad():
            self.bias[:] = torch.tensor(weights)
        return {"bias"}


class FakeEngine:
    """See the module's docstring. `wrong` counts bytes that were loaded and are not what their key says.

    A `patient` engine offers what is refused until it is taken; else it gives up by chance.

    `fills` is how many bytes of a block each group fills; all, unless that is given.
    """

    def __init__(
        self,
        config: OffloadingConfig,
        seed: int,
        *,
        num_blocks: int = 64,
        window: int = 2,
        as_0_33: bool = AS_0_33,
        fills: Sequence[int] = (),
    ) -> None:
        self.config, self.random, self.window, self.as_0_33 = config, random.Random(seed), window, as_0_33
        block_bytes = config.worker_kv_bytes_per_block
        self.fills = fills or [block_bytes] * len(config.groups)
        self.factor = config.cache.blocks_per_chunk
        self.num_groups = len(config.groups)
        self.replicated = config.replicated_layout
        workers = range(config.parallel.world_size)
        self.tensors = [torch.zeros((num_blocks, block_bytes), dtype=torch.int8) for _ in workers]
        self.workers = []
        self.model = Model()
        for rank, tensor in enumerate(self.tensors):
            refs = [[CanonicalKVCacheRef(0, filled)] for filled in self.fills]
            caches = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, block_bytes)], refs)
            with patch("kvtier.engines.vllm.primary.worker.loaded_models", lambda: ([self.model], True)):
                self.workers.append(KVTierSpec(_ranked(config, rank)).get_worker(caches))
        self.manager = KVTierSpec(config).get_manager()
        self.free = list(range(1, num_blocks))
        self.waiting: list[Request] = []
        self.batches: deque[list[Job]] = deque()
        self.running: dict[int, Job] = {}
        self.unsubmitted: list[Job] = []
        self.stale_below = 0
        self.jobs: set[int] = set()
        self.fence: set[int] = set()
        self.next_job = 0
        self.finished: list[Request] = []
        self.counts: Counter[str] = Counter()
        self.patient = False
        self.told = OffloadingConnectorStats()
        self.wrong = 0

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, words: Sequence[int], hints: Any = None) -> Request:
        """A request whose chunk i is named by words[: i + 1], with an envelope of hints."""
        hashes = [hashlib.sha256(repr(tuple(words[: end + 1])).encode()).digest() for end in range(len(words))]
        keys = [[make_offload_key(name, group.group_id) for name in hashes] for group in self.config.groups]
        context = ReqContext(f"request-{self.next_job}-{len(self.waiting)}-{self.random.random()}", kv_hints=hints)
        for group in keys:
            for index, key in enumerate(group):
                context.set_offload_key_position(key, (index + 1) * 16 * self.factor)
        request = Request(context, keys)
        self.manager.on_new_request(context)
        self.waiting.append(request)
        return request

    def _hits(self, request: Request) -> int | None:
        """Chunks that can be loaded, None to ask again: the full group from the left, the others their last window."""
        length = self._prefix(request.keys[0], request.context)
        for group in request.keys[1:]:
            if length == 0:
                return 0
            found = self._window(group[: len(group) if length is None else length], request.context)
            if found == 0:
                return 0
            length = None if found is None or length is None else min(length, found)
        return length

    def _prefix(self, keys: list[bytes], context: ReqContext) -> int | None:
        count, defer = 0, False
        for key in keys:
            match self.manager.lookup(key, context):
                case LookupResult.HIT:
                    count += 1
                case LookupResult.HIT_PENDING:
                    count, defer = count + 1, True
                case LookupResult.RETRY:
                    defer = True
                case LookupResult.MISS:
                    break
        return None if defer else count

    def _window(self, keys: list[bytes], context: ReqContext) -> int | None:
        streak, pending, defer = 0, False, False
        need = min(self.window, len(keys))
        for index in range(len(keys) - 1, -1, -1):
            match self.manager.lookup(keys[index], context):
                case LookupResult.HIT:
                    streak += 1
                case LookupResult.HIT_PENDING:
                    streak, pending = streak + 1, True
                case LookupResult.RETRY:
                    streak, pending, defer = 0, False, True
                case LookupResult.MISS:
                    streak, pending = 0, False
            if streak == need:
                return None if defer or pending else index + need
        return None if defer or pending else streak

    # -- the step ------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Schedule one batch; execute the one that is two batches old; take in what ended."""
        batch: list[Job] = []
        new = []
        for request in list(self.waiting):
            if request.state == "waiting" and self._schedule(request, batch):
                new.append(request.context.req_id)
        if not self.as_0_33:
            self.manager.on_schedule_end(ScheduleEndContext(new, ()))
        for request in list(self.waiting):
            if request.state == "computed":
                self._offer(request, batch)
        if self.as_0_33:
            self.manager.on_schedule_end(ScheduleEndContext(new, ()))
        self.batches.append(batch)
        if len(self.batches) > BATCHES_IN_FLIGHT:
            self._execute(self.batches.popleft())
        self._take_in()
        if (told := self.manager.get_stats()) is not None:
            self.told.aggregate(told)

    def _schedule(self, request: Request, batch: list[Job]) -> bool:
        hits = self._hits(request)
        if hits is None:
            request.waited += 1
            self.counts["deferred"] += 1
            return False
        need = len(request.keys[0]) * self.factor * self.num_groups
        if len(self.free) < need:
            self.counts["no gpu blocks"] += 1
            return False
        request.blocks = [[self.free.pop(0) for _ in keys for _ in range(self.factor)] for keys in request.keys]
        request.hit = hits
        if not hits:
            self._compute(request)
            return True
        self.counts["hit chunks"] += hits
        keys: list[bytes] = []
        ids: list[int] = []
        sizes, firsts = [], []
        for group, names in enumerate(request.keys):
            first = 0 if group == 0 else max(0, hits - self.window)
            keys += names[first:hits]
            ids += request.blocks[group][first * self.factor : hits * self.factor]
            sizes.append((hits - first) * self.factor)
            firsts.append(first * self.factor)
        rows = self.manager.prepare_load(keys, request.context)
        request.state = "loading"
        batch.append(self._job(request, keys, rows, GPULoadStoreSpec(ids, sizes, firsts), stores=False))
        return True

    def _job(self, request: Request, keys: list[bytes], rows: Any, blocks: GPULoadStoreSpec, *, stores: bool) -> Job:
        request.jobs += 1
        self.next_job += 1
        self.jobs.add(self.next_job)
        return Job(self.next_job, request, keys, rows, blocks, stores, len(self.workers))

    def _compute(self, request: Request) -> None:
        self._write(request)
        request.state = "computed"

    def _write(self, request: Request) -> None:
        for group, names in enumerate(request.keys):
            for chunk in range(request.hit, len(names)):
                for sub in range(self.factor):
                    block = request.blocks[group][chunk * self.factor + sub]
                    for worker, tensor in enumerate(self.tensors):
                        tensor[block, : self.fills[group]] = self._content(group, names[chunk], worker, sub)

    def _offer(self, request: Request, batch: list[Job]) -> None:
        offered = [key for names in request.keys for key in names[request.hit :]]
        answer = self.manager.prepare_store(offered, request.context) if offered else None
        if answer is None and offered:
            self.counts["store refused"] += 1
            if self.patient or self.random.random() < 0.8:
                return
        request.state = "storing"
        if answer is not None and answer.keys_to_store:
            chosen = set(answer.keys_to_store)
            ids, sizes, firsts = [], [], []
            for group, names in enumerate(request.keys):
                taken = [chunk for chunk in range(request.hit, len(names)) if names[chunk] in chosen]
                f = self.factor
                ids += [block for chunk in taken for block in request.blocks[group][chunk * f : chunk * f + f]]
                sizes.append(len(taken) * self.factor)
                firsts.append(taken[0] * self.factor if taken else 0)
            blocks = GPULoadStoreSpec(ids, sizes, firsts)
            self.counts["stored chunks"] += len(chosen)
            batch.append(self._job(request, answer.keys_to_store, answer.store_spec, blocks, stores=True))
        self.manager.on_request_finished(request.context)
        self._end_if_done(request)

    def _end_if_done(self, request: Request) -> None:
        if request.state == "storing" and not request.jobs:
            request.state = "finished"
            self.free += [block for group in request.blocks for block in group]
            self.waiting.remove(request)
            self.finished.append(request)

    # -- the workers ---------------------------------------------------------------------------------------------

    def _execute(self, batch: list[Job]) -> None:
        for job in self.unsubmitted:
            self._submit(job)
        self.unsubmitted = [job for job in batch if job.stores]
        for job in batch:
            if not job.stores:
                self._submit(job)

    def _submit(self, job: Job) -> None:
        self.running[job.number] = job
        for rank, worker in enumerate(self.workers):
            if job.stores and self.replicated and rank:
                job.pending -= 1  # vLLM acknowledges for the ranks that do not write
            elif job.stores:
                assert worker.submit_store(job.number, job.blocks, job.rows)
            elif self.as_0_33 and job.number % 2:  # within the step, as vLLM 0.33 does up to sync_load_budget_bytes
                assert worker.submit_load(job.number, job.rows, job.blocks, expedited=True)
                worker.wait({job.number})
            else:
                assert worker.submit_load(job.number, job.rows, job.blocks)

    def _take_in(self) -> None:
        for worker in self.workers:
            for result in worker.get_finished():
                assert result.success
                job = self.running[result.job_id]
                job.pending -= 1
                if not job.pending:
                    del self.running[job.number]
                    self._ended(job)

    def _ended(self, job: Job) -> None:
        request = job.request
        request.jobs -= 1
        self.jobs.remove(job.number)
        if job.number > self.stale_below:
            if job.stores:
                self.manager.complete_store(job.keys, request.context)
            else:
                self.manager.complete_load(job.keys, request.context)
        if not job.stores and request.state == "loading":
            if job.number > self.stale_below:
                self._check(request)
            self._compute(request)
        self._end_if_done(request)
        if job.number in self.fence:
            self.fence.remove(job.number)
            self._say_flushed()

    def _say_flushed(self) -> None:
        if self.as_0_33 and not self.fence:
            self.manager.on_reset_flushed()

    def _check(self, request: Request) -> None:
        for group, names in enumerate(request.keys):
            first = 0 if group == 0 else max(0, request.hit - self.window)
            for chunk in range(first, request.hit):
                for sub in range(self.factor):
                    block = request.blocks[group][chunk * self.factor + sub]
                    for worker, tensor in enumerate(self.tensors):
                        found = tensor[block, : self.fills[group]]
                        self.wrong += int((found != self._content(group, names[chunk], worker, sub)).sum())
                        self.counts["pages checked"] += 1

    def _content(self, group: int, key: bytes, worker: int, sub: int) -> torch.Tensor:
        return content(key, 0 if self.replicated else worker, sub, self.fills[group])

    # -- the rest ------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """As vLLM does it: all jobs are forgotten, though batches with them are still on their way to the workers."""
        self.manager.reset_cache()
        self.fence = set(self.jobs)
        self._say_flushed()
        self.stale_below = self.next_job
        self.counts["resets"] += 1

    def run(self, seconds: float = 120.0) -> None:
        """Step until every request has finished and the stack is at rest. AssertionError if that takes too long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.step()
            for worker in self.workers:
                worker.wait(set(self.running))
            pending = self.manager.has_pending_work()
            if not pending and not self.waiting and not self.running and not self.unsubmitted and not any(self.batches):
                return
        states = Counter(request.state for request in self.waiting)
        raise AssertionError(f"not at rest after {seconds} s: {states}, {dict(self.counts)}")

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.manager.shutdown()

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _ranked(config: OffloadingConfig, rank: int) -> OffloadingConfig:
    from dataclasses import replace

    return replace(config, parallel=replace(config.parallel, rank=rank))
