"""vLLM's fs tier as the benchmarks set it up; only under a Python that has vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def fs_tier(view: memoryview, folder: str) -> Any:
    """A FileSystemTierManager over the rows of a (blocks, bytes) view, one block in a file below `folder`."""
    from vllm.v1.kv_offload import config as names
    from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

    assert view.shape is not None
    config = names.OffloadingConfig(
        groups=(names.OffloadingGroupConfig(16, ("layer",), 0),),
        worker_kv_bytes_per_block=view.shape[1],
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="benchmark",
        model=names.OffloadingModelConfig("benchmark", "float16"),
        cache=names.OffloadingCacheConfig(16, 1),
        parallel=names.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
    )
    return FileSystemTierManager(SimpleNamespace(config=config, blocks_per_chunk=1), view, "fs", folder)
