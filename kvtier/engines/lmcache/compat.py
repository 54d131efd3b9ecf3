"""The releases of LMCache that the adapter fits."""

from __future__ import annotations

from kvtier.engines.engine_release import EngineRelease

RELEASE = EngineRelease(
    name="LMCache",
    distributions=("lmcache",),
    integration="kvtier.engines.lmcache",
    options="adapter_params",
    supported="LMCache 0.5.6 or 0.5.7",
    tested=r"0\.5\.(6|7(rc\d+)?)(\.post\d+)?(\+.*)?",
    needed={
        "lmcache.v1.distributed.l2_adapters.base": {
            "AdapterUsage": (),
            "L2AdapterInterface": (
                "submit_store_task",
                "pop_completed_store_tasks",
                "submit_lookup_and_lock_task",
                "query_lookup_and_lock_result",
                "submit_unlock",
                "submit_load_task",
                "query_load_result",
                "delete",
                "list_l2_keys",
                "get_usage",
                "_notify_keys_stored",
                "_notify_keys_accessed",
                "_notify_keys_deleted",
            ),
        }
    },
)
