"""Small random models of transformers, stacks for them, and caches whose every byte names its tokens."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support_stack import fs

from kvtier.config import StackConfig, parse_stack
from kvtier.engines.transformers import cache_argument
from kvtier.engines.transformers.model import ModelKV

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers is not installed; it comes with the extras `test` and `transformers`",
)

VOCABULARY = 97


def llama(seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """A Llama of two layers, 256 bytes of KV a token in float32, whose outputs differ between prompts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings = shape | {"num_key_value_heads": 2, "vocab_size": VOCABULARY, "initializer_range": 0.3} | config
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**settings)).to(dtype).eval()


def gemma(seed: int = 0) -> Any:
    """A hybrid Gemma 3: five layers with a window of 32 tokens for each with full attention."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 7, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCABULARY, "sliding_window": 32}
    torch.manual_seed(seed)
    return Gemma3ForCausalLM(Gemma3TextConfig(**shape, **more)).eval()


def new_cache(**more: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(**more)


def stack(root: Path | None = None, cpu: str = "4MiB", capacity: int = 32 << 20, **top: object) -> StackConfig:
    """A CPU tier, and an fs tier below it when a folder is given."""
    tiers = [{"type": "cpu", "cpu_bytes_to_use": cpu, "huge_pages": "false"}]
    if root is not None:
        tiers.append(fs(root, capacity=capacity))
    lines = [f"{key}: {value}" for key, value in top.items()] + ["tiers:"]
    for tier in tiers:
        lines += [f"  {'-' if i == 0 else ' '} {key}: {value}" for i, (key, value) in enumerate(tier.items())]
    return parse_stack("\n".join(lines))


def prompt(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def forward(model: Any, tokens: Sequence[int], cache: Any) -> torch.Tensor:
    """Logits of tokens that follow those in the cache, by whichever name the model takes it."""
    inputs = {"input_ids": torch.tensor([tokens], device=model.device), cache_argument(model): cache}
    return model(**inputs).logits


def prefill(model: Any, tokens: Sequence[int], cache: Any) -> torch.Tensor:
    """Logits of the tokens that the cache lacks; it holds all of them afterwards."""
    held = cache.get_seq_length()
    with torch.no_grad():
        return forward(model, tokens[held:], cache)


def first_tokens(cache: Any, count: int) -> Any:
    """A cache of its own with the first tokens of another, made without kvtier."""
    cut = new_cache()
    for index, layer in enumerate(cache.layers):
        cut.update(layer.keys[:, :, :count].clone(), layer.values[:, :, :count].clone(), index)
    return cut


def same_bytes(cache: Any, other: Any) -> bool:
    """True when two caches hold the same tokens with the same bits, NaNs among them."""
    tensors = [[each for layer in one.layers for each in (layer.keys, layer.values)] for one in (cache, other)]
    return len(tensors[0]) == len(tensors[1]) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
        for a, b in zip(*tensors, strict=True)
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def content(tokens: Sequence[int], kv: ModelKV, salt: bytes = b"", generation: int = 0) -> Any:
    """A cache without a model: what it holds of a token is a function of all tokens up to it, layer, K or V, and
    salt."""
    hasher = hashlib.sha256(salt + generation.to_bytes(4, "big"))
    owners = []
    for token in tokens:
        hasher.update(token.to_bytes(8, "big"))
        owners.append(int.from_bytes(hasher.digest()[:8], "big"))
    cache = new_cache()
    for index, layer in enumerate(kv.layers):
        pair = []
        for which, (heads, dim) in enumerate(layer):
            size = heads * dim * kv.dtype.itemsize
            words = np.arange(-(-size // 8), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(
                2 * index + which
            )
            rows = (np.array(owners, np.uint64)[:, None] ^ words[None, :]).view(np.uint8)[:, :size]
            tensor = torch.from_numpy(np.ascontiguousarray(rows)).view(kv.dtype).view(len(tokens), heads, dim)
            pair.append(tensor.transpose(0, 1).unsqueeze(0))
        cache.update(pair[0], pair[1], index)
    return cache
