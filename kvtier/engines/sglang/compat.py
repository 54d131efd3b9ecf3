"""The releases of SGLang that the backend fits."""

from __future__ import annotations

from kvtier.engines.engine_release import EngineRelease

RELEASE = EngineRelease(
    name="SGLang",
    distributions=("sglang",),
    integration="kvtier.engines.sglang",
    options="hicache_storage_backend_extra_config",
    supported="SGLang 0.5.23",
    tested=r"0\.5\.23(\.post\d+)?(\+.*)?",
    needed={
        "sglang.srt.mem_cache.hicache_storage": {
            "HiCacheStorage": (
                "register_mem_pool_host",
                "register_mem_host_pool_v2",
                "on_host_pools_registered",
                "batch_exists_v2",
                "batch_get_v2",
                "batch_set_v2",
                "batch_get_v1",
                "batch_set_v1",
            ),
            "HiCacheStorageConfig": (),
            "PoolHitPolicy": ("ALL_PAGES", "TRAILING_PAGES"),
            "PoolTransferResult": (),
        }
    },
)
