"""However a program ends with transfers under way: its own exit status, no noise, nothing left, no wrong byte."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from support_shutdown import ENDS, IO_ENGINES, Lives, first_word, own_traceback, quiet, right_bytes_or_misses
from support_shutdown_lives import BLOCKS


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    server = Lives(tmp_path_factory.mktemp("lives"))
    yield server
    server.close()


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
async def test_a_program_ends_with_transfers_under_way(lives, tmp_path, life, ends, io_engine):
    caught = 0
    for how in ends:
        ended = lives.live(life, tmp_path / how, io_engine, how)
        assert ended.status == ENDS[how], ended
        assert (own_traceback if how == "raise" else quiet)(ended.stderr), (how, ended.stderr)
        caught += ended.said[0]["running"] > 0
    assert not lives.names_left()
    assert caught, "not one of the programs ended while transfers were under way"
    for how in ends:
        found = await right_bytes_or_misses(tmp_path / how, io_engine)
        assert found == BLOCKS or life != "tier_closed", "what closing drained is there"


@pytest.mark.parametrize("io_engine", IO_ENGINES)
async def test_a_loop_is_closed_under_transfers(lives, tmp_path, io_engine):
    """asyncio complains of each task it was closed over; nothing else happens."""
    ended = lives.live("loop_closed", tmp_path / "r", io_engine, "exit")
    assert ended.said[0]["running"]
    assert ended.status == 3
    assert "Traceback" not in ended.stderr.replace("Exception ignored in: <coroutine", "")
    await right_bytes_or_misses(tmp_path / "r", io_engine)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("kind", ["engine", "tier"])
async def test_an_interrupt_during_loads(lives, tmp_path, kind, sent):
    """Ctrl-C unwinds through the with block, which closes the stack; SIGTERM kills at once.

    A loop is interrupted between two steps of its own, so there nothing is lost. A synchronous engine is interrupted
    anywhere, also between taking jobs and sending them on: there blocks may be missing, and no byte is wrong.
    """
    said = lives.begin("interrupted", tmp_path / "r", how=kind)
    os.kill(await first_word(said, "pid"), sent)
    ended = lives.end()
    assert ended.status == (-sent if sent == signal.SIGTERM else -signal.SIGINT)
    assert ("KeyboardInterrupt" in ended.stderr) == (sent == signal.SIGINT)
    found = await right_bytes_or_misses(tmp_path / "r", "threads")
    assert found == BLOCKS or sent == signal.SIGTERM or kind == "engine"
