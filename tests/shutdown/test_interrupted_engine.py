"""An EngineStack whose thread is interrupted by an exception of a signal handler ends in time and leaves nothing."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support_stack import PLAIN, Engine, keys, whole
from support_stack_tiers import LOAD

from kvtier.aio.loop_thread import LoopThread
from kvtier.control.plane.control_plane import ControlPlane
from kvtier.stack import EngineStack
from tests.stack.test_engine import engine_stack, run
from tests.stack.test_engine import store as store_blocks
from tests.stack.test_life import as_it_was

ENDS_SECONDS = 10.0


class Interrupted(Exception):
    """What a signal handler of a program raises."""


@pytest.fixture
def alarm() -> Iterator[Callable[[float], None]]:
    """Have a signal handler raise after so many seconds."""

    def interrupt(*_: Any) -> None:
        raise Interrupted

    former = signal.signal(signal.SIGALRM, interrupt)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds) and None
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, former)


def interrupted_once(monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    """The next call into the loop of a thread is interrupted before it is made, as a signal may do it."""
    usual, raised = LoopThread.call_soon, []

    def call_soon(self: LoopThread, *args: Any) -> None:
        if not raised:
            raised.append(1)
            raise error
        usual(self, *args)

    monkeypatch.setattr(LoopThread, "call_soon", call_soon)


@pytest.mark.parametrize("error", [Interrupted, KeyboardInterrupt])
@pytest.mark.parametrize("call", ["open", "reset", "close"])
async def test_an_interruption_before_the_loop_is_reached_leaves_no_coroutine(call, error, monkeypatch):
    said: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    async with as_it_was():
        stack, _ = engine_stack(Engine(PLAIN, 16), 8, {"type": "memory"}, tier_close_seconds=1.0)
        if call != "open":
            stack.open()
        began = time.monotonic()
        with monkeypatch.context() as patched:
            interrupted_once(patched, error)
            with pytest.raises(error):
                getattr(stack, call)()
        stack.close()
        assert time.monotonic() - began < ENDS_SECONDS
        del stack
        gc.collect()
    assert said == []


@pytest.mark.parametrize("call", ["open", "reset", "close", "wait"])
async def test_an_interruption_of_a_call_that_waits_ends_it(call, alarm, monkeypatch):
    async with as_it_was():
        stack, tiers = engine_stack(Engine(PLAIN, 16), 8, {"type": "memory"}, tier_close_seconds=1.0)
        waits = {"open": "open", "reset": "reset", "close": "close"}.get(call)
        if call != "open":
            stack.open()
        usual = getattr(tiers[0], waits) if waits else None
        if waits:
            setattr(tiers[0], waits, slow)
        began = time.monotonic()
        alarm(0.2)
        with pytest.raises(Interrupted):
            stack.wait(60.0) if call == "wait" else getattr(stack, call)()
        if usual is not None:
            setattr(tiers[0], waits, usual)
        stack.close()
        assert time.monotonic() - began < ENDS_SECONDS


async def slow(*_: Any) -> None:
    await asyncio.sleep(60)


@pytest.mark.parametrize("name", ["deliver", "pump", "take_jobs", "take_finished"])
def test_a_step_that_is_interrupted_ends_its_jobs_and_serves_nothing_wrong(name, monkeypatch):
    """The state is half changed then, so the stack serves nothing any more; the engine goes on."""
    engine = Engine(PLAIN, 32)
    stack, _ = engine_stack(engine, 16)
    with stack:
        assert store_blocks(stack, engine, whole(keys(8))) == ["stored"] * 8
        job = stack.job(LOAD, [whole(keys(8), 8)])
        stack.submit(job)
        usual, raised = getattr(ControlPlane, name), []

        def interrupted(*args: Any) -> Any:
            if raised:
                return usual(*args)
            raised.append(1)
            raise KeyboardInterrupt

        monkeypatch.setattr(ControlPlane, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            step_until_raised(stack)
        result = run(stack, job.job_id, seconds=ENDS_SECONDS)[job.job_id]
        assert not engine.wrong(whole(keys(8), 8), result.outcomes[0])
        assert stack.locate(keys(8)) == [None] * 8
        assert stack.stats().errors


def step_until_raised(stack: EngineStack) -> None:
    until = time.monotonic() + ENDS_SECONDS
    while time.monotonic() < until:
        stack.step()
        stack.wait(0.1)
