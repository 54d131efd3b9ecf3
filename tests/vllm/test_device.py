"""The adapter over KV tensors of a CUDA device, on a stream of vLLM's own as vLLM computes on one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import ClassVar

import pytest
from fake_engine import FakeEngine, Request, offloading_config, stack
from support_cuda import FakeCuda, FakeStream

from kvtier.integrations.vllm.primary import worker
from kvtier.options import TierOptions
from kvtier.tier_api.contract import Opened, TierContext
from kvtier_gpu import GPUBackend

pytestmark = pytest.mark.engine


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


class Said(logging.Handler):
    """What the logger says that vLLM shows."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    @contextmanager
    def by_vllm(self, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
        vllm = logging.getLogger("vllm")
        vllm.addHandler(self)
        try:
            with caplog.at_level(logging.INFO, "vllm"):
                yield
        finally:
            vllm.removeHandler(self)


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "root"
    folder.mkdir(mode=0o700)
    return folder


@pytest.mark.parametrize("deaf", [False, True])
@pytest.mark.parametrize("copies", ["batch", "gather", "single"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_stored_and_loaded_is_what_vllms_stream_computed(
    root, seed, monkeypatch, caplog, world_size, copies, deaf
):
    """On a device whose streams wait for none, bytes are wrong: the thread that copies has another current stream."""
    device = FakeCuda(seed, deaf=deaf)
    GPUOnDevice.device = EngineOnDevice.device = device
    EngineOnDevice.stream = stream = device.new_stream(False, reluctant=True)
    monkeypatch.setattr(worker, "discover", lambda: {"gpu": GPUOnDevice})
    described = stack(root, 24, row_bytes=world_size * 4096)
    described["tiers"].insert(0, {"type": "gpu", "cuda_copies": copies})
    config = offloading_config(described, world_size=world_size)
    said = Said()
    with device.entered(stream), said.by_vllm(caplog), EngineOnDevice(config, seed) as engine:
        lines = [line for line in said.lines if "copies between GPU blocks" in line]
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
    GPUOnDevice.device = EngineOnDevice.device = device
    EngineOnDevice.stream = stream = device.new_stream(False, reluctant=True)
    monkeypatch.setattr(worker, "discover", lambda: {"gpu": GPUOnDevice})
    described = stack(root, 24, row_bytes=4096)
    described["tiers"].insert(0, {"type": "gpu", "cuda_copies": "batch"})
    with device.entered(stream), EngineOnDevice(offloading_config(described), seed) as engine:
        device.faults.refuse = lambda call: True
        for _ in range(6):
            engine.add([engine.random.randint(0, 1) for _ in range(engine.random.randint(1, 6))])
            engine.run()
    assert device.calls
    assert engine.counts["hit chunks"] > 0
    assert engine.wrong == 0
    assert device.violations == []
