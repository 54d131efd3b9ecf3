"""A stack over the KV tensors of a CUDA device: copies begin after the work that the engine gave its stream before."""

from __future__ import annotations

import dataclasses
import time
from functools import partial

import pytest
from support_cuda import FakeCuda, FakeStream
from support_driver import ServedStack
from support_stack import HYBRID, PLAIN, Engine, keys, opened, parts_of, stack_file, whole
from support_stack_tiers import LOAD, STORE

from kvtier.stack.assembly import StackParts
from kvtier.types.geometry import KVLayout
from kvtier.types.jobs import GPUGroup, JobKind, JobResult
from kvtier_gpu import GPUBackend, GPUOptions

ROWS, BLOCKS = 12, 64


def on_device(layout: KVLayout, device: FakeCuda) -> tuple[Engine, StackParts]:
    """An engine whose tensors are on the device, and a stack over them."""
    engine = Engine(layout, BLOCKS)
    device.own(engine.kv_caches)
    parts = parts_of(stack_file(layout, ROWS), engine)
    gpu = GPUBackend(GPUOptions(cuda_copies="batch"), device)
    return engine, dataclasses.replace(parts, tiers=[gpu, *parts.tiers[1:]])


def later(device: FakeCuda, stream: FakeStream, work: partial[None]) -> None:
    """Give work to a stream of the engine; it is done when nothing else is left to do."""
    device.enqueue(stream, work)


def run(stack: ServedStack, kind: JobKind, one: GPUGroup) -> JobResult:
    job = stack.job(kind, [one])
    stack.submit(job)
    until = time.monotonic() + 30
    while time.monotonic() < until:
        for result in stack.step():
            assert result.job_id == job.job_id
            return result
        stack.wait(0.5)
    raise AssertionError("the job did not end in time")


@pytest.mark.parametrize("layout", [PLAIN, HYBRID])
def test_an_engine_on_a_stream_of_its_own_stores_what_it_computed(layout: KVLayout, seed: int) -> None:
    """The stack's own thread, which copies, has another current stream than the engine's."""
    device = FakeCuda(seed)
    engine, parts = on_device(layout, device)
    stream = device.new_stream(False, reluctant=True)
    stored = whole(keys(4), 0, layout.block_size_factor)
    with ServedStack(parts) as stack, device.entered(stream):
        later(device, stream, partial(engine.compute, stored))
        assert run(stack, STORE, stored).ok
        later(device, stream, partial(engine.wipe))
        assert run(stack, LOAD, stored).ok
        assert not engine.wrong(stored)
    assert device.violations == []


async def test_a_stack_in_the_engines_own_loop_does_so_too(seed: int) -> None:
    device = FakeCuda(seed)
    engine, parts = on_device(PLAIN, device)
    stream = device.new_stream(False, reluctant=True)
    stored = whole(keys(4))
    async with opened(parts) as stack:
        with device.entered(stream):
            later(device, stream, partial(engine.compute, stored))
            assert (await stack.run(stack.job(STORE, [stored]))).ok
            later(device, stream, partial(engine.wipe))
            assert (await stack.run(stack.job(LOAD, [stored]))).ok
        assert not engine.wrong(stored)
    assert device.violations == []


async def test_a_lost_device_is_a_miss_and_no_exception(seed: int) -> None:
    """What the stack holds in rows is not lost by it, and what comes later is dropped."""
    device = FakeCuda(seed)
    engine, parts = on_device(PLAIN, device)
    first, second = whole(keys(4)), whole(keys(4, start=4), 4)
    engine.compute(first)
    async with opened(parts) as stack:
        assert (await stack.run(stack.job(STORE, [first]))).ok
        device.lose()
        statuses = [
            {str(one.reason or one.errno) for of in (await call).outcomes for one in of}
            for call in (
                stack.run(stack.job(LOAD, [first])),
                stack.run(stack.job(STORE, [second])),
                stack.run(stack.job(LOAD, [first])),
            )
        ]
        assert statuses == [{"5"}, {"tier_down"}, {"tier_down"}]
        stack.check_integrity()
        assert stack.locate(first.keys) == ["cpu"] * 4
        assert stack.locate(second.keys) == [None] * 4
