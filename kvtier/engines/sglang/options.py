"""Options from SGLang's configuration and the share of a rank.

Of the keys of `--hicache-storage-backend-extra-config` SGLang's own pass, and kvtier's are strict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.runtime_context import get_parallel

from kvtier.engines.engine_memory.options import ServiceOptions, engine_part, read_identified, read_service
from kvtier.engines.sglang.compat import RELEASE
from kvtier.errors import ConfigError
from kvtier.options import Seconds, SharedTierOptions

SGLANG_KEYS = frozenset(
    {
        "allocator",
        "backend_name",
        "class_name",
        "hicache_storage_pass_prefix_keys",
        "interface_v1",
        "module_path",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "storage_backend_tag",
        "tp_lcm_size",
    }
)
"""Read by SGLang itself, some of them before a backend sees the configuration."""
CALL_SECONDS_MAX = 8.0
"""SGLang gives its threads ten seconds to end at a flush or a detach, and fails if one waits in a call for longer."""


class HiCacheOptions(ServiceOptions):
    """The keys beside those of the tier."""

    job_timeout_seconds: Seconds = Field(
        default=5.0, description="after this one transfer of a few pages counts as an error of the tier"
    )
    lookup_timeout_seconds: Seconds = Field(
        default=1.0, le=CALL_SECONDS_MAX, description="how long a lookup waits for a shared tier"
    )
    load_timeout_seconds: Seconds = Field(
        default=2.0, le=CALL_SECONDS_MAX, description="how long one prefetch call of up to 128 pages may take"
    )
    store_timeout_seconds: Seconds = Field(
        default=CALL_SECONDS_MAX,
        le=CALL_SECONDS_MAX,
        description="how long one backup call of up to 128 pages may take",
    )


def hicache_options(extra_config: Mapping[str, Any] | None) -> HiCacheOptions:
    """kvtier's options among the keys of SGLang's configuration. Raises ConfigError as `read_identified` does."""
    given = dict(extra_config or {})
    if not given.get("interface_v1"):
        reason = "must be 1: without it SGLang copies each page twice and hides which one failed"
        raise ConfigError(reason, f"{RELEASE.options}.interface_v1")
    own = {key: value for key, value in given.items() if key not in SGLANG_KEYS}
    return (read_service if own.get("service") else read_identified)(HiCacheOptions, own, RELEASE)


RANKS = ("tp_rank", "pp_rank", "attn_cp_rank")
"""Ranks whose pages differ. At a service they are in the keys: all ranks have one namespace there."""


def rank_key(config: HiCacheStorageConfig, options: HiCacheOptions) -> bytes:
    """The end of this rank's keys at a service; empty elsewhere, and where all ranks have the same pages."""
    if not options.service or config.tp_size * config.pp_size * config.attn_cp_size == 1:
        return b""
    ranks = [0 if name == "tp_rank" and config.is_mla_model else getattr(config, name) for name in RANKS]
    return b"".join(rank.to_bytes(4, "big") for rank in ranks)


def rank_options(config: HiCacheStorageConfig, options: HiCacheOptions) -> HiCacheOptions:
    """This rank's share of the tier: folders of its own where a folder belongs to one process.

    Raises ConfigError for a tier of one process whose pages other ranks are to load.
    """
    if options.service:
        return options
    copies = config.tp_size // config.dcp_size if config.is_mla_model else 1
    if copies > 1 and not isinstance(options, SharedTierOptions):
        raise ConfigError(
            f"is {options.type}, which belongs to one process; with MLA one of {config.tp_size} ranks stores and all "
            "load: write shared_fs or a remote tier",
            f"{RELEASE.options}.type",
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
    """A width or rank of the engine; 0 where SGLang has none."""
    try:
        return int(getattr(get_parallel(), name) or 0)
    except (AttributeError, RuntimeError, ValueError):
        return 0
