"""Which generations of transformers fit: told by what the cache classes offer, not by a version number alone."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from dataclasses import dataclass
from typing import Any

from kvtier.errors import ConfigError

SUPPORTED = "transformers 4.56 or newer"
_MODULE = "transformers.cache_utils"


@dataclass(frozen=True, slots=True)
class CacheClasses:
    """transformers' own classes: a cache, a layer that keeps every token, a layer that keeps a sliding window."""

    cache: Any
    full_layer: Any
    sliding_layer: Any
    version: str


def cache_classes() -> CacheClasses:
    """The installed generation's classes. Raises ConfigError that names what is supported and what was found."""
    try:
        module = importlib.import_module(_MODULE)
    except ImportError as error:
        raise _refused(f"{_installed()} ({error}); try `pip install 'kvtier[transformers]'`") from error
    cache = getattr(module, "DynamicCache", None)
    full = getattr(module, "DynamicLayer", None)
    sliding = getattr(module, "DynamicSlidingWindowLayer", None)
    if cache is None:
        raise _refused(f"{_installed()} has no DynamicCache")
    if full is None:
        raise _refused(f"{_installed()} keeps its KV tensors in key_cache and value_cache, not in layers")
    if sliding is None or "config" not in inspect.signature(cache).parameters:
        raise _refused(f"{_installed()} makes no DynamicCache from a model's config")
    return CacheClasses(cache, full, sliding, importlib.metadata.version("transformers"))


def _refused(found: str) -> ConfigError:
    return ConfigError(f"kvtier.integrations.transformers needs {SUPPORTED}: {found}")


def _installed() -> str:
    try:
        return f"the installed transformers {importlib.metadata.version('transformers')}"
    except importlib.metadata.PackageNotFoundError:
        return "no transformers is installed"
