"""From a stack file and the arguments of an engine to a stack that can be opened."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from kvtier.config.load import build_tiers, load_stack
from kvtier.config.model import StackConfig
from kvtier.errors import ConfigError, UsageError
from kvtier.stack import StackParts, StackSettings
from kvtier.tier.contract import LoadStore
from kvtier.tier.registry import Backends, discover
from kvtier.types.geometry import KVLayout
from kvtier.types.keys import GPU
from kvtier.types.namespace import Namespace

if TYPE_CHECKING:
    import torch

    from kvtier.stack import EngineStack, TierStack

SETTINGS = [field.name for field in fields(StackSettings)]
"""A setting that is a key of a stack file has the name of the key."""


def stack_parts(
    stack: str | os.PathLike[str] | StackConfig,
    layout: KVLayout | Namespace,
    tensors: Sequence[torch.Tensor] | None = None,
    workers: Sequence[LoadStore] = (),
    backends: Backends | None = None,
    engine_id: str = "",
    model: str = "",
) -> StackParts:
    """The parts of a TierStack or an EngineStack. Opens nothing. The arguments are those of `open_stack`.

    The operator's tag and block size factor of the file go into the namespace; a factor that contradicts the
    engine's is a ConfigError. A file without a gpu tier is given one with its defaults when the engine brings tensors.
    """
    backends = backends or discover()
    config = stack if isinstance(stack, StackConfig) else load_stack(stack, backends)
    namespace = _namespace(config, layout, model)
    tiers = build_tiers(config, backends)
    if tensors is not None and tiers[0].medium != GPU:
        gpu = backends.get("gpu")
        tiers.insert(0, gpu(gpu.Options(type="gpu")))
    given = {name: getattr(config, name) for name in SETTINGS if name in StackConfig.model_fields}
    settings = StackSettings(**given, **dict(config.hints))
    parts = StackParts(tiers, namespace, tensors, workers, engine_id, settings)
    return replace(parts, record=config.record, state_dir=config.state_dir, stats_socket=config.stats_socket)


def _namespace(config: StackConfig, layout: KVLayout | Namespace, model: str) -> Namespace:
    """The engine's namespace with the operator's tag and block size factor."""
    if model and isinstance(layout, Namespace):
        raise UsageError("give the model in the namespace or as model, not both")
    namespace = layout if isinstance(layout, Namespace) else Namespace(layout, model=model)
    factor = config.block_size_factor
    if factor is not None and namespace.layout.block_size_factor not in (1, factor):
        raise ConfigError(f"the engine uses {namespace.layout.block_size_factor}", "block_size_factor")
    whole = namespace.layout if factor is None else replace(namespace.layout, block_size_factor=factor)
    return replace(namespace, layout=whole, tag=config.namespace or namespace.tag)


def open_stack(
    stack: str | os.PathLike[str] | StackConfig,
    layout: KVLayout | Namespace,
    tensors: Sequence[torch.Tensor] | None = None,
    *,
    model: str = "",
    workers: Sequence[LoadStore] = (),
    engine_id: str = "",
) -> TierStack:
    """A stack for `async with`, from a stack file and an engine's KV layout and KV cache tensors.

    `stack` is a path or what `parse_stack` returned. `tensors[i]` has 8-bit elements and the shape (blocks, bytes of a
    page). A Namespace in place of `layout` holds more than the model's name: weights, dtype, hash algorithm. `workers`
    copy in other processes in place of `tensors`; `engine_id` names the shared region for them, random when empty.
    """
    from kvtier.stack import TierStack

    return TierStack(stack_parts(stack, layout, tensors, workers, engine_id=engine_id, model=model))


def open_engine_stack(
    stack: str | os.PathLike[str] | StackConfig,
    layout: KVLayout | Namespace,
    tensors: Sequence[torch.Tensor] | None = None,
    *,
    model: str = "",
    workers: Sequence[LoadStore] = (),
    engine_id: str = "",
) -> EngineStack:
    """A stack for a synchronous engine, for `with`: the arguments are those of `open_stack`."""
    from kvtier.stack import EngineStack

    return EngineStack(stack_parts(stack, layout, tensors, workers, engine_id=engine_id, model=model))
