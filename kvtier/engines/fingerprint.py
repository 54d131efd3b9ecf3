"""Fingerprints of what decides the bytes of K and V besides the weights, read from the modules that compute them.

A list of configuration fields is never complete. A module that was built holds all that it computes with: tables, such
as a rotary embedding's cosines, and plain values, such as which half of them it uses.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

PIECE_BYTES = 64 << 20
TEXT_MAX = 512
"""A longer setting is named by its digest: a worker's note has room for 8 KiB."""
PLAIN = (bool, int, float, str, type(None), torch.dtype)


def tensor_pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a dense tensor in order, at most 64 MiB at a time, copied to host memory if they are elsewhere."""
    flat = tensor.detach().reshape(-1)
    step = PIECE_BYTES // tensor.element_size()
    for start in range(0, len(flat), step):
        yield flat[start : start + step].contiguous().view(torch.uint8).cpu().numpy().data


def computed_state(modules: Iterable[tuple[str, nn.Module]]) -> str:
    """SHA-256, in hex, over these named modules: class, plain attributes, and buffers that are no weights.

    Buffers of a checkpoint belong to the weights. Of a tensor on the meta device only type and shape are used.
    """
    digest = hashlib.sha256()
    for name, module in sorted(modules, key=lambda named: named[0]):
        values = {key: value for key, value in vars(module).items() if is_plain(value)}
        digest.update(
            f"{name} {type(module).__module__}.{type(module).__qualname__} {sorted(values.items())!r}".encode()
        )
        for key, buffer in sorted(computed_buffers(module)):
            digest.update(f"{key} {buffer.dtype} {tuple(buffer.shape)}".encode())
            if buffer.device.type != "meta":
                for piece in tensor_pieces(buffer):
                    digest.update(piece)
    return digest.hexdigest()


def computed_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The buffers of the module itself that its code computes and no checkpoint holds."""
    names = module._non_persistent_buffers_set
    return [(key, buffer) for key, buffer in module._buffers.items() if key in names and buffer is not None]


def computing_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model that have such buffers: rotary embeddings and their like."""
    return ((name, module) for name, module in model.named_modules() if computed_buffers(module))


def is_plain(value: object) -> bool:
    """True for a number, a text, a type, None, and lists of such, whose text is the same in each process."""
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return isinstance(value, PLAIN)


def settings_text(settings: Mapping[str, object]) -> str:
    """Settings as one field of a namespace: JSON, or its digest where that is long."""
    return short_text(json.dumps(settings, sort_keys=True, default=str))


def short_text(text: str) -> str:
    """The text, or its SHA-256 in hex where it has more than 512 characters."""
    return text if len(text) <= TEXT_MAX else hashlib.sha256(text.encode()).hexdigest()
