"""The keys of `--hicache-storage-backend-extra-config`: SGLang's own, which pass, and kvtier's, which are strict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from kvtier.engines.engine_memory.options import read_options
from kvtier.engines.model_identity import IdentifiedOptions
from kvtier.errors import ConfigError
from kvtier.options import Seconds

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
AT = "hicache_storage_backend_extra_config"
CALL_SECONDS_MAX = 8.0
"""SGLang gives its threads ten seconds to end at a flush or a detach, and fails if one waits in a call for longer."""


class HiCacheOptions(IdentifiedOptions):
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
    """kvtier's options among the keys of SGLang's configuration. `type` is that of the tier, `fs` when absent.

    Raises ConfigError with one line for each thing that is wrong.
    """
    given = dict(extra_config or {})
    if not given.get("interface_v1"):
        raise ConfigError(
            "must be 1: without it SGLang copies each page twice and hides which one failed", _at("interface_v1")
        )
    keys = {key: value for key, value in given.items() if key not in SGLANG_KEYS}
    backend = keys.pop("type", "fs")
    if not isinstance(backend, str):
        raise ConfigError("is the name of a type of tier, such as fs", _at("type"))
    options = read_options(HiCacheOptions, backend, keys, AT)
    options.require_identity("SGLang", AT)
    return options


def _at(key: str) -> str:
    return f"{AT}.{key}"
