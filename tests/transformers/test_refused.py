"""What is not supported is refused by its name, before anything is stored."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from support_transformers import (
    VOCABULARY,
    content,
    gemma,
    llama,
    needs_transformers,
    new_cache,
    prefill,
    prompt,
    stack,
)

from kvtier.engines.transformers import AsyncPrefixCache, PrefixCache
from kvtier.engines.transformers.compat import CACHE_ARGUMENTS, cache_classes
from kvtier.errors import ConfigError, UsageError

pytestmark = needs_transformers


def rope(kind: str) -> Any:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}
    scaling = {"rope_type": kind, "factor": 2.0} | (factors if kind == "longrope" else {})
    return llama(rope_scaling=scaling, max_position_embeddings=128)


def on_two_devices() -> Any:
    """A model whose second layer hands its cache to another device."""
    model = llama()
    attention = model.model.layers[1].self_attn
    forward = attention.forward

    def elsewhere(*args: Any, **more: Any) -> Any:
        result = forward(*args, **more)
        layer = next(more[name] for name in CACHE_ARGUMENTS if name in more).layers[1]
        layer.keys, layer.values = layer.keys.to("meta"), layer.values.to("meta")
        return result

    attention.forward = elsewhere
    return model


def of_type(dtype: torch.dtype) -> Any:
    return llama().to(dtype)


def with_meta_weight() -> Any:
    """A model one of whose weights is offloaded."""
    model = llama()
    model.register_buffer("offloaded", torch.empty(3, device="meta"))
    return model


def with_layer_types(kind: str) -> Any:
    model = llama()
    model.config.layer_types = ["full_attention", kind]
    return model


def encoder_decoder() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    shape = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, **shape)).eval()


def mamba() -> Any:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1)).eval()


MODELS = {
    "training mode": (lambda: llama().train(), r"training mode.*model\.eval\(\)"),
    "dynamic rope": (lambda: rope("dynamic"), "rope type 'dynamic'"),
    "long rope": (lambda: rope("longrope"), "rope type 'longrope'"),
    "linear attention": (lambda: with_layer_types("linear_attention"), "layers of type linear_attention"),
    "encoder-decoder": (encoder_decoder, "T5ForConditionalGeneration is an encoder-decoder"),
    "state space model": (mamba, "MambaForCausalLM"),
    "two devices": (on_two_devices, "on one device, it is torch.float32 on cpu, torch.float32 on meta"),
    "another type": (lambda: of_type(torch.float64), "a KV cache of torch.float64 is not supported"),
    "offloaded weights": (with_meta_weight, "weights: cannot see the bytes of offloaded"),
}


@pytest.mark.parametrize("model", MODELS)
async def test_a_model_that_is_not_supported_is_refused_by_name(model: str) -> None:
    make, message = MODELS[model]
    prefixes = AsyncPrefixCache(stack(), make())
    with pytest.raises(ConfigError, match=message):
        await prefixes.open()
    await prefixes.close()


async def test_weights_that_cannot_be_seen_can_be_named() -> None:
    async with AsyncPrefixCache(stack(), with_meta_weight(), weights="commit 4711") as prefixes:
        assert (await prefixes.restore(prompt(64)))[1] == 0


def batch(prefixes: AsyncPrefixCache) -> Any:
    cache = content(prompt(40), prefixes.kv)
    cache.batch_repeat_interleave(2)
    return cache


def cache_of(model: Any, **more: Any) -> Any:
    cache = new_cache(**more)
    prefill(model, prompt(40), cache)
    return cache


def static_cache(prefixes: AsyncPrefixCache) -> Any:
    from transformers import StaticCache

    return StaticCache(config=llama().config, max_cache_len=64)


def shorter_layer(prefixes: AsyncPrefixCache) -> Any:
    cache = content(prompt(40), prefixes.kv)
    cache.layers[1].keys = cache.layers[1].keys[:, :, :39]
    return cache


def longer(prefixes: AsyncPrefixCache) -> Any:
    return content(prompt(41), prefixes.kv)


CACHES = {
    "a batch": (batch, "batch of 2; only batches of 1"),
    "a static cache": (static_cache, "a DynamicCache is needed, not StaticCache"),
    "tensors": (lambda _: [(torch.zeros(1), torch.zeros(1))], "a DynamicCache is needed, not list"),
    "another model's layers": (lambda _: cache_of(llama(num_hidden_layers=3)), "has 3 layers, the model's has 2"),
    "another model's heads": (lambda _: cache_of(llama(num_key_value_heads=4)), "layer 0 of the cache is"),
    "another type": (lambda _: cache_of(llama(dtype=torch.bfloat16)), "layer 0 of the cache is .*bfloat16"),
    "layers of unequal length": (shorter_layer, "layer 1 of the cache is"),
    "more tokens than named": (longer, "holds 41 tokens, but only 40 are named"),
    "sliding windows": (
        lambda _: cache_of(gemma(), config=gemma().config),
        "layer 0 of the cache is a DynamicSlidingWindowLayer, which forgets.*`restore` returns",
    ),
}


@pytest.mark.parametrize("cache", CACHES)
async def test_a_cache_that_does_not_fit_is_refused_and_nothing_is_stored(cache: str) -> None:
    make, message = CACHES[cache]
    async with AsyncPrefixCache(stack(), llama()) as prefixes:
        with pytest.raises(UsageError, match=message):
            await prefixes.save(prompt(40), make(prefixes))
        assert prefixes.stats().tiers["cpu"].stored == 0


@pytest.mark.parametrize("size", [0, -1, 4097])
def test_a_block_size_out_of_range_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match="block_size: must be between 1 and 4096"):
        PrefixCache("stack.yaml", None, size)  # type: ignore[arg-type]


async def test_a_stack_file_that_is_missing_or_wrong_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        await AsyncPrefixCache(tmp_path / "nowhere.yaml", llama()).open()
    (tmp_path / "wrong.yaml").write_text("tiers: [{type: cpu}]")
    with pytest.raises(ConfigError, match=r"tiers\[0\].cpu_bytes_to_use"):
        await AsyncPrefixCache(str(tmp_path / "wrong.yaml"), llama()).open()


async def test_calls_before_opening_and_after_closing_are_refused() -> None:
    prefixes = AsyncPrefixCache(stack(), llama())
    for _ in range(2):
        with pytest.raises(UsageError, match="not open"):
            await prefixes.restore([1, 2, 3])
        await prefixes.close()
    await prefixes.open()
    with pytest.raises(UsageError, match="opened once"):
        await prefixes.open()
    await prefixes.close()
    await prefixes.close()
    with pytest.raises(UsageError, match="closed"):
        await prefixes.restore(prompt(40))
    with pytest.raises(UsageError, match="closed"):
        await prefixes.save(prompt(40), content(prompt(40), prefixes.kv))


class OldCache:
    """A DynamicCache as it was before it had layers."""

    def __init__(self) -> None:
        self.key_cache: list[torch.Tensor] = []
        self.value_cache: list[torch.Tensor] = []


class LazyCache:
    """A DynamicCache of the short time in which it had layers and took no config."""


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({}, "has no DynamicCache"),
        ({"DynamicCache": OldCache}, "keeps its KV tensors in key_cache and value_cache, not in layers"),
        (
            {"DynamicCache": LazyCache, "DynamicLayer": object, "DynamicSlidingWindowLayer": object},
            "makes no DynamicCache from a model's config",
        ),
    ],
)
def test_another_generation_of_transformers_is_refused(
    names: dict[str, type], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("transformers.cache_utils")
    module.__dict__.update(names)
    monkeypatch.setitem(sys.modules, "transformers.cache_utils", module)
    with pytest.raises(
        ConfigError, match=rf"needs transformers 4\.56 or newer: the installed transformers .* {message}"
    ):
        cache_classes()


def test_without_transformers_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.cache_utils", None)
    with pytest.raises(ConfigError, match=r"needs transformers 4\.56 or newer: .*pip install 'kvtier\[transformers\]'"):
        cache_classes()
