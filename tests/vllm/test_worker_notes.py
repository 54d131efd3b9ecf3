"""What a worker notes of an engine's configuration and layers, with vLLM's own classes of both. No engine runs here."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import CacheConfig
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator

from kvtier.engines.vllm import identity
from kvtier.types.geometry import GroupLayout, KVLayout, TensorRef

pytestmark = pytest.mark.engine

LAYOUT = KVLayout((GroupLayout((TensorRef(0, 4096),), 16),))
Note = Callable[..., dict[str, Any]]


class Mixer(nn.Module):
    """A recurrent layer, as far as a note is about it. Like vLLM's it holds configurations, and not their values."""

    def __init__(self, model: Any, cache: CacheConfig) -> None:
        super().__init__()
        self.model_config, self.cache_config = model, cache

    def get_kv_cache_spec(self) -> None: ...

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        cache = self.cache_config
        return MambaStateDtypeCalculator.mamba2_state_dtype(
            self.model_config.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
        )

    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_name=lambda: "MAMBA2")


@pytest.fixture
def note(monkeypatch) -> Note:
    """The fields that an engine with these options notes."""
    monkeypatch.setattr(identity, "weight_files", lambda config, models: None)
    monkeypatch.setattr(identity, "beside_weights", lambda config, models, files: {})
    monkeypatch.setattr(identity, "_computing_modules", lambda models: [])
    monkeypatch.setattr(identity, "started_at", lambda: 0)

    def read(dtype: torch.dtype = torch.bfloat16, **cache: Any) -> dict[str, Any]:
        options = CacheConfig(block_size=16, **cache)
        model = SimpleNamespace(hf_config=SimpleNamespace(to_dict=dict), dtype=dtype, architectures=["Own"])
        for name in ("revision", "quantization", "quantization_config", "code_revision", "multimodal_config"):
            setattr(model, name, None)
        config = SimpleNamespace(
            model_config=model,
            cache_config=options,
            load_config=SimpleNamespace(load_format="auto"),
            lora_config=None,
            compilation_config=SimpleNamespace(static_forward_context={"0.mixer": Mixer(model, options)}),
        )
        monkeypatch.setattr(identity, "get_current_vllm_config_or_none", lambda: config)
        found: dict[str, Any] = json.loads(identity.worker_note(LAYOUT, []))
        return found

    return read


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"mamba_ssm_cache_dtype": "float16"}, {}),
        ({"mamba_cache_dtype": "float16"}, {}),
        ({"mamba_cache_dtype": "float16"}, {"mamba_ssm_cache_dtype": "float16"}),
        ({"cache_dtype": "fp8", "dtype": torch.float16}, {"cache_dtype": "fp8", "dtype": torch.bfloat16}),
    ],
)
def test_states_of_other_types_and_one_size_have_other_notes(note, one, other):
    assert note(**one) != note(**other)


@pytest.mark.parametrize("more", [{}, {"mamba_ssm_cache_dtype": "float32"}, {"mamba_cache_dtype": "bfloat16"}])
def test_states_as_models_have_them_add_no_field(note, more):
    """So that what was stored before stays theirs; states of float32 are longer."""
    assert "states" not in note(**more)
