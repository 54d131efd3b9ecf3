"""Facts of vLLM's whole configuration and of its models that a connector or a tier is not given."""

import gc
from collections import defaultdict
from collections.abc import Iterator
from typing import TypeVar

from torch import nn
from vllm.config import VllmConfig
from vllm.platforms import CpuArchEnum, current_platform
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.kv_offload.config import OffloadingConfig, OffloadingParallelConfig

from kvtier.errors import ConfigError

T = TypeVar("T")
WHOLE_PROMPTS = (
    "vLLM computes prompts of this model whole here, because its attention does not continue after a prefix: "
    "kvtier neither loads nor stores blocks"
)
NUMBERED_ITEMS = (
    "with enable_prefix_caching: false and mm_processor_cache_gb: 0 vLLM numbers images, sound and video in place of "
    "hashing them, anew in each process: kvtier neither loads nor stores blocks; change one of the two"
)
ENDS_ALONE = (
    "of windows and states this connector keeps the end of each prompt: a prefix that requests share does not come "
    "back, nor does a window of one token more than whole blocks; set kv_connector: KVTierConnector and "
    "kv_connector_module_path: kvtier.engines.vllm"
)


def engine_config(engine_id: str) -> VllmConfig | None:
    """vLLM's configuration of the engine of this id, looked for among all objects; takes about 0.1 s.

    A draft model has a copy of it, with the parallelism of the draft. None outside vLLM.
    """
    found = [
        config
        for config in _instances(VllmConfig)
        if config.kv_transfer_config is not None and config.kv_transfer_config.engine_id == engine_id
    ]
    return max(found, key=_launched_engines, default=None)


def _instances(*kinds: type[T]) -> list[T]:
    """The objects of exactly these classes. Unlike `gc.get_objects` it keeps no other object alive meanwhile, such as a
    view of memory that another thread is about to unmap."""
    return [found for found in gc.get_referrers(*kinds) if type(found) in kinds]


def engine_share(parallel: OffloadingParallelConfig, config: VllmConfig | None) -> tuple[int, int]:
    """The index of this engine among all that were launched with it, and their number: they share one stack file.

    Raises ConfigError where vLLM hides the number.
    """
    index = parallel.data_parallel_index
    engines = max(parallel.data_parallel_size, 1 if config is None else _launched_engines(config))
    if index >= engines:
        raise ConfigError(
            f"is hidden by this vLLM: this is engine {index} of an unknown number, so it cannot have its share of the "
            "bounds; start independent engines, each with a stack file of its own",
            "data_parallel_size",
        )
    return index, engines


def _launched_engines(config: VllmConfig) -> int:
    """The number of engines that were launched, or the number to which they may be scaled.

    vLLM makes each data-parallel rank of a dense model an engine by itself, whose `data_parallel_size` is 1. It leaves
    the number of the launch in this field, also where nothing is elastic.
    """
    return getattr(config.parallel_config, "elastic_ep_max_dp_size", None) or 1


def reason_for_no_blocks(config: VllmConfig | None) -> str:
    """The line for the log of an engine to which blocks of before are of no use; empty where they are of use."""
    if not continues_after_prefix(config):
        return WHOLE_PROMPTS
    return NUMBERED_ITEMS if config is not None and _numbers_items(config) else ""


def _numbers_items(config: VllmConfig) -> bool:
    """True if the key of a block names the image before it by a number that vLLM's renderer counts."""
    if config.model_config is None or config.cache_config.enable_prefix_caching:
        return False
    multimodal = config.model_config.multimodal_config
    return multimodal is not None and multimodal.mm_processor_cache_gb == 0


def continues_after_prefix(config: VllmConfig | None) -> bool:
    """True if the attention of this engine computes the rest of a prompt after a prefix from a cache.

    Where vLLM computes prompts in chunks, or has a prefix cache, it relies on that itself. It has turned both off where
    the attention backend, the mask or the model does not allow it. An operator may have turned both off for any model:
    then the answer is True only for what vLLM leaves on by itself.
    """
    if config is None or config.scheduler_config.enable_chunked_prefill or config.cache_config.enable_prefix_caching:
        return True
    model = config.model_config
    if current_platform.is_cpu():
        able = not model.use_mla and current_platform.get_cpu_architecture() != CpuArchEnum.RISCV
    else:
        able = current_platform.is_cuda_alike()
    return able and model.is_prefix_caching_supported and not _has_non_causal_layers()


def _has_non_causal_layers() -> bool:
    """True if the KV of some layer depends on later tokens too; vLLM marks the specification of such a layer."""
    return any(getattr(spec, "non_causal", False) for spec in _instances(*_with_subclasses(KVCacheSpec)))


def _with_subclasses(kind: type[T]) -> Iterator[type[T]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _with_subclasses(each)


def start_lines(config: OffloadingConfig, known: VllmConfig | None) -> Iterator[str]:
    """Lines for the log of an engine that keeps blocks: those that it cannot restore, and the option to set."""
    if known is None or known.model_config is None:
        return
    longest, blocks_per_chunk = known.model_config.max_model_len, config.cache.blocks_per_chunk
    too_long = [at for at, group in enumerate(config.groups) if group.tokens_per_block * blocks_per_chunk >= longest]
    if too_long:
        tokens = config.groups[too_long[0]].tokens_per_block
        yield (
            f"nothing comes back: a block of KV cache group {', '.join(map(str, too_long))} has "
            f"{tokens * blocks_per_chunk} tokens, and no prompt is longer than {longest}; set "
            f"{_remedy(tokens < longest, known)}"
        )
    if len(config.groups) > 1 and known.kv_transfer_config.kv_connector == "OffloadingConnector":
        yield ENDS_ALONE


def _remedy(chunk_alone: bool, known: VllmConfig) -> str:
    """The option for blocks shorter than the longest prompt: without prefix caching a state is one block."""
    if chunk_alone:
        return "a smaller blocks_per_chunk"
    return "a larger max_model_len" if known.cache_config.enable_prefix_caching else "enable_prefix_caching: true"


def attention_layers(config: VllmConfig) -> dict[str, nn.Module]:
    """The layers that vLLM looks up by name in each step: attention, state space, experts."""
    layers = config.compilation_config.static_forward_context
    return {name: layer for name, layer in layers.items() if isinstance(layer, nn.Module)}


def root_modules(config: VllmConfig) -> list[nn.Module]:
    """The models, drafts included, that hold those layers. vLLM hands a connector the layers alone, and a module does
    not know its parent: so the parents are found among all objects. Takes about 0.2 s; call it once.

    Empty if no model is found around some layer.
    """
    parents: defaultdict[int, list[nn.Module]] = defaultdict(list)
    for found in gc.get_objects():
        if issubclass(type(found), nn.Module):
            for child in found._modules.values():
                parents[id(child)].append(found)
    roots: dict[int, nn.Module] = {}
    seen: set[int] = set()
    todo = list(attention_layers(config).values())
    if not all(parents[id(layer)] for layer in todo):
        return []
    while todo:
        module = todo.pop()
        if id(module) not in seen:
            seen.add(id(module))
            todo += parents[id(module)]
            if not parents[id(module)]:
                roots[id(module)] = module
    return list(roots.values())
