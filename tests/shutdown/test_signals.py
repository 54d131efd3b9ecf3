"""A stack that was asked to closes on a signal, in order, and then lets the signal do what it would have done."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator

import pytest
from support_shutdown import Lives, first_word, quiet, right_bytes_or_misses
from support_shutdown_lives import BLOCKS, LAYOUT
from support_stack import Engine, keys, parts_of, stack_file, store, until, whole
from support_stack_tiers import STORE, backends

from kvtier.errors import UsageError
from kvtier.stack import TierStack


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Lives:
    return Lives(tmp_path_factory.mktemp("lives"))


@pytest.fixture
def usual() -> Iterator[list[int]]:
    """SIGUSR1 with a handler of the program's own; the list grows with every signal it gets."""
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    yield got
    signal.signal(signal.SIGUSR1, before)


def memory_stack(engine: Engine, **settings: float) -> TierStack:
    return TierStack(
        parts_of(stack_file(LAYOUT, 16, {"type": "memory"}, backends=backends()), engine, backends(), **settings)
    )


@pytest.mark.parametrize(("how", "status"), [("default", -signal.SIGTERM), ("ignore", 0), ("handler", 0)])
async def test_every_dirty_row_is_on_disk_before_the_signal_takes_its_course(lives, tmp_path, how, status):
    said = lives.begin("signalled", tmp_path / "r", how=how)
    os.kill(await first_word(said, "pid"), signal.SIGTERM)
    ended = lives.end()
    assert ended.status == status, ended
    assert quiet(ended.stderr), ended.stderr
    if status == 0:
        last = ended.said[-1]
        assert (last["dropped"], last["given_back"], last["results"]) == (0, True, ended.said[0]["tasks"])
    assert await right_bytes_or_misses(tmp_path / "r", "threads") == BLOCKS


async def test_a_signal_to_a_forked_child_is_the_childs_alone(lives, tmp_path):
    said = lives.begin("signalled", tmp_path / "r", how="child")
    parent, child = await first_word(said, "pid"), await first_word(said, "child")
    os.kill(child, signal.SIGTERM)
    await until(lambda: "zombie" in status_of(child))
    assert "zombie" not in status_of(parent)
    os.kill(parent, signal.SIGTERM)
    assert lives.end().status == -signal.SIGTERM


def status_of(pid: int) -> str:
    with open(f"/proc/{pid}/status") as file:
        return file.read()


async def test_a_second_signal_does_not_wait(usual):
    engine = Engine(LAYOUT, 32)
    stack = memory_stack(engine)
    tier = stack._parts.tiers[-1]
    await stack.open()
    tier.hold(STORE)
    await store(stack, engine, whole(keys(8)))
    stack.close_on(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR1)
    await until(lambda: stack._ending is not None)
    assert usual == [], "the first waits until the stack is closed"
    signal.raise_signal(signal.SIGUSR1)
    assert usual == [signal.SIGUSR1], "the second takes its course at once"
    tier.let_go()
    await stack.close()
    assert stack.close_report.dropped_blocks == 0
    await until(lambda: len(usual) == 2)


async def test_a_stack_that_closes_gives_every_handler_back(usual):
    mine = signal.getsignal(signal.SIGUSR1)
    stack = memory_stack(Engine(LAYOUT, 32))
    async with stack:
        stack.close_on(signal.SIGUSR1, signal.SIGUSR2)
        stack.close_on(signal.SIGUSR1)
        assert signal.getsignal(signal.SIGUSR1) != mine
    assert signal.getsignal(signal.SIGUSR1) == mine
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
    signal.raise_signal(signal.SIGUSR1)
    assert usual == [signal.SIGUSR1]


async def test_a_handler_set_later_is_left_alone(usual):
    later: list[int] = []
    async with memory_stack(Engine(LAYOUT, 32)) as stack:
        stack.close_on(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, lambda number, frame: later.append(number))
    signal.raise_signal(signal.SIGUSR1)
    assert (usual, later) == ([], [signal.SIGUSR1])


async def test_nothing_is_handled_unless_asked_for_and_what_cannot_be_is_refused():
    before = [signal.getsignal(number) for number in signal.valid_signals()]
    stack = memory_stack(Engine(LAYOUT, 32))
    with pytest.raises(UsageError, match="not open"):
        stack.close_on(signal.SIGUSR1)
    async with stack:
        for wrong in (signal.SIGKILL, 0, 1000):
            with pytest.raises(UsageError, match="cannot be handled"):
                stack.close_on(signal.SIGUSR1, wrong)
        assert [signal.getsignal(number) for number in signal.valid_signals()] == before
    with pytest.raises(UsageError, match="closed"):
        stack.close_on(signal.SIGUSR1)


def test_a_loop_outside_the_main_thread_cannot_close_on_a_signal():
    said: list[str] = []

    async def main() -> None:
        async with memory_stack(Engine(LAYOUT, 32)) as stack:
            try:
                stack.close_on(signal.SIGUSR1)
            except UsageError as error:
                said.append(str(error))

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    thread.join()
    assert "main thread" in said[0]
