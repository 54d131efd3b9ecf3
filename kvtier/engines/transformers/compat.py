"""The generations of transformers that fit: decided by what the cache classes offer, not by a version number alone."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from types import ModuleType
from typing import TYPE_CHECKING

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CACHE_ARGUMENTS = ("cache", "past_key_values")
"""What the argument for a cache is called since transformers 5.24, and before. The old name warns there."""

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


def cache_argument(model: PreTrainedModel) -> str:
    """The name of the argument in which this model and its `generate` take a cache: `cache` since transformers 5.24,
    `past_key_values` before. Raises ConfigError for a model that takes none."""
    takes = inspect.signature(model.forward).parameters
    if not any(each.kind is each.VAR_KEYWORD or each.name in CACHE_ARGUMENTS for each in takes.values()):
        raise ConfigError(f"{type(model).__name__} takes neither cache nor past_key_values", "model")
    if not takes.keys() & set(CACHE_ARGUMENTS):
        # The model hands on what it is given, so the name is that of the models of this transformers.
        mixin = importlib.import_module("transformers.generation").GenerationMixin
        takes = inspect.signature(mixin.prepare_inputs_for_generation).parameters
    return next(name for name in CACHE_ARGUMENTS if name in takes)


def _refused(found: str) -> ConfigError:
    try:
        installed = f"the installed transformers {importlib.metadata.version('transformers')}"
    except importlib.metadata.PackageNotFoundError:
        installed = "no transformers is installed"
    return ConfigError(f"kvtier.engines.transformers needs {SUPPORTED}: {installed} {found}")
