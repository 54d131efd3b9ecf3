"""A small pool of blocks between a model's caches and the stack.

A `DynamicCache` has a K and a V tensor for each layer, (1, heads, tokens, head_dim), that grow with every token; the
stack moves fixed pages. Here a page is the keys and values of one block of tokens in all layers, one layer after
another, each (heads, block tokens, head_dim).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from types import ModuleType
from typing import Any

import torch

from kvtier.engines.transformers.model import ModelKV
from kvtier.errors import UsageError

STAGING_BYTES = 64 << 20

Tensors = list[tuple[torch.Tensor, ...]]
"""K and V of each layer, (1, heads, tokens, head_dim)."""


class Staging:
    """Pages on the model's device, as many as fit into STAGING_BYTES; `factor` of them hold what one key names.

    Copies end before a call returns, on the device too, so a page may be handed over or used again at once. Positions
    count keys: position p stands for the tokens from `p * factor * block_size` on.
    """

    def __init__(self, kv: ModelKV, block_size: int, factor: int) -> None:
        self._kv = kv
        self._factor = factor
        self._block_size = block_size
        elements = kv.token_elements * block_size
        self.capacity = max(1, STAGING_BYTES // (elements * kv.dtype.itemsize * factor))
        pages = self.capacity * factor
        # Made outside inference mode, so that it can be written in and out of it.
        with torch.inference_mode(False):
            pool = torch.zeros((pages, elements), dtype=kv.dtype, device=kv.device)
        self.kv_caches = [pool.view(torch.uint8)]
        shapes = [(heads, block_size, dim) for heads, dim in chain.from_iterable(kv.layers)]
        parts = torch.split(pool, [math.prod(shape) for shape in shapes], dim=1)
        self._views = [part.view(pages, *shape) for part, shape in zip(parts, shapes, strict=True)]

    def pack(self, source: Tensors, positions: Sequence[int]) -> None:
        """Copy what is at these positions, at most `capacity`, into the pages from the first on."""
        for first, count in _runs(positions):
            self._copy(source, positions[first], first, count, out=False)
        synchronize(self._kv.device)

    def unpack(self, target: Tensors, first_position: int, count: int) -> None:
        """Copy the first pages to `count` positions from `first_position` on."""
        self._copy(target, first_position, 0, count, out=True)
        synchronize(self._kv.device)

    def _copy(self, tensors: Tensors, position: int, first: int, count: int, out: bool) -> None:
        """Between `count` positions of the tensors and the pages of the first of them on, one copy for each tensor."""
        blocks, size = count * self._factor, self._block_size
        page, token = first * self._factor, position * self._factor * size
        with torch.inference_mode(False), torch.no_grad():
            for tensor, view in zip(chain.from_iterable(tensors), self._views, strict=True):
                heads, _, dim = tensor.shape[1:]
                tokens = tensor[0, :, token : token + blocks * size].view(heads, blocks, size, dim).transpose(0, 1)
                pages = view[page : page + blocks]
                if out:
                    tokens.copy_(pages)
                else:
                    pages.copy_(tokens)

    def empty(self, tokens: int) -> Tensors:
        """Room for `tokens` tokens in every layer."""
        dtype, device = self._kv.dtype, self._kv.device
        with torch.inference_mode(False):
            return [
                tuple(torch.empty((1, heads, tokens, dim), dtype=dtype, device=device) for heads, dim in layer)
                for layer in self._kv.layers
            ]


def synchronize(device: torch.device) -> None:
    """Wait until what the calling thread's stream computes on a GPU has ended."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def make_cache(tensors: Tensors, tokens: int, classes: ModuleType) -> object:
    """A DynamicCache of the first `tokens` tokens, whose layers keep all their tokens. Empties `tensors`: the cache
    copies them, so that only one layer at a time is there twice."""
    cache = classes.DynamicCache()
    if not tokens:
        tensors.clear()
    with torch.inference_mode(False), torch.no_grad():
        for index in range(len(tensors)):
            keys, values = tensors.pop(0)
            cache.update(keys[:, :, :tokens], values[:, :, :tokens], index)
    return cache


def cached_tensors(cache: object, kv: ModelKV, classes: ModuleType) -> tuple[Tensors, int]:
    """The tensors of a cache and how many tokens they hold. Raises UsageError, saying why, for a cache that is not
    this model's, is a batch, or does not keep every token."""
    layers: Sequence[Any] | None = getattr(cache, "layers", None)
    if not isinstance(cache, classes.DynamicCache) or layers is None:
        raise UsageError(f"a DynamicCache is needed, not {type(cache).__name__}")
    if getattr(cache, "offloading", False):
        raise UsageError("a DynamicCache that offloads its layers is not supported; the stack does that")
    _check_layers(layers, classes)
    tensors: Tensors = [(layer.keys, layer.values) for layer in layers if getattr(layer, "keys", None) is not None]
    if not tensors:
        return [], 0
    if len(tensors) != len(kv.layers):
        raise UsageError(f"the cache has {len(tensors)} layers, the model's has {len(kv.layers)}")
    tokens = tensors[0][0].shape[-2]
    for index, (pair, layer) in enumerate(zip(tensors, kv.layers, strict=True)):
        for tensor, (heads, dim) in zip(pair, layer, strict=True):
            if tensor.dim() == 4 and tensor.shape[0] != 1:
                raise UsageError(f"the cache is of a batch of {tensor.shape[0]}; only batches of 1 are supported")
            have, need = (tuple(tensor.shape), tensor.dtype), ((1, heads, tokens, dim), kv.dtype)
            if have != need:
                raise UsageError(f"layer {index} of the cache is {have}, the model's is {need}")
    return tensors, tokens


def _check_layers(layers: Iterable[object], classes: ModuleType) -> None:
    for index, layer in enumerate(layers):
        if isinstance(layer, classes.DynamicSlidingWindowLayer):
            raise UsageError(
                f"layer {index} of the cache is a {type(layer).__name__}, which forgets tokens outside its window; use "
                "the cache that `restore` returns (or `DynamicCache()`, without a config): its layers keep every token"
            )
        if type(layer) is not classes.DynamicLayer:
            raise UsageError(f"layer {index} of the cache is a {type(layer).__name__}, which is not supported")


def _runs(positions: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(index of the first, count) of each run of consecutive positions."""
    first = 0
    for index in range(1, len(positions) + 1):
        if index == len(positions) or positions[index] != positions[index - 1] + 1:
            yield first, index - first
            first = index
