"""The identity of a model's weights: a hash of the bytes that are really in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import xxhash

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PIECE_BYTES = 64 << 20
PLAIN = (torch.Tensor, torch.nn.Parameter)


def fingerprint(model: PreTrainedModel) -> str:
    """A hash, in hex, over name, shape, type and every byte of each parameter and buffer, adapters included.

    A revision of the hub would not do: weights are trained, merged and quantised after they were loaded. Takes about a
    second for each 5 to 10 GB. Raises ConfigError for a tensor whose bytes cannot be seen, such as one that is
    offloaded or quantised into a class of its own.
    """
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(_tensors(model)):
        if type(tensor) not in PLAIN or tensor.layout is not torch.strided or tensor.device.type == "meta":
            raise ConfigError(
                f"cannot see the bytes of {name} ({type(tensor).__name__} on {tensor.device}); say what identifies "
                "the weights, such as the repository and its commit",
                "weights",
            )
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        flat = tensor.detach().reshape(-1)
        step = PIECE_BYTES // tensor.element_size()
        for start in range(0, len(flat), step):
            digest.update(flat[start : start + step].contiguous().view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
