"""The shape of a model's KV cache, found by running the model on one token, and what identifies its bytes.

A block of tokens is named by a hash over it and everything before it:

    root    = SHA-256("kvtier/transformers/1" + SHA-256(salt))
    block i = SHA-256(block i - 1, or the root + the block's token ids, 8 bytes each, little-endian)

So two prompts share the names of exactly those blocks up to which they, and their salts, are the same. The string in
the root is the fixed seed; nothing depends on the process or on Python's own hashing.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from kvtier.engines.fingerprint import computed_state, computing_modules, is_plain, tensor_pieces
from kvtier.engines.transformers.compat import cache_argument
from kvtier.errors import ConfigError, UsageError
from kvtier.types.geometry import GroupLayout, KVLayout, TensorRef
from kvtier.types.keys import OffloadKey, make_key
from kvtier.types.namespace import Namespace

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HASH_ALGORITHM = "sha256"
HASH_SEED = "kvtier/transformers/1"

Tokens = npt.NDArray[np.int64]


def token_array(token_ids: Sequence[int] | torch.Tensor | npt.NDArray[np.integer]) -> Tokens:
    """Token ids as one flat array: a sequence of numbers, or a tensor or array of shape (tokens,) or (1, tokens).

    Raises UsageError for anything else, more than one sequence among it.
    """
    raw = token_ids.tolist() if hasattr(token_ids, "tolist") else list(token_ids)
    try:
        array = np.array(raw)
    except ValueError as error:
        raise UsageError("token ids are one sequence of whole numbers; batches are not supported") from error
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 1:
        raise UsageError(f"token ids are one sequence, got shape {array.shape}; batches are not supported")
    if array.size and array.dtype.kind not in "iu":
        raise UsageError(f"token ids are whole numbers, got {array.dtype}")
    return array.astype(np.int64)


def block_keys(tokens: Tokens, block_tokens: int, salt: bytes = b"") -> list[OffloadKey]:
    """The keys of the whole blocks of `block_tokens` tokens; what is left at the end has none."""
    digest = hashlib.sha256(HASH_SEED.encode() + hashlib.sha256(salt).digest()).digest()
    data = tokens.astype("<i8").tobytes()
    step = block_tokens * 8
    keys = []
    for start in range(0, len(data) - step + 1, step):
        digest = hashlib.sha256(digest + data[start : start + step]).digest()
        keys.append(make_key(digest, group=0))
    return keys


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
WHOLE_PROMPT_ROPE = ("dynamic", "longrope", "su")
"""Parts of the names of rotary embeddings whose keys depend on the length of the whole prompt."""

PLAIN = (torch.Tensor, torch.nn.Parameter)

LayerKV = tuple[tuple[int, int], tuple[int, int]]
"""A layer's part of a token: `(heads, head_dim)` of its keys and of its values."""


@dataclass(frozen=True, slots=True)
class ModelKV:
    """A model's KV cache for one token: its layers in order, their element type, the device they are on."""

    layers: tuple[LayerKV, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def token_elements(self) -> int:
        """Elements of one token in all layers, keys and values."""
        return sum(heads * dim for layer in self.layers for heads, dim in layer)

    def layout(self, block_size: int, factor: int = 1) -> KVLayout:
        """A group of one tensor: a page holds the keys and values of `block_size` tokens in every layer."""
        page = TensorRef(0, self.token_elements * block_size * self.dtype.itemsize)
        return KVLayout((GroupLayout((page,), block_size),), block_size_factor=factor)


def model_kv(model: PreTrainedModel, classes: ModuleType) -> ModelKV:
    """Run the model on one token and read the shape of the cache that it fills.

    Raises ConfigError, by its name, for a model whose cache is not one K and one V tensor of every token in each layer,
    or whose bytes a prefix does not determine.
    """
    _check_model(model, classes)
    argument = cache_argument(model)
    cache = classes.DynamicCache()
    with torch.inference_mode(False), torch.no_grad():
        token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
        # Not by calling the model: that would compile a compiled one for a shape that is not used again.
        model.forward(input_ids=token, use_cache=True, **{argument: cache})
    tensors = [(layer.keys, layer.values) for layer in cache.layers]
    if not tensors or any(tensor is None or tensor.dim() != 4 for pair in tensors for tensor in pair):
        raise ConfigError(f"{type(model).__name__} does not keep its state in the layers of a DynamicCache", "model")
    kinds = sorted({f"{tensor.dtype} on {tensor.device}" for pair in tensors for tensor in pair})
    if len(kinds) != 1:
        raise ConfigError(f"the KV cache must be of one type and on one device, it is {', '.join(kinds)}", "model")
    first = tensors[0][0]
    if first.dtype not in DTYPES:
        raise ConfigError(f"a KV cache of {first.dtype} is not supported; bfloat16, float16, float32 are", "model")
    return ModelKV(tuple((_heads(keys), _heads(values)) for keys, values in tensors), first.dtype, first.device)


def namespace(model: PreTrainedModel, kv: ModelKV, layout: KVLayout, weights: str) -> Namespace:
    """Everything that must match for stored bytes to mean the same. `weights` empty: their fingerprint.

    That includes the code and the attention kernels: blocks of another version of transformers are not found.
    """
    config = _text_config(model)
    heads = ";".join(f"{keys}{values}" for keys, values in kv.layers)
    return Namespace(
        layout,
        model=str(getattr(model.config, "_name_or_path", "") or ""),
        weights=weights or f"xxh3-128:{fingerprint(model)}",
        dtype=str(kv.dtype),
        hash_algorithm=HASH_ALGORITHM,
        hash_seed=HASH_SEED,
        extra={
            "engine": f"transformers {importlib.metadata.version('transformers')}",
            "class": type(model).__name__,
            "revision": str(getattr(model.config, "_commit_hash", "") or ""),
            "attention": str(getattr(config, "_attn_implementation", "")),
            "config": hashlib.sha256(model.config.to_json_string().encode()).hexdigest(),
            "computed": computed_state(computing_modules(model)),
            "kv_heads": hashlib.sha256(heads.encode()).hexdigest(),
            **_adapters(model),
        },
    )


def _adapters(model: PreTrainedModel) -> dict[str, str]:
    """The settings that layers with adapters keep beside their tensors, such as PEFT's scales, as a field of the
    namespace; none for a model without."""
    kept = [
        (name, sorted((key, repr(value)) for key, value in vars(module).items() if _is_setting(value)))
        for name, module in model.named_modules()
        if isinstance(getattr(module, "scaling", None), dict)
    ]
    return {"adapters": hashlib.sha256(repr(kept).encode()).hexdigest()} if kept else {}


def _is_setting(value: object) -> bool:
    """True for plain values, and for tables of them by the names of adapters."""
    return is_plain(list(value.items()) if isinstance(value, dict) else value)


def _heads(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.shape[1], tensor.shape[3]


def _text_config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config(decoder=True)


def _check_model(model: PreTrainedModel, classes: ModuleType) -> None:
    name = type(model).__name__
    config = _text_config(model)
    if model.training:
        raise ConfigError(f"{name} is in training mode, where dropout changes its state; call model.eval()", "model")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(f"{name} is an encoder-decoder; only decoders are supported", "model")
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in LAYER_TYPES:
            raise ConfigError(f"{name} has layers of type {kind}, whose state is not one K and V for a token", "model")
    for layer in classes.DynamicCache(config=model.config).layers:
        if type(layer) not in (classes.DynamicLayer, classes.DynamicSlidingWindowLayer):
            raise ConfigError(f"{name} uses {type(layer).__name__}, which is not supported", "model")
    ropes = [getattr(config, field, None) for field in ("rope_parameters", "rope_scaling")]
    # As text, because a rope type may be nested by layer type.
    for rope in re.findall(r'"(?:rope_)?type": "([^"]*)"', json.dumps(ropes, default=str)):
        if any(word in rope for word in WHOLE_PROMPT_ROPE):
            raise ConfigError(
                f"{name} uses rope type {rope!r}: the keys of a prefix depend on the length of the whole prompt",
                "model",
            )


def fingerprint(model: PreTrainedModel) -> str:
    """A hash, in hex, over name, shape, type and every byte of each parameter and buffer, adapters included.

    A revision of the hub would not do: weights are trained, merged and quantised after they were loaded. Takes about a
    second for each 5 to 10 GB. Raises ConfigError for a tensor whose bytes cannot be seen, such as one that is
    offloaded or quantised into a class of its own.
    """
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(chain(model.named_parameters(), model.named_buffers())):
        if type(tensor) not in PLAIN or tensor.layout is not torch.strided or tensor.device.type == "meta":
            raise ConfigError(
                f"cannot see the bytes of {name} ({type(tensor).__name__} on {tensor.device}); say what identifies "
                "the weights, such as the repository and its commit",
                "weights",
            )
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        for piece in tensor_pieces(tensor):
            digest.update(piece)
    return digest.hexdigest()
