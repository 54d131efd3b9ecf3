"""Weights that are replaced in a running engine: noticed by the workers, known to the scheduler's process.

The namespace names the weights that the engine has started with. KV of others must not reach a tier that outlives the
process. A worker sees calls of the models' `load_weights`. Where weights are written by another way, a checksum over
the models' memory differs from that of the start; it is taken when the scheduler's process asks for it, at a reset.
"""

import asyncio
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from enum import IntEnum
from typing import Any

import torch
import xxhash
from torch import nn

from kvtier.aio.daemon_pool import DaemonPool

PIECE_BYTES = 64 << 20
WORD_BYTES = 8

_log = logging.getLogger(__name__)


class Verdict(IntEnum):
    """The comparison of the weights in memory with those at the start."""

    UNKNOWN = 0
    CHANGED = 1
    UNCHANGED = 2


REPLACED = {
    Verdict.CHANGED: "the weights were replaced since the engine has started",
    Verdict.UNKNOWN: "the weights may have been replaced since the engine has started",
}


class ModelWeights:
    """The weights of one worker's models. `on_load` is called when a model loads some, by the thread that does.

    Memory that can be taken away while it is read is not read: `readable` is False then.
    """

    def __init__(self, models: Sequence[nn.Module], on_load: Callable[[], None], *, readable: bool) -> None:
        self._models = models if readable else ()
        self._on_load = on_load
        self._thread = DaemonPool("kvtier-weights", 1)
        self._first: asyncio.Task[bytes | None] | None = None
        self._undo = ExitStack()
        for model in models:
            self._report_loads(model)

    def _report_loads(self, model: nn.Module) -> None:
        load = getattr(model, "load_weights", None)
        if load is None:
            return

        @functools.wraps(load)
        def load_weights(*given: Any, **named: Any) -> Any:
            self._on_load()
            return load(*given, **named)

        vars(model)["load_weights"] = load_weights  # of this instance; the class keeps its own
        self._undo.callback(vars(model).pop, "load_weights", None)

    async def open(self) -> None:
        """Begin to take the checksum of the start; on a device it is taken when this returns.

        There it takes milliseconds, and must not meet the capture of CUDA graphs that comes next.
        """
        self._first = asyncio.create_task(self._checksum())
        if any(tensor.device.type != "cpu" for _, tensor in _tensors(self._models)):
            await self._first

    async def compare(self) -> Verdict:
        """Compare the memory of now with that of the start."""
        assert self._first is not None
        first = await self._first
        now = None if first is None else await self._checksum()
        if now is None:
            return Verdict.UNKNOWN
        return Verdict.UNCHANGED if now == first else Verdict.CHANGED

    async def _checksum(self) -> bytes | None:
        """None if there are no models, or they cannot be read."""
        if not self._models:
            return None
        try:
            return await self._thread.run(checksum, self._models)
        except (RuntimeError, OSError, ValueError):  # torch's own are RuntimeErrors
            _log.exception("the weights in memory cannot be read")
            return None

    def release(self) -> None:
        """Give the models their methods back, and end the thread."""
        self._undo.close()
        self._thread.shutdown()


def checksum(models: Sequence[nn.Module]) -> bytes | None:
    """Over all parameters and buffers in memory, without a copy of them; None if some have no memory.

    Of memory of the host it covers every byte in order; of a device's the sum of the words of each tensor, taken there.
    """
    state = xxhash.xxh3_128()
    sums: list[torch.Tensor] = []
    memories: dict[tuple[torch.device, int], torch.Tensor] = {}
    for name, tensor in _tensors(models):
        if tensor.is_meta:
            return None
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        memories[tensor.device, memory.data_ptr()] = memory
    for device in {device for device, _ in memories if device.type == "cuda"}:
        torch.cuda.synchronize(device)  # weights may still be on their way there
    for (device, _), memory in memories.items():
        if device.type != "cpu":
            sums += device_sums(memory)
            continue
        view = memory.numpy().data
        for start in range(0, len(view), PIECE_BYTES):
            state.update(view[start : start + PIECE_BYTES])
    if sums:
        state.update(torch.stack(sums).cpu().numpy().tobytes())
    return state.digest()


def _tensors(models: Sequence[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    for number, model in enumerate(models):
        for kind in (model.named_parameters(), model.named_buffers()):
            yield from ((f"{number}.{name}", tensor.detach()) for name, tensor in kind)


def device_sums(memory: torch.Tensor) -> list[torch.Tensor]:
    """Of the 8-byte words of memory, shape (bytes,), uint8, and of the bytes behind the last of them."""
    whole = len(memory) // WORD_BYTES * WORD_BYTES
    return [memory[:whole].view(torch.int64).sum(), memory[whole:].sum(dtype=torch.int64)]
