"""Which generations of transformers fit: decided by what the cache classes offer, not by a version number alone."""

import importlib
import importlib.metadata
import inspect
from types import ModuleType

from kvtier.errors import ConfigError

SUPPORTED = "transformers 4.56 or newer"


def cache_classes() -> ModuleType:
    """transformers' module of cache classes. Raises ConfigError that names what is supported and what was found."""
    try:
        classes = importlib.import_module("transformers.cache_utils")
    except ImportError as error:
        raise _refused(f"({error}); try `pip install 'kvtier[transformers]'`") from error
    if not hasattr(classes, "DynamicCache"):
        raise _refused("has no DynamicCache")
    if not hasattr(classes, "DynamicLayer"):
        raise _refused("keeps its KV tensors in key_cache and value_cache, not in layers")
    takes = inspect.signature(classes.DynamicCache).parameters
    if not hasattr(classes, "DynamicSlidingWindowLayer") or "config" not in takes:
        raise _refused("makes no DynamicCache from a model's config")
    return classes


def _refused(found: str) -> ConfigError:
    try:
        installed = f"the installed transformers {importlib.metadata.version('transformers')}"
    except importlib.metadata.PackageNotFoundError:
        installed = "no transformers is installed"
    return ConfigError(f"kvtier.integrations.transformers needs {SUPPORTED}: {installed} {found}")
