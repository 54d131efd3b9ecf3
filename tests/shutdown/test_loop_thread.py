"""No call waits for ever for the loop of a thread that has ended, and no coroutine is lost on the way there."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import signal
import socket
import threading
import time
from concurrent.futures import CancelledError

import pytest

from kvtier.aio.loop_thread import LoopThread
from kvtier.errors import UsageError


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


async def raises(error: type[BaseException]) -> None:
    raise error


async def nothing() -> int:
    return 1


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_coroutine_that_would_end_the_loop_ends_alone(error: type[BaseException]) -> None:
    thread = LoopThread("test", "thing")
    thread.open()
    waiting = thread.start(forever)
    with pytest.raises(error):
        thread.run(lambda: raises(error), 20)
    assert thread.run(nothing, 20) == 1
    assert not waiting.ended.done()
    assert thread.close()
    assert waiting.ended.cancelled()


def test_a_call_that_is_interrupted_as_soon_as_it_is_sent_ends_before_the_interruption_is_raised(monkeypatch) -> None:
    """Its buffers are in use until then, and its thread may be faster than the caller's next line."""
    thread = LoopThread("test", "thing")
    thread.open()
    began, steps = threading.Event(), []

    async def work() -> None:
        try:
            began.set()
            await forever()
        finally:
            for _ in range(20):
                await asyncio.sleep(0)
            steps.append("ended")

    usual = thread.loop.call_soon_threadsafe

    def interrupted(*args: object) -> None:
        usual(*args)
        monkeypatch.undo()
        assert began.wait(20)
        raise KeyboardInterrupt

    monkeypatch.setattr(thread.loop, "call_soon_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        thread.run(work)
    assert steps == ["ended"]
    assert thread.close()


def test_a_call_that_closing_ends_says_so() -> None:
    began = threading.Event()
    errors: list[BaseException] = []

    async def begin() -> None:
        began.set()
        await forever()

    def wait() -> None:
        try:
            thread.run(begin)
        except BaseException as error:
            errors.append(error)

    thread = LoopThread("test", "thing")
    thread.open()
    waiting = threading.Thread(target=wait)
    waiting.start()
    assert began.wait(20)
    assert thread.close()
    waiting.join(20)
    (error,) = errors
    assert isinstance(error, UsageError)


def test_calls_end_when_somebody_else_stops_their_loop() -> None:
    async def stop() -> None:
        thread.loop.stop()
        await forever()

    thread = LoopThread("test", "thing")
    thread.open()
    waiting = thread.start(forever)
    with pytest.raises(UsageError, match="closed before the call ended"):
        thread.run(stop, 20)
    with pytest.raises(CancelledError):
        waiting.ended.result(20)
    with pytest.raises(UsageError, match="is closed"):
        thread.run(forever, 20)
    thread.thread.join(20)
    assert thread.close()


def test_no_call_is_lost_between_many_threads_and_a_close() -> None:
    def call_until_closed() -> None:
        try:
            while True:
                assert thread.run(nothing, 20) == 1
        except UsageError:
            ended.append(1)

    for _ in range(20):
        thread, ended = LoopThread("test", "thing"), []
        thread.open()
        callers = [threading.Thread(target=call_until_closed, daemon=True) for _ in range(4)]
        for caller in callers:
            caller.start()
        assert thread.close()
        for caller in callers:
            caller.join(20)
        assert len(ended) == 4


class Interruption(Exception):
    """Raised by a signal handler."""


def test_a_signal_while_the_loop_is_made_loses_no_socket(monkeypatch) -> None:
    """CPython's `socketpair` moves each descriptor from one object to another: between them none owns it."""
    made, began = socket.socketpair, threading.main_thread().ident
    assert began is not None

    def signalled() -> tuple[socket.socket, socket.socket]:
        one, other = made()
        descriptor = other.detach()
        signal.pthread_kill(began, signal.SIGUSR1)
        time.sleep(0)  # a handler of this thread runs by now
        return one, socket.socket(fileno=descriptor)

    def interrupt(*_: object) -> None:
        raise Interruption

    gc.collect()  # what earlier tests left has no descriptor that goes meanwhile
    before, usual = set(os.listdir("/proc/self/fd")), signal.signal(signal.SIGUSR1, interrupt)
    monkeypatch.setattr(socket, "socketpair", signalled)
    thread = LoopThread("test", "thing")
    try:
        with pytest.raises(Interruption):
            thread.open()
    finally:
        signal.signal(signal.SIGUSR1, usual)
        assert thread.close()
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_loop_that_cannot_be_made_is_an_error_and_leaves_nothing(monkeypatch) -> None:
    def refuse() -> None:
        raise OSError(errno.EMFILE, "no descriptor")

    monkeypatch.setattr(asyncio, "new_event_loop", refuse)
    closed: list[int] = []
    thread = LoopThread("test", "thing", at_exit=lambda: closed.append(1))
    with pytest.raises(OSError, match="no descriptor"):
        thread.open()
    assert thread.close()
    assert thread.close()
    assert not thread.alive


def test_a_thread_that_never_began_is_closed_at_once(monkeypatch) -> None:
    thread = LoopThread("test", "thing")

    def start() -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(thread.thread, "start", start)
    with pytest.raises(RuntimeError, match="start new thread"):
        thread.open()
    assert thread.close(20)
    thread._serve()
    assert not hasattr(thread, "loop"), "nor does it make a loop when it begins after all"
    assert thread.close(20)
