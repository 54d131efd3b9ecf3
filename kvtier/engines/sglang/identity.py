"""The identity of an engine's KV pages, and which rank this is among those of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.runtime_context import get_memory, get_parallel

from kvtier.engines.engine_memory.options import engine_part
from kvtier.engines.sglang.compat import RELEASE
from kvtier.engines.sglang.options import AT, HiCacheOptions
from kvtier.engines.sglang.pools import HostPool
from kvtier.errors import ConfigError
from kvtier.options import SharedTierOptions
from kvtier.types.geometry import GroupKind, GroupLayout, KVLayout
from kvtier.types.namespace import Namespace

NOT_IN_NAMESPACE = ("model_name", "dp_rank", "enable_storage_metrics", "extra_config")
"""Fields of the configuration that are elsewhere in the namespace, or that say nothing of a page's bytes."""
MAIN_POOL = "kv"


def layout_of(pools: Sequence[HostPool]) -> KVLayout:
    """A group for each pool. Pages of the main pool form a chain; which pages of another one a prefix needs is known
    with each request only."""
    groups, first = [], 0
    for pool in pools:
        kind = GroupKind.FULL if pool.name == MAIN_POOL else GroupKind.MAMBA
        sizes = pool.piece_bytes
        groups.append(GroupLayout.of_pages(sizes, block_size=pool.page_size, first_tensor=first, kind=kind))
        first += len(sizes)
    return KVLayout(groups)


def namespace_of(config: HiCacheStorageConfig, options: HiCacheOptions, pools: Sequence[HostPool]) -> Namespace:
    """Everything that identifies the pages of this rank. With MLA all ranks have the same pages.

    Takes as long as reading the weights if `model_folder` names them, the first time. Raises ConfigError for a folder
    without weights.
    """
    known = {field.name: str(getattr(config, field.name)) for field in fields(config)}
    for name in NOT_IN_NAMESPACE:
        del known[name]
    if config.is_mla_model:
        del known["tp_rank"]
    return Namespace(
        layout=layout_of(pools),
        model=config.model_name or "",
        weights=options.weights_digest(AT),
        dtype=pools[0].dtype.removeprefix("torch."),
        hash_algorithm="sglang page chain",
        tag=options.namespace,
        extra={
            **known,
            "engine": f"sglang {RELEASE.version}",
            "kv_cache_dtype": str(_published("kv_cache_dtype")),
            "pools": ";".join(f"{pool.name},{pool.layout},{pool.dtype},{pool.page_size}" for pool in pools),
        },
    )


def _published(name: str) -> Any:
    try:
        return getattr(get_memory(), name)
    except (AttributeError, ValueError):  # a controller without a server has published nothing
        return ""


def rank_options(config: HiCacheStorageConfig, options: HiCacheOptions) -> HiCacheOptions:
    """This rank's share of the tier: folders of its own where a folder belongs to one process.

    Raises ConfigError for a tier of one process whose pages other ranks are to load.
    """
    copies = config.tp_size // config.dcp_size if config.is_mla_model else 1
    if copies > 1 and not isinstance(options, SharedTierOptions):
        raise ConfigError(
            f"is {options.type}, which belongs to one process; with MLA one of {config.tp_size} ranks stores and all "
            "load: write shared_fs or a remote tier",
            f"{AT}.type",
        )
    index, count = 0, 1
    for rank, size in (
        (_width("dp_rank"), _width("dp_size")),
        (config.dp_rank, _width("attn_dp_size")),
        (config.pp_rank, config.pp_size),
        (config.attn_cp_rank, config.attn_cp_size),
        (config.tp_rank, config.tp_size),
    ):
        size = max(size, 1)
        index, count = index * size + min(rank, size - 1), count * size
    return engine_part(options, index, count)


def _width(name: str) -> int:
    """A width or rank of the engine; 0 where SGLang knows none."""
    try:
        return int(getattr(get_parallel(), name) or 0)
    except (AttributeError, RuntimeError, ValueError):
        return 0
