"""MemoryError at each line of what opens, copies and ends: every call ends, and nothing is left once it is closed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import FunctionType
from typing import Any

import pytest
from support_stack import PLAIN, Engine, keys, parts_of, stack_file, whole
from support_stack_tiers import LOAD, STORE

from faults.machine.belongings import belongings, left_behind
from faults.machine.raising import LineFault
from kvtier.aio import each_step, loop_thread, shielded_wait
from kvtier.aio.daemon_pool import DaemonPool
from kvtier.aio.eventfd import EventFD
from kvtier.aio.loop_waker import LoopWaker
from kvtier.stack import EngineStack, assembly, shutdown
from kvtier_cpu.region import opening, shared_region
from kvtier_gpu import backend as gpu
from kvtier_gpu.engines import host_memory

STEPS: dict[str, Callable[..., Any]] = {
    "open a tier": assembly.open_tier,
    "wait for a tier": assembly._within,
    "make a region": opening._sealed_memfd,
    "own a region": opening._Opening.create_memfd,
    "close a region": shared_region.SharedRegion.close,
    "start a copy": gpu._start_copy,
    "land a copy": gpu._land,
    "set up a device": gpu._off_loop,
    "serve copies": host_memory.HostMemoryEngine._serve,
    "end a pool": DaemonPool.shutdown,
    "wait for a copy": shielded_wait.shielded_wait,
    "make a waker": EventFD.__init__,
    "begin to listen": LoopWaker.attach,
    "end to listen": LoopWaker.detach,
    "call the loop": loop_thread.LoopThread.call_soon,
    "begin a call": loop_thread.LoopCall._begin,
    "complete a call": loop_thread.LoopCall._complete,
    "open a loop": loop_thread.LoopThread.open,
    "close a loop": loop_thread.LoopThread.close,
    "serve a loop": loop_thread.LoopThread._serve,
    "make a loop": loop_thread.LoopThread._make_loop,
    "try to make a loop": loop_thread.LoopThread._try_to_make_loop,
    "wait for a loop": loop_thread.LoopThread._has_loop,
    "look for a loop": loop_thread.LoopThread._begins,
    "run a loop": loop_thread.LoopThread._run_loop,
    "end the service of a loop": loop_thread.LoopThread._end_service,
    "end what a loop holds": loop_thread.LoopThread._end_loop,
    "end a thread": EngineStack._end_thread,
    "close tiers": shutdown.close_each,
    "take the steps of a close": each_step.take_each,
    "end a loop": loop_thread.LoopThread._wind_up,
    "stop a loop": loop_thread.LoopThread._stop_when_ended,
}


@pytest.mark.parametrize("name", STEPS)
def test_a_line_that_raises_hangs_nothing_and_leaves_nothing(name):
    function = STEPS[name]
    assert isinstance(function, FunctionType)
    fault = LineFault([function.__code__])
    engine = Engine(PLAIN, 16)
    _live(engine, fault, -1)
    lines = fault.disarm()
    assert lines, "the step was not taken"
    before = belongings()
    struck = []
    for at in range(lines):
        _live(engine, fault, at)
        struck += [fault.where] if fault.where else []
    assert struck
    assert not left_behind(before), f"after MemoryError at {struck}"


def _live(engine: Engine, fault: LineFault, at: int) -> None:
    """Open a stack, store and load, and close it; a line of the step raises on the way."""
    stack = EngineStack(parts_of(stack_file(PLAIN, 8), engine, load_seconds=1.0, store_seconds=1.0))
    with fault.installed():
        fault.arm(at)
        try:
            with suppress(MemoryError):
                stack.open()
                engine.compute(whole(keys(8)))
                _move(stack, STORE)
                engine.wipe()
                result = _move(stack, LOAD)
                assert not engine.wrong(whole(keys(8)), result.outcomes[0])
        finally:
            with suppress(MemoryError):
                stack.close()
            stack.close()


def _move(stack: EngineStack, kind: Any) -> Any:
    job = stack.job(kind, [whole(keys(8))])
    stack.submit(job)
    for _ in range(40):
        for result in stack.step():
            if result.job_id == job.job_id:
                return result
        stack.wait(0.1)
    raise TimeoutError(f"a {kind} did not end")
