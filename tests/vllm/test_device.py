"""The adapter over KV tensors of a CUDA device, on a stream of vLLM's own as vLLM computes on one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
from fake_engine import FakeEngine, Request, offloading_config, stack
from support_cuda import FakeCuda, FakeStream
from support_logs import said_by_vllm
from vllm.v1.kv_offload.config import OffloadingConfig

from kvtier.engines.vllm.primary import worker
from kvtier.options import TierOptions
from kvtier.tier.contract import Opened, TierContext
from kvtier_gpu import GPUBackend

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("stacks")]


class GPUOnDevice(GPUBackend):
    """A gpu tier whose tensors are on the device."""

    device: ClassVar[FakeCuda]

    def __init__(self, options: TierOptions) -> None:
        super().__init__(options, self.device)

    async def open(self, context: TierContext) -> Opened:
        self.device.own(list(context.kv_caches or ()))
        return await super().open(context)


class EngineOnDevice(FakeEngine):
    """Computes on a stream, so the bytes are there later than the request is said to be computed."""

    device: ClassVar[FakeCuda]
    stream: ClassVar[FakeStream]

    def _write(self, request: Request) -> None:
        self.device.enqueue(self.stream, partial(super()._write, request))


def streams_of_vllm(monkeypatch: pytest.MonkeyPatch, device: FakeCuda) -> FakeStream:
    """Have gpu tiers and engines use the device; the stream on which engines compute."""
    GPUOnDevice.device = EngineOnDevice.device = device
    EngineOnDevice.stream = device.new_stream(False, reluctant=True)
    monkeypatch.setattr(worker, "discover", lambda: {"gpu": GPUOnDevice})
    return EngineOnDevice.stream


def copying(root: Path, copies: str, world_size: int = 1) -> OffloadingConfig:
    """Of a stack that copies in this way."""
    described = stack(root, 24, row_bytes=world_size * 4096)
    described["tiers"].insert(0, {"type": "gpu", "cuda_copies": copies})
    return offloading_config(described, world_size=world_size)


@pytest.mark.parametrize("deaf", [False, True])
@pytest.mark.parametrize("copies", ["batch", "gather", "single"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_stored_and_loaded_is_what_vllms_stream_computed(
    root, seed, monkeypatch, caplog, world_size, copies, deaf
):
    """On a device whose streams wait for none, bytes are wrong: the thread that copies has another current stream."""
    device = FakeCuda(seed, deaf=deaf)
    stream, config = streams_of_vllm(monkeypatch, device), copying(root, copies, world_size)
    with device.entered(stream), said_by_vllm(caplog) as said, EngineOnDevice(config, seed) as engine:
        lines = [line for line in said if "copies between GPU blocks" in line]
        assert lines == [
            f"worker {rank} copies between GPU blocks and rows: cuda:0, 2 streams, pinned rows; "
            f"to_rows by {copies}; to_gpu by {copies}"
            for rank in range(world_size)
        ]
        for _ in range(12):
            length = engine.random.randint(1, 6)
            engine.add([engine.random.randint(0, 1) for _ in range(length)])
            engine.run()
    assert engine.counts["hit chunks"] > 0
    assert (engine.wrong > 0) is deaf
    assert device.violations == []


def test_a_driver_that_refuses_copies_does_not_end_the_engine(root, seed, monkeypatch):
    """vLLM ends on a load that fails, and asks for it only once."""
    device = FakeCuda(seed)
    stream = streams_of_vllm(monkeypatch, device)
    with device.entered(stream), EngineOnDevice(copying(root, "batch"), seed) as engine:
        device.faults.refuse = lambda call: True
        for _ in range(6):
            engine.add([engine.random.randint(0, 1) for _ in range(engine.random.randint(1, 6))])
            engine.run()
    assert device.calls
    assert engine.counts["hit chunks"] > 0
    assert engine.wrong == 0
    assert device.violations == []
