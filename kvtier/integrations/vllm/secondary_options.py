"""What can be told to `KVTierFs`, and what vLLM tells it: options, folders, namespace, names of groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, create_model
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import canonical_format_id
from vllm.v1.kv_offload.config import OffloadingConfig

from kvtier.config import StackConfig
from kvtier.config.load import validate
from kvtier.errors import ConfigError
from kvtier.geometry import Geometry, GroupLayout, KVLayout, TensorRef
from kvtier.integrations.vllm import settings
from kvtier.integrations.vllm.identity import weights_identity
from kvtier.keys import GROUP_BYTES, OffloadKey
from kvtier.namespace import Namespace
from kvtier.options import ByteSize, LowerTierOptions, Seconds
from kvtier.registry import discover

BACKEND = "fs"
Named = TypeVar("Named", bound=LowerTierOptions)


class SecondaryOptions(LowerTierOptions):
    """The keys that are not the filesystem backend's own, and those whose default differs here."""

    namespace: str = Field(
        default="",
        max_length=256,
        description="what vLLM does not tell a secondary tier: revision of the weights, quantisation; "
        "stores with different tags never share a block; required for a model that is not a local folder",
    )
    inflight_bytes: ByteSize = Field(
        default=128 << 20, description="memory that blocks pass through on their way, a half for each direction"
    )
    copy_threads: int = Field(default=2, ge=1, le=64, description="threads that copy and hash, at most")
    busy_root_seconds: float = Field(
        default=30.0,
        ge=0,
        allow_inf_nan=False,
        strict=False,
        description="how long starting waits for a root that another process still owns",
    )
    drain_timeout_seconds: Seconds = Field(
        default=3.0, description="how long a shutdown or a reset waits for blocks on their way"
    )
    close_timeout_seconds: Seconds = Field(default=2.0, description="close waits this long for I/O under way")
    enable_kv_events: bool = Field(default=False, description="emit KV events for what is stored and removed here")
    locality: Literal["LOCAL", "REMOTE"] | None = Field(default=None, description="where vLLM is to say the store is")


@cache
def options_model() -> type[SecondaryOptions]:
    """Our keys and those of the installed filesystem backend, in one strict model."""
    bases: tuple[Any, ...] = (SecondaryOptions, discover().get(BACKEND).Options)
    model: type[SecondaryOptions] = create_model("KVTierFsOptions", __base__=bases)
    return model


def read_options(keys: Mapping[str, Any], tier_type: str) -> SecondaryOptions:
    """The options of one entry of `secondary_tiers`. Raises ConfigError with one line for each thing that is wrong."""
    at = f"secondary_tiers.{tier_type}"
    options = validate(options_model(), {"type": BACKEND, **keys}, at)
    if options.write_policy != "write_through":
        raise ConfigError("vLLM hands blocks down when its CPU tier has them; leave it out", f"{at}.write_policy")
    return options


def own_share(options: Named, config: OffloadingConfig) -> Named:
    """Folders and bytes of one of several data-parallel engines that were given the same options.

    A slab root belongs to one process, so each engine has folders beside those that were named and its part of the
    capacity. A `files` root is for all of them.
    """
    parallel = config.parallel
    if parallel.data_parallel_size < 2 or getattr(options, "layout", "slab") != "slab":
        return options
    roots = [f"{root}-dp{parallel.data_parallel_index}" for root in getattr(options, "roots", ())]
    capacity = getattr(options, "capacity", 0) // parallel.data_parallel_size
    return options.model_copy(update={"roots": roots, "capacity": capacity})


def rows_geometry(num_groups: int, row_bytes: int, alignment: int) -> Geometry:
    """vLLM's rows as they are, its padding included: every block of every group is one whole row."""
    row = GroupLayout((TensorRef(0, row_bytes),))
    return Geometry(KVLayout((row,) * num_groups), alignment)


def tier_namespace(config: OffloadingConfig, options: SecondaryOptions, row_bytes: int) -> Namespace:
    """Everything a secondary tier can know about what vLLM's rows mean.

    Raises ConfigError if nothing tells the weights apart, or if vLLM has no KV cache.
    """
    if config.worker_kv_bytes_per_block < 1:
        raise ConfigError("vLLM reports no KV cache blocks; KVTierFs needs at least one", "worker_kv_bytes_per_block")
    weights = weights_identity(Path(config.model.name))
    if not weights and not options.namespace:
        raise ConfigError(
            "is required: nothing tells these weights from others of the same model, so name them yourself",
            "secondary_tiers.KVTierFs.namespace",
        )
    known = settings.namespace(config, StackConfig(namespace=options.namespace, tiers=(options,)))
    parallel = config.parallel
    canonical = canonical_format_id(config.kv_cache_layout) if config.canonical_layout else False
    extra = {
        **known.extra,
        "rows": "vllm tiering",
        "row_bytes": str(row_bytes),
        "canonical_layout": str(canonical),
        "pipeline_parallel_size": str(parallel.pp_size),
        "prefill_context_parallel_size": str(parallel.pcp_size),
        "decode_context_parallel_size": str(parallel.dcp_size),
    }
    return dataclasses.replace(known, weights=weights, extra=extra)


class GroupNames:
    """vLLM's keys end in its own id of a KV cache group, kvtier's in the group's position."""

    def __init__(self, group_ids: Sequence[int]) -> None:
        self._to_own = {_suffix(group): _suffix(position) for position, group in enumerate(group_ids)}
        self._to_vllm = {_suffix(position): _suffix(group) for position, group in enumerate(group_ids)}
        self._same = self._to_own == self._to_vllm

    def own(self, key: bytes) -> OffloadKey:
        """kvtier's name of vLLM's key."""
        return OffloadKey(key if self._same else key[:-GROUP_BYTES] + self._to_own[key[-GROUP_BYTES:]])

    def vllm(self, key: OffloadKey) -> OffloadKey:
        """vLLM's name of kvtier's key."""
        return key if self._same else OffloadKey(key[:-GROUP_BYTES] + self._to_vllm[key[-GROUP_BYTES:]])


def _suffix(group: int) -> bytes:
    return group.to_bytes(GROUP_BYTES, "big")
