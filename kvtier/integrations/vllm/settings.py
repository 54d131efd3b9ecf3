"""From `kv_connector_extra_config` and vLLM's own configuration to a stack: options, layout, namespace."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import yaml
from vllm.v1.kv_offload.config import OffloadingConfig

from kvtier.config import StackConfig, load_stack, parse_stack
from kvtier.errors import ConfigError
from kvtier.geometry import GroupLayout, KVLayout, TensorRef
from kvtier.keys import CPU, GPU
from kvtier.namespace import Namespace
from kvtier.registry import discover

OURS = frozenset({"stack"})
VLLM = frozenset(
    {
        "spec_name",
        "spec_module_path",
        "blocks_per_chunk",
        "block_size",
        "offload_prompt_only",
        "self_describing_kv_events",
        "canonical_layout",
    }
)
CLOSE_SECONDS = 3.0
"""vLLM gives a process five seconds to end; a stack file that asks for less is obeyed."""
OWNER_SECONDS = 30.0


def stack_config(config: OffloadingConfig) -> StackConfig:
    """The stack an operator named or wrote into `kv_connector_extra_config`, or this engine's share of it.

    Raises ConfigError for an unknown key, a missing or invalid stack, or one that contradicts vLLM's chunk.
    """
    extra: Mapping[str, Any] = config.extra_config
    blocks_per_chunk = config.cache.blocks_per_chunk
    unknown = sorted(set(extra) - OURS - VLLM)
    if unknown:
        raise ConfigError(
            f"is no key of kv_connector_extra_config; known are {', '.join(sorted(OURS | VLLM))}", unknown[0]
        )
    stack = extra.get("stack")
    if isinstance(stack, str):
        described = load_stack(stack)
    elif isinstance(stack, Mapping):
        described = parse_stack(yaml.safe_dump(dict(stack)))
    else:
        raise ConfigError("is required: the path of a stack file, or its content as a mapping", "stack")
    if described.block_size_factor not in (None, blocks_per_chunk):
        raise ConfigError(
            f"is {described.block_size_factor} in the stack, but vLLM's blocks_per_chunk is {blocks_per_chunk}; "
            "leave it out of the stack",
            "stack.block_size_factor",
        )
    return _for_engine(described, config.parallel.data_parallel_index, config.parallel.data_parallel_size)


def _for_engine(config: StackConfig, engine: int, engines: int) -> StackConfig:
    """The stack without its gpu tier, whose copies vLLM's workers make, with a region they can find, and with this
    engine's share where several are started from one file. A root that is busy may belong to the engine before."""
    backends = discover()
    tiers = []
    for options in config.tiers:
        medium = backends.get(options.type).medium
        if medium == GPU:
            continue
        if medium == CPU:
            if getattr(options, "verify_loads", False):
                raise ConfigError("vLLM cannot take back a hit; leave verify_loads out", "stack.tiers.verify_loads")
            options = options.model_copy(update={"shared": "named"})
        if "owner_timeout_seconds" in type(options).model_fields.keys() - options.model_fields_set:
            options = options.model_copy(update={"owner_timeout_seconds": OWNER_SECONDS})
        tiers.append(options.share(engine, engines))
    close_seconds = min(config.close_timeout_seconds, CLOSE_SECONDS)
    return config.model_copy(update={"tiers": tuple(tiers), "close_timeout_seconds": close_seconds})


def check_parallel(config: OffloadingConfig) -> None:
    """Raise ConfigError for a deployment that the shared region of one host cannot serve, by its name."""
    parallel = config.parallel
    refused = {
        "pipeline_parallel_size": parallel.pp_size > 1,
        "prefill_context_parallel_size": parallel.pcp_size > 1,
        "decode_context_parallel_size": parallel.dcp_size > 1,
        "canonical_layout": config.canonical_layout,
    }
    for name, wrong in refused.items():
        if wrong:
            raise ConfigError("is not supported by KVTierSpec; use tensor parallelism on one host", name)
    if config.worker_kv_bytes_per_block < 1:
        raise ConfigError("vLLM reports no KV cache blocks; KVTierSpec needs at least one", "worker_kv_bytes_per_block")


def nominal_layout(config: OffloadingConfig) -> KVLayout:
    """The layout as scheduler and workers both know it: each group's page is one block of the engine's allocation.

    The tensors inside a page are known to the workers alone, see `worker_layout`.
    """
    page = TensorRef(0, config.worker_kv_bytes_per_block)
    groups = tuple(GroupLayout((page,), group.tokens_per_block) for group in config.groups)
    return KVLayout(groups, config.parallel.world_size, config.cache.blocks_per_chunk, config.replicated_layout)


def worker_layout(nominal: KVLayout, group_refs: list[list[tuple[int, int]]]) -> KVLayout:
    """The nominal layout with the tensors of one worker: (tensor index, bytes of a page) for each group.

    Raises ConfigError if a group's tensors do not fit into a page.
    """
    groups = []
    for index, (group, refs) in enumerate(zip(nominal.groups, group_refs, strict=True)):
        used = sum(page_bytes for _, page_bytes in refs)
        if used > group.page_bytes:
            raise ConfigError(f"KV cache group {index} has pages of {used} bytes, vLLM announced {group.page_bytes}")
        tensors = tuple(TensorRef(tensor, page_bytes) for tensor, page_bytes in refs)
        groups.append(dataclasses.replace(group, refs=tensors, padding_bytes=group.page_bytes - used))
    return dataclasses.replace(nominal, groups=tuple(groups))


def namespace(config: OffloadingConfig, stack: StackConfig) -> Namespace:
    """Everything vLLM tells an offloading spec about what its KV bytes mean."""
    parallel = config.parallel
    return Namespace(
        layout=nominal_layout(config),
        model=config.model.name,
        dtype=config.model.dtype,
        tag=stack.namespace,
        extra={
            "engine": "vllm",
            "kv_cache_layout": str(config.kv_cache_layout),
            "tensor_parallel_size": str(parallel.tp_size),
            "tokens_per_hash": str(config.cache.tokens_per_hash),
            "groups": ";".join(",".join(group.layer_names) for group in config.groups),
        },
    )
