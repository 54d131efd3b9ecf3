"""The threads of one root: few, bounded, daemonic, and nobody else's."""

from __future__ import annotations

import asyncio
import errno
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from kvtier.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")

_FILE_THREADS = _CHECK_THREADS = 2
_Task = Callable[[], bool]


class RootThreads(Executor):
    """An executor of at most `limit` daemon threads, started when there is work for them.

    The standard pool joins its threads when the interpreter exits, so one frozen disk would keep the process; these
    are left behind. `close` waits for them within a deadline, without blocking the event loop.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._unfinished = 0
        self._closed = False
        self._goodbyes: list[Future[None]] = []
        self._pid = 0

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run `fn` on one of the threads.

        Raises RuntimeError once closed, UsageError in a forked child, which has none of the threads, and OSError if
        the system grants not even one thread.
        """
        if self._pid not in (0, os.getpid()):
            raise UsageError(f"the threads of {self._name} belong to process {self._pid}; this one was forked from it")
        future: Future[T] = Future()

        def task() -> bool:
            if future.set_running_or_notify_cancel():
                try:
                    result = fn(*args, **kwargs)
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
            return True

        with self._lock:
            if self._closed:
                raise RuntimeError(f"the threads of {self._name} are closed")
            if self._unfinished >= len(self._threads) < self._limit:
                self._start_thread()
            self._unfinished += 1
            self._tasks.put(task)
        return future

    def _start_thread(self) -> None:
        """One thread more; where the system has none to give, those that are there have to do."""
        thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if not self._threads:
                raise OSError(errno.EAGAIN, "the system has no thread to give") from error
            return
        self._pid = os.getpid()
        self._threads.append(thread)

    def _work(self) -> None:
        while self._tasks.get()():
            with self._lock:
                self._unfinished -= 1

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end once their work is done; never waits."""
        self._dismiss()

    def _dismiss(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._goodbyes = [Future() for _ in self._threads]
        for goodbye in self._goodbyes:
            self._tasks.put(_leave(goodbye))

    async def close(self, timeout_seconds: float) -> int:
        """Let the threads finish their work and end. Returns how many are stuck at the deadline; then call again."""
        self._dismiss()
        if not self._goodbyes:
            return 0
        _, stuck = await asyncio.wait(map(asyncio.wrap_future, self._goodbyes), timeout=timeout_seconds)
        if stuck:
            return len(stuck)
        for thread in self._threads:
            thread.join()
        return 0


@dataclass(frozen=True, slots=True)
class RootCrew:
    """The threads of one root: for calls on files, for reading and writing blocks, for checking what was read.

    Each kind has its own, so that calls that a disk does not answer hold up none of the others.
    """

    files: RootThreads
    io: RootThreads
    checks: RootThreads

    @staticmethod
    def of(path: str, io_threads: int) -> RootCrew:
        """The threads of a root; none of them is started yet."""
        name = f"kvtier-fs-{os.path.basename(path)}"
        return RootCrew(
            RootThreads(f"{name}-files", _FILE_THREADS),
            RootThreads(f"{name}-io", io_threads),
            RootThreads(f"{name}-checks", _CHECK_THREADS),
        )

    async def begin(self) -> None:
        """Have a thread for calls on files and one for checks, so that it is known early if there is none to be had.

        Raises OSError. An engine that finds no thread later says so request by request.
        """
        for threads in (self.files, self.checks):
            await asyncio.wrap_future(threads.submit(_nothing))

    async def close(self, timeout_seconds: float) -> int:
        """Let all of them end. Returns how many are stuck at the deadline."""
        each = (self.io, self.checks, self.files)
        return sum(await asyncio.gather(*(threads.close(timeout_seconds) for threads in each)))


def _nothing() -> None:
    """What a thread does to be there."""


def _leave(goodbye: Future[None]) -> _Task:
    def task() -> bool:
        goodbye.set_result(None)
        return False

    return task
