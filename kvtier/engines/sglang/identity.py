"""The identity of SGLang's KV pages: what the server was started with, and the files that only it names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import reduce
from pathlib import Path
from typing import Any

from sglang.srt import runtime_context
from sglang.srt.arg_groups import arg_utils
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.server_args import ServerArgs

from kvtier.engines.digests import WEIGHTS, ContentDigests
from kvtier.engines.fingerprint import settings_text
from kvtier.engines.sglang.compat import RELEASE
from kvtier.engines.sglang.options import RANKS, HiCacheOptions
from kvtier.engines.sglang.pools import HostPool
from kvtier.types.geometry import GroupKind, GroupLayout, KVLayout
from kvtier.types.namespace import Namespace

NOT_IN_NAMESPACE = ("model_name", "dp_rank", "enable_storage_metrics", "extra_config")
"""Fields of the configuration that are elsewhere in the namespace, or that do not change a page's bytes."""
MAIN_POOL = "kv"
DRAFT_MODEL = "speculative_draft_model_path"
MODEL_FILES = (*WEIGHTS, "*.json")
AREAS = ("model", "mm", "exec.kernel", "exec.moe", "exec.mamba", "exec.deterministic", "exec.dllm")
"""Areas of SGLang's arguments of which each one that is not named below counts where it is not at its default: also
those of the next release."""
ALSO = (
    *("enable_tf32_matmul", "enable_encoder_swa_bounded_replay", "enable_decoder_swa_bounded_replay"),
    *("enable_quant_communications", "lora_target_modules", "experts_shared_outer_loras"),
    *(DRAFT_MODEL, "speculative_algorithm", "speculative_draft_model_revision", "speculative_draft_model_quantization"),
    *("speculative_draft_kv_cache_dtype", "speculative_draft_window_size", "speculative_draft_sink_size"),
    *("speculative_enable_w4a4_mxfp4_megamoe", "uno_lora_path"),
)
"""Arguments of other areas that count."""
HARMLESS = re.compile(
    # elsewhere in the namespace
    "model_path|kv_cache_dtype|"
    # how weights come, and whence
    "trust_remote_code|model_loader_extra_config|startup_weight_load_mode|download_dir|model_checksum|"
    "(weight_loader|remote_instance|weight_cache|modelexpress|checkpoint_engine|engine_info)_.*|"
    "delete_ckpt_after_loading|modelopt_checkpoint_save_path|modelopt_export_path|"
    # where images come from, and how fast
    "enable_broadcast_mm_inputs_process|mm_(processor|io)_worker_num|allowed_media_domains|media_url_.*|"
    "mm_preprocess_cache_size_mb|limit_mm_data_per_request|.*mm_global_cache.*|mm_feature_transport|"
    "enable_prefix_mm_cache|mm_enable_dp_encoder|"
    # how tokens are drawn, how kernels are tuned
    "sampling_backend|grammar_backend|.*flashinfer_autotune.*|triton_attention_(num_kv_splits|split_tile_size)|"
    # where experts are, and by which way tokens come to them
    "moe_a2a_backend|deepep_(v2_)?mode|fuseep_mode|"
    "e?p_.*|enable_eplb|eplb_.*|.*elastic_e.*|init_expert_location|expert_(distribution|balancedness)_.*|deepep_config|"
    "mooncake_ib_device|enable_waterfill|.*paged_experts.*|kt_(cpuinfer|threadpool_count)|"
    # which states are kept
    "mamba_(max_states_per_path|radix_cache_strategy|track_interval)|uses_mamba_radix_cache|int8_mamba_ckpt_size"
)
"""Arguments of these areas that do not change a page's bytes, or change them where the namespace shows it."""
VARIABLES = re.compile(
    "(SGLANG|SGL|FLASHINFER|USE|DEEP|DEEPEP|NVIDIA|TORCH|ONEDNN|VLLM)_.*"
    "(FP[0-9]|MXFP|NVFP|BF16|F16|F?FP32|TF32|INT[48]|W[48]A|QUANT|DTYPE|4OVER6|DOWNCAST|MARLIN|FPMATH|ROPE|AITER|SAGE|"
    "SKIP_SOFTMAX|_DENSE|SPARSE|KVCACHE|KV_CACHE_LAYOUT|DETERMINISTIC|_EXPERTS|EXTERNAL).*"
)
"""Names of variables that round to fewer bits, choose kernels that do, change what attends to what, or bring code."""


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

    Takes as long as reading the weights if `model_folder` names them, the first time, adapters and a draft model.
    Raises ConfigError for a folder without weights.
    """
    known = {field.name: str(getattr(config, field.name)) for field in fields(config)}
    for name in (*NOT_IN_NAMESPACE, *(RANKS if options.service else ("tp_rank",) if config.is_mla_model else ())):
        del known[name]
    return Namespace(
        layout=layout_of(pools),
        model=config.model_name or "",
        weights=options.weights_digest(RELEASE.options),
        dtype=pools[0].dtype.removeprefix("torch."),
        hash_algorithm="sglang page chain",
        tag=options.namespace,
        extra={
            **known,
            "engine": f"sglang {RELEASE.version}",
            **(_of_server() if _is_server() else {}),
            "kv_cache_dtype": str(_argument("kv_cache_dtype")) if _is_server() else "",
            "pools": ";".join(f"{pool.name},{pool.layout},{pool.dtype},{pool.page_size}" for pool in pools),
        },
    )


def _is_server() -> bool:
    """False for a controller without a server: nothing was published."""
    try:
        return isinstance(runtime_context.get_server_args(), ServerArgs)
    except ValueError:
        return False


def _of_server() -> dict[str, str]:
    """Arguments and variables that are not at their defaults, and the contents of files that only the server names, as
    fields of the namespace, each only where there are such."""
    settings = dict(_computing()) | {name: value for name, value in os.environ.items() if VARIABLES.fullmatch(name)}
    files = {
        "adapters": [each for lora in _argument("lora_paths") or () for each in _files(lora.lora_id, lora.lora_path)]
    }
    if draft := list(_files("draft", settings.get(DRAFT_MODEL) or "")):
        del settings[DRAFT_MODEL]  # the place on this host
        files["draft"] = draft
    found = {name: ContentDigests().content(named).digest for name, named in files.items() if named}
    return found | ({"settings": settings_text(settings)} if settings else {})


def _computing() -> Iterator[tuple[str, Any]]:
    """The arguments that count, where they are not at their defaults."""
    areas = arg_utils.namespace_of(ServerArgs)
    for field in arg_utils.record_fields(ServerArgs):
        counts = areas.get(field.name) in AREAS and not HARMLESS.fullmatch(field.name)
        default = arg_utils.with_fallback(ServerArgs, field.name, field.default)
        if (counts or field.name in ALSO) and (value := _argument(field.name)) != default:
            yield field.name, value


def _argument(name: str) -> Any:
    """The value of an argument, as SGLang resolved it."""
    first, *rest = arg_utils.namespace_of(ServerArgs)[name].split(".")
    bag = getattr(runtime_context, f"get_{first}")()
    return getattr(reduce(getattr, rest, bag), name)


def _files(named: str, folder: str) -> Iterator[tuple[str, Path]]:
    """The files of a model in a folder of this host by their names; none where SGLang loads it from elsewhere."""
    for pattern in MODEL_FILES:
        for file in Path(folder).glob(pattern) if folder else ():
            yield f"{named}/{file.name}", file
