"""From a valid stack file and what an engine knows to a stack that can be opened."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kvtier.config.load import build_tiers
from kvtier.config.model import StackConfig
from kvtier.errors import ConfigError
from kvtier.keys import GPU
from kvtier.loadstore import KVCaches, LoadStore
from kvtier.namespace import Namespace
from kvtier.registry import Backends, discover
from kvtier.stack import StackParts, StackSettings, TierStack


def stack_parts(
    config: StackConfig,
    namespace: Namespace,
    kv_caches: KVCaches | None = None,
    workers: Sequence[LoadStore] = (),
    backends: Backends | None = None,
    engine_id: str = "",
) -> StackParts:
    """What TierStack and EngineStack are made of. Opens nothing.

    The operator's tag and block size factor of the file go into the namespace; a factor that contradicts the
    engine's is a ConfigError. A file without a gpu tier is given one with its defaults when the engine brings tensors.
    """
    backends = discover() if backends is None else backends
    factor = config.block_size_factor
    if factor is not None and namespace.layout.block_size_factor not in (1, factor):
        raise ConfigError(f"the engine uses {namespace.layout.block_size_factor}", "block_size_factor")
    layout = namespace.layout if factor is None else dataclasses.replace(namespace.layout, block_size_factor=factor)
    namespace = dataclasses.replace(namespace, layout=layout, tag=config.namespace or namespace.tag)
    tiers = build_tiers(config, backends)
    if kv_caches is not None and tiers[0].medium != GPU:
        gpu = backends.get("gpu")
        tiers.insert(0, gpu(gpu.Options(type="gpu")))
    settings = StackSettings(
        load_seconds=config.load_timeout_seconds,
        store_seconds=config.store_timeout_seconds,
        lookup_seconds=config.lookup_timeout_seconds,
        close_seconds=config.close_timeout_seconds,
    )
    return StackParts(tiers, namespace, kv_caches, workers, engine_id, settings)


def open_stack(
    config: StackConfig,
    namespace: Namespace,
    kv_caches: KVCaches | None = None,
    workers: Sequence[LoadStore] = (),
    engine_id: str = "",
) -> TierStack:
    """A stack for `async with`, from a stack file and an engine's namespace and KV cache tensors (or its workers).

    `engine_id` names the shared region for processes that have to find it; random when empty.
    """
    return TierStack(stack_parts(config, namespace, kv_caches, workers, engine_id=engine_id))
