"""Which releases of SGLang the backend fits: decided by what its classes offer, and by which were tested."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import re

from kvtier.errors import ConfigError

SUPPORTED = "SGLang 0.5.23"
UNTESTED_KEY = "allow_untested_engine"
_TESTED_RELEASE = re.compile(r"0\.5\.23(\.post\d+)?(\+.*)?")
_STORAGE = "sglang.srt.mem_cache.hicache_storage"
_NEEDED = {
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
_log = logging.getLogger(__name__)


def require_supported() -> None:
    """Raise ConfigError unless the installed SGLang has the interface this backend was written for."""
    try:
        module = importlib.import_module(_STORAGE)
    except ImportError as error:
        raise ConfigError(f"kvtier.integrations.sglang needs {SUPPORTED}; {_installed()}: {error}") from error
    lacking = [name for name in _NEEDED if not hasattr(module, name)]
    for name in set(_NEEDED) - set(lacking):
        lacking += [f"{name}.{member}" for member in _NEEDED[name] if not hasattr(getattr(module, name), member)]
    if lacking:
        raise ConfigError(
            f"kvtier.integrations.sglang needs {SUPPORTED}; {_installed()} has another storage interface: "
            f"it lacks {', '.join(sorted(lacking))}"
        )


def require_tested(allowed: bool) -> None:
    """Raise ConfigError for a release of SGLang that kvtier was not tested with, unless the operator allows it.

    The names of an interface say nothing of its behaviour: a method called at another moment is found by tests only.
    """
    version = engine_version()
    if _TESTED_RELEASE.fullmatch(version):
        return
    if not allowed:
        raise ConfigError(
            f"SGLang {version} is installed, and kvtier is tested with {SUPPORTED} only; "
            "true serves from an untested release all the same",
            UNTESTED_KEY,
        )
    _log.warning("SGLang %s is installed, and kvtier is tested with %s only", version, SUPPORTED)


def engine_version() -> str:
    """The version of the installed SGLang."""
    return importlib.metadata.version("sglang")


def _installed() -> str:
    try:
        return f"the installed SGLang is {engine_version()}"
    except importlib.metadata.PackageNotFoundError:
        return "no SGLang is installed"
