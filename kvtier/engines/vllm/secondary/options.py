"""The options of `KVTierFs`, and what it takes from vLLM: folders, namespace, names of groups."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import canonical_format_id
from vllm.v1.kv_offload.config import OffloadingConfig

from kvtier.engines.engine_memory.options import EngineMemoryOptions, read_options
from kvtier.engines.vllm import settings
from kvtier.engines.vllm.engine_settings import environment_of
from kvtier.engines.vllm.model_code import ModelCode
from kvtier.errors import ConfigError
from kvtier.types.namespace import Namespace

NAMESPACE_REQUIRED = (
    "is required, because vLLM shows a secondary tier no model: name the weights and their quantisation, rope scaling, "
    "max_model_len, adapters, attention backend, the model's own code and processors, and change it when one of them "
    "changes"
)


class SecondaryOptions(EngineMemoryOptions):
    """The keys beside those of the filesystem backend."""

    namespace: str = Field(
        default="",
        max_length=256,
        description="required: names all that decides the bytes and that vLLM does not tell a secondary tier: weights "
        "and their quantisation, rope scaling, max_model_len, adapters, attention backend; "
        "stores with different tags never share a block",
    )
    enable_kv_events: bool = Field(default=False, description="emit KV events for what is stored and removed here")
    locality: Literal["LOCAL", "REMOTE"] | None = Field(default=None, description="where vLLM is to say the store is")


def secondary_options(keys: Mapping[str, Any], tier_type: str, backend: str) -> SecondaryOptions:
    """The options of one entry of `secondary_tiers`. Raises ConfigError with one line for each thing that is wrong."""
    at = f"secondary_tiers.{tier_type}"
    options = read_options(SecondaryOptions, backend, keys, at)
    if not options.namespace:
        raise ConfigError(NAMESPACE_REQUIRED, f"{at}.namespace")
    return options


def tier_namespace(config: OffloadingConfig, tag: str, row_bytes: int) -> Namespace:
    """Everything that identifies vLLM's rows, as far as a secondary tier sees it: its configuration, the engine's
    variables, the plug-ins that it has loaded. `tag` names the rest.

    Raises ConfigError if vLLM has no KV cache.
    """
    known = settings.namespace(config, tag)
    parallel = config.parallel
    canonical = canonical_format_id(config.kv_cache_layout) if config.canonical_layout else False
    extra = {
        "rows": "vllm tiering",
        "row_bytes": str(row_bytes),
        "canonical_layout": str(canonical),
        "pipeline_parallel_size": str(parallel.pp_size),
        "prefill_context_parallel_size": str(parallel.pcp_size),
        "decode_context_parallel_size": str(parallel.dcp_size),
    }
    seen = environment_of() | ModelCode.of((), processors=False).fields()
    return replace(known, extra={**known.extra, **extra, **seen})
