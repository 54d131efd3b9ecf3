"""However a program ends with transfers under way: its own exit status, no noise, nothing left, no wrong byte."""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path

import pytest
from support_shutdown import ENDS, IO_ENGINES, Ended, Lives, first_word, own_traceback, quiet, right_bytes_or_misses
from support_shutdown_lives import BLOCKS

TRIES = 10


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Lives:
    return Lives(tmp_path_factory.mktemp("lives"))


@pytest.mark.parametrize("io_engine", IO_ENGINES)
@pytest.mark.parametrize(
    ("life", "ends"),
    [
        ("engine_unclosed", ["end", "exit", "raise"]),
        ("tier_unclosed", ["end", "exit", "raise"]),
        ("engine_closed", ["raise"]),
        ("tier_closed", ["raise"]),
    ],
)
async def test_a_program_ends_with_transfers_under_way(lives, tmp_path, seed, life, ends, io_engine, dial):
    """A quick run draws two of three ways to end."""
    ends = random.Random(seed).sample(ends, min(len(ends), dial(3, 2)))
    for how in ends:
        ended = caught_under_way(lives, life, tmp_path / how, io_engine, how)
        assert ended.status == ENDS[how], ended
        assert (own_traceback if how == "raise" else quiet)(ended.stderr), (how, ended.stderr)
    for how in ends:
        found = await right_bytes_or_misses(tmp_path / how, io_engine)
        assert found == BLOCKS or life != "tier_closed", "what closing drained is there"


def caught_under_way(lives: Lives, life: str, root: Path, io_engine: str, how: str) -> Ended:
    """A life that ended while transfers were under way. A life that lost the race against its disk is repeated."""
    for _ in range(TRIES):
        shutil.rmtree(root, ignore_errors=True)
        ended = lives.live(life, root, io_engine, how)
        if ended.status is None or (ended.said and ended.said[0]["running"]):
            return ended
    pytest.fail(f"none of {TRIES} programs ended while transfers were under way: {ended}")


@pytest.mark.parametrize("io_engine", IO_ENGINES)
async def test_a_loop_is_closed_under_transfers(lives, tmp_path, io_engine):
    """asyncio complains of each task it was closed over; nothing else happens."""
    ended = caught_under_way(lives, "loop_closed", tmp_path / "r", io_engine, "exit")
    assert ended.status == 3
    assert "Traceback" not in ended.stderr.replace("Exception ignored in: <coroutine", "")
    await right_bytes_or_misses(tmp_path / "r", io_engine)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("kind", ["engine", "tier"])
async def test_an_interrupt_during_loads(lives, tmp_path, kind, sent):
    """Ctrl-C unwinds through the with block, which closes the stack; SIGTERM kills at once.

    A loop is interrupted between two steps of its own, so there nothing is lost. A synchronous engine is interrupted
    anywhere, also in the middle of a call: there blocks may be missing, and no byte is wrong.
    """
    said = lives.begin("interrupted", tmp_path / "r", how=kind)
    os.kill(await first_word(said, "pid"), sent)
    ended = lives.end()
    assert ended.status == (-sent if sent == signal.SIGTERM else -signal.SIGINT)
    assert ("KeyboardInterrupt" in ended.stderr) == (sent == signal.SIGINT)
    found = await right_bytes_or_misses(tmp_path / "r", "threads")
    assert found == BLOCKS or sent == signal.SIGTERM or kind == "engine"
