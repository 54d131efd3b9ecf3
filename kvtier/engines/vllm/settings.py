"""From `kv_connector_extra_config` and vLLM's own configuration to a stack: options, layout, namespace."""

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from vllm.v1.kv_offload.config import OffloadingConfig

from kvtier.client.connection import Identity
from kvtier.client.private import PATH_BYTES_MAX, PrivateStack
from kvtier.config import StackConfig, StackOptions, load_stack, parse_stack
from kvtier.engines.engine_memory.options import RESTART_SECONDS
from kvtier.engines.engine_release import UNTESTED_KEY
from kvtier.engines.vllm.compat import LOGGER, engine_version, expedites_loads
from kvtier.engines.vllm.engine_config import engine_config, reason_for_no_blocks, start_lines
from kvtier.errors import ConfigError
from kvtier.options import FitsEngine, TierOptions
from kvtier.tier.registry import discover
from kvtier.types.geometry import GroupLayout, KVLayout, TensorRef
from kvtier.types.keys import GPU, GROUP_BYTES, OffloadKey
from kvtier.types.namespace import Namespace

DRIVER_KEY = "driver"
REQUIRED_KEY = "required"
READS_ONLY_KEY = "reads_only"
SERVICE_KEY = "service"
SYNC_LOADS_KEY = "sync_load_budget_bytes"
SHARED_PREFIXES_KEY = "shared_prefixes"
KEYS = frozenset(
    {
        "stack",
        DRIVER_KEY,
        REQUIRED_KEY,
        READS_ONLY_KEY,
        SERVICE_KEY,
        UNTESTED_KEY,
        "spec_name",
        "spec_module_path",
        "blocks_per_chunk",
        "block_size",
        "offload_prompt_only",
        "self_describing_kv_events",
        "canonical_layout",
        SYNC_LOADS_KEY,
        SHARED_PREFIXES_KEY,
    }
)
"""The keys of `kv_connector_extra_config`: `stack`, the consent to a release, and those that vLLM itself reads."""
CLOSE_SECONDS = 3.0
"""vLLM gives a process five seconds to end; a stack file may set less."""


class GroupIds:
    """Translates keys. Those of vLLM end in its own id of a KV cache group, `group_ids[position]`.

    Those of kvtier end in the position of the group.
    """

    def __init__(self, group_ids: Sequence[int]) -> None:
        names = [group.to_bytes(GROUP_BYTES, "big") for group in group_ids]
        self._to_kvtier = {name: position.to_bytes(GROUP_BYTES, "big") for position, name in enumerate(names)}
        self._to_vllm = {position: name for name, position in self._to_kvtier.items()}
        self._same = list(group_ids) == list(range(len(group_ids)))

    def to_kvtier(self, key: bytes) -> OffloadKey:
        """vLLM's key with the position of its group."""
        return OffloadKey(key if self._same else key[:-GROUP_BYTES] + self._to_kvtier[key[-GROUP_BYTES:]])

    def to_vllm(self, key: OffloadKey) -> OffloadKey:
        """kvtier's key with vLLM's id of its group."""
        return key if self._same else OffloadKey(key[:-GROUP_BYTES] + self._to_vllm[key[-GROUP_BYTES:]])


@dataclasses.dataclass(frozen=True, slots=True)
class EnginePlan:
    """The stack of one engine, without its gpu tier. `group_ids[position]` is vLLM's own id of a group.

    `gpu` are the options of the tier in each of vLLM's workers. It has a lane for urgent copies if vLLM waits for some
    loads within a step, up to its `sync_load_budget_bytes`. `keeps_blocks` is False where blocks are of no use. `lines`
    are for the log at start. `required`: the engine does not start without a stack process. `service`: the socket of
    one that others started; `stack` then has what concerns an engine alone. `reads_only`: the engine stores nothing.
    """

    stack: StackOptions
    namespace: Namespace
    engine_id: str
    group_ids: tuple[int, ...]
    gpu: TierOptions
    keeps_blocks: bool
    lines: tuple[str, ...] = ()
    required: bool = True
    service: str = ""
    reads_only: bool = False

    @property
    def whole(self) -> StackConfig:
        """The stack, of an engine that brings it."""
        assert isinstance(self.stack, StackConfig)
        return self.stack


def engine_plan(config: OffloadingConfig) -> EnginePlan:
    """The plan that scheduler and workers derive, each for itself, from the same configuration.

    No I/O but reading the stack file. Raises ConfigError for a stack or a deployment that cannot be served, by its
    name.
    """
    _check_parallel(config)
    known = engine_config(config.engine_id)
    _check_keys(config.extra_config)
    service = _service(config.extra_config)
    described = None if service and "stack" not in config.extra_config else _stack_config(config)
    stack = StackOptions(close_timeout_seconds=CLOSE_SECONDS)
    if described is not None:
        stack = _for_engine(described)
    group_ids = tuple(group.group_id for group in config.groups)
    gpu = _gpu_options(described).with_known(urgent_lane=_loads_in_step(config.extra_config))
    named = namespace(config, stack.namespace)
    no_use = reason_for_no_blocks(known)
    lines = (no_use,) if no_use else tuple(start_lines(config, known))
    required = _flag(config.extra_config, REQUIRED_KEY, True)
    reads_only = _flag(config.extra_config, READS_ONLY_KEY, False)
    return EnginePlan(stack, named, config.engine_id, group_ids, gpu, not no_use, lines, required, service, reads_only)


def _check_keys(extra: Mapping[str, Any]) -> None:
    """Raise ConfigError for an unknown key, or a driver which is gone."""
    if unknown := sorted(set(extra) - KEYS):
        raise ConfigError(f"is no key of kv_connector_extra_config; known are {', '.join(sorted(KEYS))}", unknown[0])
    if extra.get(DRIVER_KEY, "process") != "process":
        raise ConfigError("is gone: the stack is always in a process of its own; leave the key out", DRIVER_KEY)


def _flag(extra: Mapping[str, Any], key: str, default: bool) -> bool:
    """A flag. Raises ConfigError for another value."""
    value = extra.get(key, default)
    if not isinstance(value, bool):
        raise ConfigError("must be true or false", key)
    return value


def _service(extra: Mapping[str, Any]) -> str:
    """The socket of a `kvtier serve`; empty for a private stack process. Raises ConfigError for another value."""
    if SERVICE_KEY not in extra:
        return ""
    service = extra[SERVICE_KEY]
    if not isinstance(service, str) or not os.path.isabs(service):
        raise ConfigError("must be the absolute path of the socket of a kvtier serve", SERVICE_KEY)
    if len(os.fsencode(service)) > PATH_BYTES_MAX:
        raise ConfigError(f"must be a path of at most {PATH_BYTES_MAX} bytes, as sockets have", SERVICE_KEY)
    return service


def engine_identity(plan: EnginePlan) -> Identity:
    """The engine at a service, or at its private stack process, which is started unless it is there.

    Raises ConfigError if it cannot be started and is required.
    """
    if plan.service:
        return Identity(plan.service, plan.namespace, plan.engine_id, plan.engine_id, reads_only=plan.reads_only)
    private = None
    try:
        private = PrivateStack(plan.whole.model_dump_json(exclude_unset=True), plan.stack.runtime_dir)
        private.start()
    except ConfigError as error:
        if plan.required:
            raise
        logging.getLogger(LOGGER).error("the engine goes on without a stack process: %s", error)  # noqa: TRY400
    path = "" if private is None else private.path
    return Identity(path, plan.namespace, plan.engine_id, plan.engine_id, private, plan.reads_only)


def _gpu_options(described: StackConfig | None) -> TierOptions:
    """The options of a stack's gpu tier, or the defaults where none is named."""
    backends = discover()
    for options in () if described is None else described.tiers:
        if backends.get(options.type).medium == GPU:
            return options
    return backends.get("gpu").Options(type="gpu")


def _stack_config(config: OffloadingConfig) -> StackConfig:
    """The stack an operator named or wrote into `kv_connector_extra_config`."""
    extra: Mapping[str, Any] = config.extra_config
    blocks_per_chunk = config.cache.blocks_per_chunk
    stack = extra.get("stack")
    if isinstance(stack, str):
        described = load_stack(stack)
    elif isinstance(stack, Mapping):
        described = parse_stack(yaml.safe_dump(dict(stack)))
    else:
        raise ConfigError("is required without a service: the path of a stack file, or its content", "stack")
    if described.block_size_factor not in (None, blocks_per_chunk):
        raise ConfigError(
            f"is {described.block_size_factor} in the stack, but vLLM's blocks_per_chunk is {blocks_per_chunk}; "
            "leave it out of the stack",
            "stack.block_size_factor",
        )
    return described


def _loads_in_step(extra: Mapping[str, Any]) -> bool:
    budget = extra.get(SYNC_LOADS_KEY, 0)
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 0:
        raise ConfigError("must be a number of bytes, 0 or more", SYNC_LOADS_KEY)
    if budget and not expedites_loads():
        raise ConfigError(f"needs vLLM 0.33; {engine_version()} loads between steps only", SYNC_LOADS_KEY)
    return budget > 0


def shares_prefixes(transfer: Any) -> bool:
    """True unless vLLM's `kv_transfer_config` turns it off. Raises ConfigError for another value."""
    return _flag(transfer.kv_connector_extra_config, SHARED_PREFIXES_KEY, True)


def _for_engine(config: StackConfig) -> StackConfig:
    """The stack without its gpu tier, whose copies vLLM's workers make."""
    backends = discover()
    lower = [options for options in config.tiers if backends.get(options.type).medium != GPU]
    fitted = [each.for_engine(RESTART_SECONDS) if isinstance(each, FitsEngine) else each for each in lower]
    close_seconds = min(config.close_timeout_seconds, CLOSE_SECONDS)
    return config.model_copy(update={"tiers": tuple(fitted), "close_timeout_seconds": close_seconds})


def one_hash_per_key(config: OffloadingConfig) -> bool:
    """True if an offloaded block of every group has one hash of vLLM, its key's: then an event needs no other."""
    sizes = {group.tokens_per_block * config.cache.blocks_per_chunk for group in config.groups}
    return sizes == {config.cache.tokens_per_hash}


def _check_parallel(config: OffloadingConfig) -> None:
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


def _nominal_layout(config: OffloadingConfig) -> KVLayout:
    """The layout of the rows, which scheduler and workers have in common: each group's page is one block of the
    engine's allocation.

    Only the workers have the part that a group really fills, see `worker_layout`.
    """
    if config.worker_kv_bytes_per_block < 1:
        raise ConfigError("vLLM reports no KV cache blocks; kvtier needs at least one", "worker_kv_bytes_per_block")
    page = TensorRef(0, config.worker_kv_bytes_per_block)
    groups = tuple(GroupLayout((page,), group.tokens_per_block) for group in config.groups)
    return KVLayout(groups, config.parallel.world_size, config.cache.blocks_per_chunk, config.replicated_layout)


def release() -> str:
    """vLLM's version without its local build tag: another release may compute or lay out other bytes."""
    return engine_version().partition("+")[0]


def worker_layout(nominal: KVLayout, group_refs: list[list[tuple[int, int]]]) -> KVLayout:
    """The layout of one worker: (tensor index, bytes of a page) for each group.

    Raises ConfigError if a group's tensors do not fit into a nominal page.
    """
    groups = []
    for index, (group, refs) in enumerate(zip(nominal.groups, group_refs, strict=True)):
        used = sum(page_bytes for _, page_bytes in refs)
        if used > group.page_bytes:
            raise ConfigError(f"KV cache group {index} has pages of {used} bytes, vLLM announced {group.page_bytes}")
        tensors = tuple(TensorRef(tensor, page_bytes) for tensor, page_bytes in refs)
        groups.append(dataclasses.replace(group, refs=tensors))
    return dataclasses.replace(nominal, groups=tuple(groups))


def namespace(config: OffloadingConfig, tag: str) -> Namespace:
    """The namespace of the KV bytes, as far as the configuration goes, and the operator's tag.

    Raises ConfigError if vLLM has no KV cache.
    """
    parallel = config.parallel
    return Namespace(
        layout=_nominal_layout(config),
        model=config.model.name,
        dtype=config.model.dtype,
        tag=tag,
        extra={
            "engine": f"vllm {release()}",
            "kv_cache_layout": str(config.kv_cache_layout),
            "tensor_parallel_size": str(parallel.tp_size),
            "tokens_per_hash": str(config.cache.tokens_per_hash),
            "groups": ";".join(",".join(group.layer_names) for group in config.groups),
        },
    )
