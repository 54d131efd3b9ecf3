"""vLLM's own tiering manager and region on the CPU, driven as vLLM's scheduler and workers drive them."""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, ReqContext, ScheduleEndContext, make_offload_key  # noqa: F401
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.factory import OffloadingSpecFactory  # noqa: F401
from vllm.v1.kv_offload.tiering.base import TransferJob  # noqa: F401
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

ROW = 16 << 10
PATIENCE_SECONDS = 60.0


def keys(count: int, start: int = 0, group: int = 0) -> list[bytes]:
    """Distinct keys of a group."""
    return [make_offload_key(hashlib.sha256(f"{group}/{start + i}".encode()).digest(), group) for i in range(count)]


def content(key: bytes, length: int = ROW) -> np.ndarray:
    """What the row of a key must hold: every byte follows from the key."""
    seed = int.from_bytes(hashlib.sha256(key).digest()[:8], "big")
    return np.random.Generator(np.random.SFC64(seed)).integers(-128, 128, length, dtype=np.int8)


def offloading_config(tier: dict[str, Any], *, chunks: int = 32, row: int = ROW, **changes: Any) -> OffloadingConfig:
    """What vLLM would hand its spec: one group of one worker unless `changes` say otherwise."""
    parallel = {
        "rank": 0,
        "world_size": 1,
        "tp_size": 1,
        "pp_size": 1,
        "pcp_size": 1,
        "dcp_size": 1,
        "data_parallel_index": 0,
        "data_parallel_size": 1,
        "data_parallel_rank_local": None,
        "is_parallelism_agnostic": False,
    } | changes.pop("parallel", {})
    given = {
        "groups": (OffloadingGroupConfig(16, ("layer.0", "layer.1"), 0),),
        "worker_kv_bytes_per_block": row // parallel["world_size"],
        "enable_kv_cache_events": True,
        "extra_config": {
            "cpu_bytes_to_use": chunks * -(-row // 4096) * 4096,
            "secondary_tiers": [{"type": "KVTierFs", "module_path": "kvtier.engines.vllm", **tier}],
        },
        "engine_id": f"test-{os.getpid()}-{uuid.uuid4().hex}",
        "model": OffloadingModelConfig("a/model", "bfloat16"),
        "cache": OffloadingCacheConfig(16, 1),
        "parallel": OffloadingParallelConfig(**parallel),
        "kv_cache_layout": "NHD",
    }
    return OffloadingConfig(**(given | changes))


def tier_config(root: Path, **changes: Any) -> dict[str, Any]:
    """The keys of the tier, small and quick."""
    place = {"root": str(root)} if changes.get("type") == "KVTierSharedFs" else {"roots": [str(root)]}
    return {"namespace": "test", **place, "capacity": "16MiB", "min_free_bytes": 0} | changes


class Vllm:
    """A scheduler and its worker: real spec, real manager, real region. Use it as `with Vllm(config) as vllm`."""

    def __init__(self, config: OffloadingConfig) -> None:
        self.spec = TieringOffloadingSpec(config)
        self.manager = self.spec.get_manager()
        self.region = SharedOffloadRegion(
            config.engine_id, self.spec.num_chunks, 0, self.spec.kv_bytes_per_chunk, self.spec.cpu_page_size_per_worker
        )
        self.row = self.spec.kv_bytes_per_chunk
        self._requests = 0
        self._told = OffloadingConnectorStats()
        self._closed = False

    def __enter__(self) -> Vllm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """As vLLM ends: the worker's region first."""
        if not self._closed:
            self._closed = True
            self.region.cleanup()
            self.manager.shutdown()

    @property
    def tier(self) -> Any:
        return self.manager.secondary_tiers[0]

    # -- the worker ----------------------------------------------------------------------------------------------

    def write(self, chunk: int, data: np.ndarray) -> None:
        """A worker's store into a row."""
        self.region.base_tensor.numpy()[chunk * self.row : chunk * self.row + len(data)] = data

    def read(self, chunk: int) -> np.ndarray:
        """A row as a worker's load finds it."""
        return self.region.base_tensor.numpy()[chunk * self.row : (chunk + 1) * self.row].copy()

    # -- the scheduler -------------------------------------------------------------------------------------------

    def request(self, names: Sequence[bytes] = ()) -> ReqContext:
        """A new request; `names` in the order of its prefix."""
        self._requests += 1
        context = ReqContext(f"request-{self._requests}")
        for position, name in enumerate(names, start=1):
            context.set_offload_key_position(name, position * 16)
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        """The end of a scheduler's step."""
        self.manager.on_schedule_end(ScheduleEndContext((), ()))
        self._collect()

    def _collect(self) -> None:
        """As vLLM asks for figures, once a step."""
        told = self.manager.get_stats()
        if told is not None:
            self._told.aggregate(told)

    def until(self, condition: Callable[[], bool]) -> None:
        """Step until something holds; a hang fails the test."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, "the tier hangs"
            self.step()

    def settle(self) -> None:
        """Step until no job is under way."""
        self.until(lambda: not self.manager.has_pending_work())

    def store(self, names: Sequence[bytes], settle: bool = True) -> None:
        """Blocks from the GPU into the CPU tier, and what vLLM cascades; nothing if the CPU tier has no room."""
        context = self.request(names)
        prepared = self.manager.prepare_store(names, context)
        if prepared is not None:
            for name, chunk in zip(prepared.keys_to_store, prepared.store_spec.block_ids, strict=True):
                self.write(int(chunk), content(name, self.row))
            if prepared.keys_to_store:
                self.manager.complete_store(prepared.keys_to_store, context)
        self.manager.on_request_finished(context)
        if settle:
            self.settle()

    def lookup(self, names: Iterable[bytes]) -> list[LookupResult]:
        """What one request that keeps asking is told in the end for each key, before it loads anything."""
        names = list(names)
        context = self.request(names)
        answers: list[LookupResult] = []

        def resolved() -> bool:
            answers[:] = [self.manager.lookup(name, context) for name in names]
            return not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(answers)

        self.until(resolved)
        self.manager.on_request_finished(context)
        return answers

    def hits(self, names: Sequence[bytes]) -> list[bytes]:
        """The keys of a request that were served, each checked byte for byte as a worker would read it."""
        names = list(names)
        answers = self.lookup(names)
        found = [name for name, answer in zip(names, answers, strict=True) if answer is LookupResult.HIT]
        if found:
            context = self.request(found)
            spec = self.manager.prepare_load(found, context)
            for name, chunk in zip(found, spec.block_ids, strict=True):
                assert np.array_equal(self.read(int(chunk)), content(name, self.row)), "wrong bytes"
            self.manager.complete_load(found, context)
            self.manager.on_request_finished(context)
        return found

    def forget(self) -> None:
        """vLLM's CPU tier is emptied, as a reset does it."""
        self.manager.reset_cache()
        if hasattr(self.manager, "on_reset_flushed"):  # vLLM 0.33, which takes promotions up again after this
            self.manager.on_reset_flushed()

    def stats(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Metrics since the last call, by name and labels."""
        self._collect()
        told, self._told = self._told, OffloadingConnectorStats()
        return told.data["data"]
