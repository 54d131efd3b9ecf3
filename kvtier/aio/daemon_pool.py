"""A bounded pool of daemon threads for calls that may block, and that must not hold up an event loop or an exit."""

import asyncio
import errno
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import ParamSpec, TypeVar

from kvtier.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")


class PoolClosed(RuntimeError):
    """The threads are closed, and take no more calls."""


class DaemonPool(Executor):
    """An executor of at most `limit` daemon threads, started when there is work for them.

    The standard pool joins its threads when the interpreter exits, so one frozen disk would keep the process; these
    are left behind. `close` waits for them within a deadline, without blocking the event loop.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._ended: list[Future[None]] = []
        self._lock = threading.Lock()
        self._unfinished = 0
        self._closed = False
        self._room = asyncio.Semaphore(3 * limit)
        self._pid = 0

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run `fn` on one of the threads. One that is cancelled before it begins keeps nothing that it names.

        Raises PoolClosed once closed, UsageError in a forked child, which has none of the threads, and OSError if
        the system grants not even one thread.
        """
        if self._pid not in (0, os.getpid()):
            raise UsageError(f"the threads of {self._name} belong to process {self._pid}; this one was forked from it")
        future: Future[T] = Future()
        calls = [partial(fn, *args, **kwargs)]
        future.add_done_callback(lambda _: calls.clear())

        def task() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(calls.pop()())
                except BaseException as error:
                    future.set_exception(error)

        with self._lock:
            if self._closed:
                raise PoolClosed(f"the threads of {self._name} are closed")
            if self._unfinished >= len(self._threads) < self._limit:
                self._start_thread()
            self._unfinished += 1
            self._tasks.put(task)
        return future

    async def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `fn` on a thread and return or raise what it does; at most `2 * limit` such calls wait in the queue.

        Raises as `submit`. Cancelling gives up the result, not a call that has begun.
        """
        async with self._room:
            return await asyncio.wrap_future(self.submit(fn, *args, **kwargs))

    def _start_thread(self) -> None:
        """Start one more thread. Where the system has none to give, those that are there have to do."""
        ended: Future[None] = Future()
        name = f"{self._name}-{len(self._threads)}"
        thread = threading.Thread(target=self._work, args=(ended,), name=name, daemon=True)
        self._pid = os.getpid()
        self._ended.append(ended)
        self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError as error:
            self._ended.remove(ended)
            self._threads.remove(thread)
            if not self._threads:
                self._pid = 0
                raise OSError(errno.EAGAIN, "the system has no thread to give") from error

    def _work(self, ended: Future[None]) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # or it would keep the memory that the call names
            with self._lock:
                self._unfinished -= 1
        ended.set_result(None)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end once their work is done; never waits. Idempotent: each thread takes one None."""
        with self._lock:
            self._closed = True
        for _ in self._threads:
            self._tasks.put(None)

    async def close(self, timeout_seconds: float) -> int:
        """Let the threads finish their work and end. Returns how many are stuck at the deadline; then call again."""
        self.shutdown()
        if not self._threads:
            return 0
        _, stuck = await asyncio.wait(map(asyncio.wrap_future, self._ended), timeout=timeout_seconds)
        if stuck:
            return len(stuck)
        for thread in self._threads:
            thread.join()
        return 0
