"""Code and settings that decide K and V and are not in vLLM's release. No engine runs here."""

import dataclasses
import importlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_engine import offloading_config
from packaging.requirements import Requirement
from torch import nn
from vllm import envs
from vllm.config import AttentionConfig, KernelConfig, LoRAConfig
from vllm.config.diffusion import DiffusionConfig
from vllm.config.mamba import MambaConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.platforms import current_platform

from kvtier.engines.vllm import engine_settings, model_code
from kvtier.engines.vllm.engine_settings import ENVIRONMENT, settings_files, settings_of
from kvtier.engines.vllm.model_code import ModelCode
from kvtier.engines.vllm.secondary import tier_namespace

pytestmark = pytest.mark.engine

SINCE_0_33 = pytest.mark.skipif(
    "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT" not in envs.environment_variables, reason="vLLM has these variables since 0.33"
)
TEXT = """
from torch import nn

FACTOR = {factor}


class Rope(nn.Module):
    def forward(self, x):
        return x * FACTOR


def rotate(x):
    return x
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    """A cache of digests for this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def pinned(monkeypatch) -> None:
    """A vLLM that requires the torch that is installed, as those that are published do."""
    required = Requirement(f"torch=={importlib.metadata.version('torch')}")
    monkeypatch.setattr(model_code, "_requirements", lambda: {"torch": required})


@pytest.fixture
def written(tmp_path, monkeypatch) -> Callable[..., Any]:
    """Writes a module of a package outside of vLLM and imports it anew."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(importlib.metadata, "packages_distributions", dict)  # takes half a second

    def write(package: str, factor: int = 1, module: str = "rope", helper: str = "") -> Any:
        folder = tmp_path / "site" / package
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").touch()
        (folder / "helper.py").write_text(helper)
        (folder / f"{module}.py").write_text(TEXT.format(factor=factor))
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        importlib.invalidate_caches()
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        return importlib.import_module(f"{package}.{module}")

    return write


def fields(model: nn.Module, *, processors: bool = False) -> dict[str, str]:
    return ModelCode.of([model], processors=processors).fields()


def around(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), *layers)


def test_a_model_of_vllm_alone_adds_nothing():
    assert fields(around()) == {}


@pytest.mark.parametrize("package", ["oot_rope", "transformers_modules"])
def test_the_text_of_a_class_outside_of_vllm_counts(written, package):
    one = fields(around(written(package, 1).Rope()))
    assert set(one) == {"code"}
    assert one == fields(around(written(package, 1).Rope()))
    assert one != fields(around(written(package, 2).Rope()))
    assert one != fields(around(written(package, 1, helper="changed = True").Rope()))


def test_what_a_layer_holds_counts(written):
    layer = nn.Identity()
    layer.rotate = written("oot_rope", 1).rotate
    assert set(fields(around(layer))) == {"code"}


def test_a_class_in_between_counts(written):
    derived = type("Derived", (written("oot_rope", 1).Rope,), {"__module__": "vllm.model_executor.models.llama"})
    assert set(fields(around(derived()))) == {"code"}


def test_a_plug_in_counts_by_its_text_whatever_it_patches(written, monkeypatch):
    entry = importlib.metadata.EntryPoint("patch", "oot_plugin.rope:rotate", model_code.PLUGINS[0])
    given = importlib.metadata.entry_points
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda **named: [entry] if named == {"group": model_code.PLUGINS[0]} else given(**named),
    )
    assert fields(around()) == {}, "it was not loaded by this process"
    found = []
    for factor in (1, 1, 2):
        written("oot_plugin", factor)
        found.append(fields(around())["code"])
    assert found[0] == found[1] != found[2]


def test_a_distribution_counts_by_its_release(written, monkeypatch):
    layer = written("oot_rope", 1).Rope()
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: {"oot_rope": ["oot-rope"]})
    given = importlib.metadata.version
    for version in ("1.2", "1.3+local"):
        monkeypatch.setattr(
            importlib.metadata, "version", lambda name, v=version: v if name == "oot-rope" else given(name)
        )
        assert fields(around(layer))["releases"] == f"oot-rope {version.partition('+')[0]}"


def test_classes_of_transformers_count_by_their_release():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    release = f"transformers {importlib.metadata.version('transformers')}"
    assert fields(around(LlamaRMSNorm(2))) == fields(around(), processors=True) == {"releases": release}


def test_a_torch_that_vllm_does_not_require_counts(monkeypatch):
    monkeypatch.setattr(model_code, "_requirements", dict)
    assert fields(around())["releases"].startswith("torch ")


def test_code_written_after_the_process_began_is_named(written):
    layer = written("oot_rope", 1).Rope()
    code = ModelCode.of([around(layer)], processors=False)
    assert any(path.endswith("rope.py") for path in code.written_since(time.time_ns() - 3600 * 10**9))
    assert code.written_since(time.time_ns() + 3600 * 10**9) == []


def test_code_that_was_replaced_with_its_times_kept_is_named(written):
    code = ModelCode.of([around(written("oot_rope", 1).Rope())], processors=False)
    (path,) = {Path(path) for path in code.written_since(0) if path.endswith("rope.py")}
    time.sleep(0.05)
    moment, about = time.time_ns(), path.stat()
    time.sleep(0.05)
    path.write_text(path.read_text() + "# another")
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert code.written_since(moment) == [str(path)]


# -- settings ----------------------------------------------------------------------------------------------------


def config(folder: Path, lora: LoRAConfig | None = None, **more: Any) -> Any:
    model = {
        "model": str(folder),
        "revision": None,
        "code_revision": None,
        "tokenizer": str(folder),
        "tokenizer_revision": None,
        "quantization": None,
        "quantization_config": None,
        "hf_config": SimpleNamespace(),
        "hf_overrides": {},
        "multimodal_config": None,
        "trust_remote_code": False,
    }
    load = SimpleNamespace(download_dir=None)
    return SimpleNamespace(model_config=SimpleNamespace(**model | more), load_config=load, lora_config=lora)


def images(**more: Any) -> Any:
    given = {"mm_processor_kwargs": None, "media_io_kwargs": {}, "mm_encoder_fp8_scale_path": None}
    return SimpleNamespace(**given | more)


def files(given: Any, *built: Any) -> list[str]:
    return sorted(name for source in settings_files(given, built) for name, _ in source.named())


def test_the_defaults_of_vllm_are_in_no_namespace(tmp_path, monkeypatch):
    for name in (*ENVIRONMENT, *engine_settings.LIBRARIES):
        monkeypatch.delenv(name, raising=False)
    assert settings_of(config(tmp_path)) == {}
    of_one_release = {
        *("VLLM_ROCM_USE_AITER_FP4_ASM_GEMM", "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT", "VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE")
    }
    assert set(ENVIRONMENT) - of_one_release <= set(envs.environment_variables), "each is a variable of this vLLM"


@pytest.mark.parametrize(
    ("name", "default", "other"),
    [
        ("VLLM_FLOAT32_MATMUL_PRECISION", "highest", "medium"),
        ("VLLM_CPU_INT4_W4A8", "1", "0"),
        ("VLLM_ROCM_USE_AITER", "False", "True"),
        ("VLLM_ROCM_FP8_MFMA_PAGE_ATTN", "0", "1"),
        pytest.param("VLLM_ROCM_MUSE_MOE_ONLINE_QUANT", "", "mxfp4", marks=SINCE_0_33),
        pytest.param("VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE", "fp32", "bf16", marks=SINCE_0_33),
        ("VLLM_SSM_CONV_STATE_LAYOUT", "SD", "DS"),
        ("VLLM_MLA_DISABLE", "0", "1"),
    ],
)
def test_a_variable_counts_unless_it_is_set_to_its_default(tmp_path, monkeypatch, name, default, other):
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "SD")
    monkeypatch.setenv(name, default)
    assert settings_of(config(tmp_path)) == {}
    monkeypatch.setenv(name, other)
    assert name in settings_of(config(tmp_path))["environment"]
    assert os.environ[name] == other


def test_the_fp8_of_a_gpu_counts_where_it_is_not_that_of_others(tmp_path, monkeypatch):
    """An MI300 reads the bits of an FP8 number as half of what an MI355 wrote."""
    monkeypatch.setattr(current_platform, "fp8_dtype", lambda: torch.float8_e4m3fnuz)
    assert settings_of(config(tmp_path)) == {"fp8": "float8_e4m3fnuz"}
    seen = tier_namespace(offloading_config({}), "weights", 4096).extra
    assert seen["fp8"] == "float8_e4m3fnuz"


def test_arguments_of_the_engine_count(tmp_path, monkeypatch):
    monkeypatch.delenv("VLLM_SSM_CONV_STATE_LAYOUT", raising=False)
    assert settings_of(config(tmp_path, multimodal_config=images())) == {}
    resized = images(mm_processor_kwargs={"size": 3})
    assert settings_of(config(tmp_path, multimodal_config=resized)) == {
        "multimodal": '{"mm_processor_kwargs": {"size": 3}}'
    }
    pruned = MultiModalConfig(video_pruning_rate=0.5, video_pruning_method="vidcom2")
    assert settings_of(config(tmp_path, multimodal_config=pruned)) == {
        "multimodal": '{"video_pruning_method": "vidcom2", "video_pruning_rate": 0.5}'
    }
    pruned.video_pruning_method = "evs"
    assert settings_of(config(tmp_path, multimodal_config=pruned)) == {"multimodal": '{"video_pruning_rate": 0.5}'}
    unused = MultiModalConfig(video_pruning_method="vidcom2")
    assert settings_of(config(tmp_path, multimodal_config=unused)) == {}
    assert set(settings_of(config(tmp_path, code_revision="v2", quantization_config={"bits": 4}))) == {
        "code_revision",
        "quantization_config",
    }


@pytest.mark.parametrize(
    "given", [{"target_modules": ["o_proj"]}, {"target_modules": []}, {"enable_tower_connector_lora": True}]
)
def test_what_of_an_adapter_is_used_counts(tmp_path, given):
    assert settings_of(config(tmp_path, LoRAConfig(max_lora_rank=32, max_loras=4))) == {}
    assert settings_of(config(tmp_path, LoRAConfig(**given))) == {"lora": json.dumps(given)}


@pytest.mark.parametrize(
    ("part", "of_model", "given"),
    [
        ("attention_config", AttentionConfig(), {"use_prefill_query_quantization": True}),
        ("attention_config", AttentionConfig(), {"disable_flashinfer_q_quantization": True}),
        ("kernel_config", KernelConfig(), {"linear_backend": "marlin", "moe_backend": "triton"}),
        ("kernel_config", KernelConfig(), {"linear_backend_per_quant": {"nvfp4": "marlin"}}),
        ("mamba_config", MambaConfig(), {"enable_stochastic_rounding": True}),
        ("diffusion_config", None, {"canvas_length": 32}),
    ],
)
def test_arguments_by_which_kernels_round_otherwise_count(tmp_path, part, of_model, given):
    seen = config(tmp_path)
    setattr(seen, part, of_model)
    assert settings_of(seen) == {}
    changed = copy(of_model) or DiffusionConfig()
    vars(changed).update(given)  # without the checks of this machine's platform
    setattr(seen, part, changed)
    assert json.loads(settings_of(seen)["arguments"]) == given


def test_a_secondary_tier_counts_what_the_engine_was_started_with(tmp_path):
    def of(engine: Any, ranks: int = 1) -> dict[str, str]:
        given = offloading_config({})
        given = dataclasses.replace(given, parallel=dataclasses.replace(given.parallel, dcp_size=ranks))
        return dict(tier_namespace(given, "weights", 4096, engine).extra)

    engine = config(tmp_path, LoRAConfig(target_modules=["o_proj"]))
    engine.parallel_config = SimpleNamespace(cp_kv_cache_interleave_size=16)
    assert of(engine) == of(None) | {"lora": '{"target_modules": ["o_proj"]}'}
    assert of(engine, 2) == of(None, 2) | of(engine) | {
        "decode_context_parallel_size": "2",
        "cp_kv_cache_interleave_size": "16",
    }


def fill(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "preprocessor_config.json", "tokenizer.json", "chat_template.json", "processing.py"):
        (folder / name).write_text("{}")
    return folder


def test_processors_count_for_multimodal_models_beside_all_that_was_loaded(tmp_path):
    one, audio = fill(tmp_path / "one"), fill(tmp_path / "audio")
    built = SimpleNamespace(
        secondary_weights=[SimpleNamespace(model_or_path=str(audio), revision=None, subfolder=None, prefix="audio.")]
    )
    assert files(config(one), built) == []
    known = ["0 processor/preprocessor_config.json", "model processor/preprocessor_config.json"]
    assert files(config(one, multimodal_config=images()), built) == known
    trusting = files(config(one, multimodal_config=images(), trust_remote_code=True), built)
    assert trusting == [*known[:1], "0 processor/processing.py", *known[1:], "model processor/processing.py"]


def test_a_quantisation_counts_where_the_configuration_of_the_model_has_none(tmp_path):
    one = fill(tmp_path / "one")
    (one / "quantize_config.json").write_text("{}")
    assert files(config(one)) == []
    assert files(config(one, quantization="gptq")) == ["quantization/quantize_config.json"]
    named = SimpleNamespace(quantization_config={"bits": 4})
    assert files(config(one, quantization="gptq", hf_config=named)) == []
    assert files(config(one, quantization="modelopt_mixed", hf_config=named)) == ["quantization/quantize_config.json"]


def test_scales_in_a_file_that_an_argument_names_count(tmp_path):
    scales = tmp_path / "scales.json"
    scales.write_text("{}")
    given = config(fill(tmp_path / "one"), multimodal_config=images(mm_encoder_fp8_scale_path=str(scales)))
    assert "mm_encoder_fp8_scale_path/scales.json" in files(given)
    overrides = {"quantization_config_file": str(scales)}
    assert files(config(tmp_path / "one", hf_overrides=overrides)) == ["quantization_config_file/scales.json"]
