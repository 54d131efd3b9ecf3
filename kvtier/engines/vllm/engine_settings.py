"""Settings of an engine that decide K and V and that neither the model's configuration nor its weights show.

Each is in the namespace only where it is another than vLLM's default, or where its file is there.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm import envs
from vllm.config import ModelConfig, VllmConfig
from vllm.platforms import current_platform

from kvtier.engines.fingerprint import settings_text, short_text
from kvtier.engines.vllm.weight_files import FileSource, find_place, secondary_sources
from kvtier.types.dtypes import canonical_dtype

ENVIRONMENT = (
    # Activations, weights or sums are rounded to fewer bits.
    "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_USE_F16_ACCUM",
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_XPU_INC_WNA16_BACKEND",
    "VLLM_USE_DEEP_GEMM_E8M0",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH",
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",
    "VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD",
    "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",
    "VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16",
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4",
    "VLLM_ROCM_USE_AITER_MOE_SITUV2",
    "VLLM_ROCM_USE_AITER_FP4_ASM_GEMM",
    "VLLM_ROCM_USE_AITER_FP4BMM",
    "VLLM_ROCM_USE_AITER_FP8BMM",
    "VLLM_ROCM_FP8_MFMA_PAGE_ATTN",
    "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT",
    "VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE",
    # Other kernels, of which some quantise, or sum in an order that does not hang on the batch.
    "VLLM_ROCM_USE_AITER",
    "VLLM_BATCH_INVARIANT",
    "VLLM_DISABLED_KERNELS",
    # The order of the values inside a page.
    "VLLM_SSM_CONV_STATE_LAYOUT",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",
    # Latent attention, or keys and values of each head.
    "VLLM_MLA_DISABLE",
    # Experts that no router chose.
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
    # What frames of a video the model gets.
    "VLLM_VIDEO_LOADER_BACKEND",
)
"""Variables of vLLM that decide K or V. What decides the speed alone is not here, nor what another
field of the namespace shows: the attention backend, the layout of the KV cache, the groups."""
CHOSEN = {"VLLM_SSM_CONV_STATE_LAYOUT": "SD"}
"""What vLLM does without a variable whose default is None, where a platform of vLLM may set it to the same."""
LIBRARIES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE")
"""Variables of the libraries below that have products of float32 computed with fewer bits; unset by default."""
MULTIMODAL = ("mm_processor_kwargs", "media_io_kwargs", "mm_encoder_attn_dtype", "video_pruning_rate")
"""Of the configuration of images, sound and video: what changes that which the model computes with."""
PRUNING = "evs"
"""The method of vLLM where none is given."""
ARGUMENTS = {
    "attention_config": ("use_prefill_query_quantization", "disable_flashinfer_q_quantization"),
    "kernel_config": ("moe_backend", "linear_backend", "linear_backend_per_quant"),
    "mamba_config": ("enable_stochastic_rounding",),
    "diffusion_config": ("canvas_length", "max_denoising_steps"),
}
"""Arguments by their configuration that decide to how many bits a kernel rounds what it computes with, and what a model
that denoises computes a block from."""
UNSET = (None, False, "auto")
"""vLLM's defaults of these arguments and of those of LoRA."""
LORA = ("target_modules", "enable_tower_connector_lora", "enable_moe_shared_loras")
"""Of the configuration of LoRA: which modules an adapter's files change, and how they are read. Keys hold the files."""
PROCESSORS = ("*processor*.json", "*feature_extractor*.json", "tekken.json", "*.mvn")
"""Files that say how images, sound and video become what a model computes with. A request's key holds the picture."""
QUANTIZATIONS = ("*quant*.json", "adapter_config.json")
"""Files in which vLLM looks for a quantisation that the model's configuration does not name."""


def settings_of(config: VllmConfig) -> dict[str, str]:
    """The settings as fields of the namespace."""
    model = config.model_config
    found = environment_of()
    if model.quantization_config is not None:
        found["quantization_config"] = short_text(repr(model.quantization_config))
    if model.code_revision is not None:
        found["code_revision"] = str(model.code_revision)
    if model.multimodal_config is not None:
        given = {name: value for name in MULTIMODAL if (value := getattr(model.multimodal_config, name, None))}
        method = getattr(model.multimodal_config, "video_pruning_method", PRUNING)
        if "video_pruning_rate" in given and method != PRUNING:
            given["video_pruning_method"] = method
        if given:
            found["multimodal"] = settings_text(given)
    if given := _given(config.lora_config, LORA):
        found["lora"] = settings_text(given)
    given = {}
    for part, names in ARGUMENTS.items():
        given |= _given(getattr(config, part, None), names)
    return found | ({"arguments": settings_text(given)} if given else {})


def _given(config: Any, names: Sequence[str]) -> dict[str, Any]:
    """The settings of one configuration that are not at vLLM's defaults."""
    values = {name: getattr(config, name, None) for name in names}
    return {name: value for name, value in values.items() if value not in UNSET}


def environment_of() -> dict[str, str]:
    """The variables that are not at their defaults, and the platform's FP8 where it is not the usual one, as fields of
    the namespace."""
    found: dict[str, object] = {name: os.environ[name] for name in LIBRARIES if os.environ.get(name)}
    for name in ENVIRONMENT:
        read = envs.environment_variables.get(name)
        if read is not None and name in os.environ and (value := read()) != _default(name, read):
            found[name] = value
    fields = {"environment": settings_text(found)} if found else {}
    fp8 = current_platform.fp8_dtype()
    return fields if fp8 == torch.float8_e4m3fn else fields | {"fp8": canonical_dtype(str(fp8))}


def _default(name: str, read: Callable[[], object]) -> object:
    """The default of a variable in this release of vLLM."""
    given = os.environ.pop(name)
    try:
        return CHOSEN.get(name, read())
    finally:
        os.environ[name] = given


def settings_files(config: VllmConfig, built: Sequence[nn.Module]) -> list[FileSource]:
    """The files of settings: processors of a multimodal model beside everything it was loaded from, scales, and a
    quantisation that a file of its own describes."""
    model, download_dir = config.model_config, config.load_config.download_dir
    found = [FileSource(name, path, ()) for name, path in _scales(model)]
    folders = [("model", find_place(model.model, model.revision, download_dir))]
    if model.quantization and not _names_quantization(model):
        found += [FileSource("quantization", folder, QUANTIZATIONS) for _, folder in folders]
    if model.multimodal_config is not None:
        if model.tokenizer not in (None, model.model):  # it holds the processor of some models
            folders.append(("tokenizer", find_place(model.tokenizer, model.tokenizer_revision, download_dir)))
        for number, given in enumerate(secondary_sources(built)):
            place = find_place(given.model_or_path, given.revision, download_dir)
            folders.append((f"{number}", str(Path(place, given.subfolder or ""))))
        patterns = (*PROCESSORS, "*.py") if model.trust_remote_code else PROCESSORS
        found += [FileSource(f"{name} processor", folder, patterns) for name, folder in folders]
    return [source for source in found if source.place and (Path(source.place).is_dir() or not source.patterns)]


def _scales(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Files of scales that an argument of the engine names."""
    path = getattr(model.multimodal_config, "mm_encoder_fp8_scale_path", None)
    if path:
        yield "mm_encoder_fp8_scale_path", path
    overrides = model.hf_overrides if isinstance(model.hf_overrides, dict) else {}
    if path := overrides.get("quantization_config_file"):
        yield "quantization_config_file", str(path)


def _names_quantization(model: ModelConfig) -> bool:
    """True if vLLM reads the quantisation from the model's configuration, and looks for no other file."""
    configs = (model.hf_config, getattr(model.hf_config, "text_config", None))
    given = [getattr(config, "quantization_config", None) for config in configs]
    given.append(getattr(model.hf_config, "compression_config", None))
    first = next((each for each in given if each is not None), None)
    return first is not None and (model.quantization != "modelopt_mixed" or "quantized_layers" in first)
