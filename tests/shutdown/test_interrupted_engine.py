"""Ctrl-C, or another exception of a signal handler, in the thread of a stack: closing ends in time, nothing is left."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support_stack import PLAIN, Engine, fs, keys, whole
from support_steps import FACES, NOWHERE, Defect, StepFault, lives

from kvtier.stack import CloseReport
from kvtier.stack.dispatcher import Dispatcher
from tests.stack.test_engine import engine_stack
from tests.stack.test_engine import store as store_blocks
from tests.stack.test_life import as_it_was

ENDS_SECONDS = 10.0
LIVES = 20


class Interrupted(Exception):
    """What a signal handler of a program raises."""


@pytest.fixture
def alarm() -> Iterator[Callable[[float, type[BaseException]], None]]:
    """Have a signal handler raise an error after some seconds."""
    errors: list[type[BaseException]] = []

    def interrupt(*_: Any) -> None:
        raise errors[0]

    def begin(seconds: float, error: type[BaseException]) -> None:
        errors[:] = [error]
        signal.setitimer(signal.ITIMER_REAL, seconds)

    former = signal.signal(signal.SIGALRM, interrupt)
    yield begin
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, former)


@pytest.mark.parametrize("error", [Interrupted, KeyboardInterrupt])
@pytest.mark.parametrize("call", ["open", "reset", "close", "wait"])
async def test_an_interruption_of_a_call_that_waits_ends_it(call, error, alarm, monkeypatch):
    async with as_it_was():
        stack, tiers = engine_stack(Engine(PLAIN, 16), 8, {"type": "memory"}, tier_close_seconds=1.0)
        waits = {"open": "open", "reset": "reset", "close": "close"}.get(call)
        if call != "open":
            stack.open()
        usual = getattr(tiers[0], waits) if waits else None
        if waits:
            setattr(tiers[0], waits, slow)
        began = time.monotonic()
        alarm(0.2, error)
        with pytest.raises(error):
            stack.wait(60.0) if call == "wait" else getattr(stack, call)()
        if usual is not None:
            setattr(tiers[0], waits, usual)
        stack.close()
        assert time.monotonic() - began < ENDS_SECONDS


async def slow(*_: Any) -> None:
    await asyncio.sleep(60)


def test_ctrl_c_between_two_steps_ends_in_a_clean_close(tmp_path):
    """What is in rows alone reaches the disk, and the thread ends."""
    engine, names = Engine(PLAIN, 32), keys(8)
    stack, _ = engine_stack(engine, 16, fs(tmp_path / "r", write_policy="on_evict"))
    with pytest.raises(KeyboardInterrupt), stack:  # noqa: PT012
        assert store_blocks(stack, engine, whole(names)) == ["stored"] * 8
        signal.raise_signal(signal.SIGINT)
    assert stack.close_report == CloseReport(0, 0)
    again, _ = engine_stack(engine, 16, fs(tmp_path / "r", write_policy="on_evict"))
    with again:
        assert again.locate(names) == ["fs"] * 8


@pytest.mark.parametrize("face", FACES)
def test_ctrl_c_inside_a_step_ends_in_a_clean_close(face, tmp_path):
    """Half a step may be wrong state: nothing more is written, and the next process finds right bytes or less."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}: lives({face!r}, folder, {seed}, {LIVES}, KeyboardInterrupt)")
    found = lives(face, tmp_path, seed, LIVES, KeyboardInterrupt)
    assert found.struck >= LIVES // 4  # on a busy machine some calls come less often than in the two lives before


def test_ctrl_c_while_a_tier_drains_closes_it_all_the_same(tmp_path):
    face = FACES["EngineMemoryTier"](tmp_path)
    fault = StepFault(face.packages)
    with fault.installed(), pytest.raises(KeyboardInterrupt):
        face.live(random.Random(1), fault, ("EngineMemoryPlane.give_up", 1), KeyboardInterrupt)
    face.check_closed()


def test_a_defect_in_closing_a_tier_releases_its_root_all_the_same(tmp_path, monkeypatch):
    face = FACES["EngineMemoryTier"](tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Dispatcher, "stop", _raise_defect)
        with pytest.raises(Defect):
            face.live(random.Random(1), StepFault(face.packages), NOWHERE)
    face.check_closed()
    face.live(random.Random(1), StepFault(face.packages), NOWHERE)
    assert face.loaded


def _raise_defect(_: Dispatcher) -> None:
    raise Defect
