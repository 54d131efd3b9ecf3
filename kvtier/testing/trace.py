"""Runs an async test in an event loop of its own and holds it to leaving nothing behind."""

from __future__ import annotations

import asyncio
import builtins
import functools
import gc
import io
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, ParamSpec
from unittest import mock

P = ParamSpec("P")

JOIN_SECONDS = 10.0
TEST_SECONDS = 120.0
_IO = (
    (builtins, "open"),
    (io, "open"),
    (os, "open"),
    (os, "mkdir"),
    (os, "listdir"),
    (os, "scandir"),
    (os, "memfd_create"),
    (socket, "socket"),
    (subprocess, "Popen"),
    (threading.Thread, "start"),
)


class _RefusedExecutor(ThreadPoolExecutor):
    """In place of the loop's default executor, on which a tier must not depend: counts calls and refuses them."""

    def __init__(self) -> None:
        super().__init__(max_workers=1)
        self.asked = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.asked += 1
        raise RuntimeError("a tier must not run anything on the event loop's default executor")


@contextmanager
def refusing_io() -> Iterator[None]:
    """Nothing opens a file, a socket or a process, or starts a thread. Raises AssertionError where something does."""
    with ExitStack() as patches:
        for owner, name in _IO:
            patches.enter_context(mock.patch.object(owner, name, _refusal(name)))
        yield


def _refusal(name: str) -> Callable[..., None]:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"a constructor called {name}; all I/O belongs into open")

    return refuse


def open_files() -> dict[str, str]:
    """Every open file descriptor of this process and what it leads to."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
    return found


@contextmanager
def leaving_no_trace() -> Iterator[None]:
    """Nothing may be left: no file descriptor, no thread. Both get a moment to end. Raises AssertionError."""
    files, threads = open_files(), set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - threads:
        while not thread.is_alive() and thread in threading.enumerate():
            time.sleep(0.001)  # it is being started
        if thread.is_alive():
            thread.join(JOIN_SECONDS)
    left = [thread.name for thread in threading.enumerate() if thread not in threads]
    assert not left, f"threads were left behind: {left}"
    if _new_files(files):
        gc.collect()  # what only waits to be collected is not a leak
    ends = time.monotonic() + JOIN_SECONDS
    while (new := _new_files(files)) and time.monotonic() < ends:
        time.sleep(0.001)  # a library closes a connection in a thread of its own
    assert not new, f"file descriptors were left behind: {new}"


def _new_files(before: dict[str, str]) -> dict[str, str]:
    return {fd: target for fd, target in open_files().items() if before.get(fd) != target}


def in_fresh_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Make an async test a plain one: its own event loop, a deadline, and no trace of it afterwards.

    Fails when a file descriptor, a thread or a task is left, or when anything ran on the loop's default executor.
    Needs no plugin of pytest.
    """

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with leaving_no_trace():
            run_in_loop(test(*args, **kwargs))

    return run


def run_in_loop(test: Coroutine[Any, Any, None]) -> None:
    """Run a test to its end in a new event loop. Raises what it raises, AssertionError if tasks are left."""
    threads = _RefusedExecutor()
    with asyncio.Runner() as runner:
        runner.get_loop().set_default_executor(threads)
        left = runner.run(_watched(test))
    assert not left, f"tasks were left running: {left}"
    assert not threads.asked, "something ran on the event loop's default executor"


async def _watched(test: Coroutine[Any, Any, None]) -> list[str]:
    async with asyncio.timeout(TEST_SECONDS):
        await test
    for _ in range(3):
        await asyncio.sleep(0)
    return [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def turns(count: int) -> None:
    """Let the event loop turn."""
    for _ in range(count):
        await asyncio.sleep(0)
