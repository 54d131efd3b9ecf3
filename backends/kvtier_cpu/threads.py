"""A few daemon threads of the CPU tier's own, for work that must not hold up an event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from kvtier.outlast import outlast

T = TypeVar("T")
_Work = Callable[[], None]


class DaemonPool:
    """`threads` daemon threads and at most `2 * threads` calls waiting for them; further callers wait their turn.

    Daemon threads, because a process must be able to end while a copy hangs. Belongs to one event loop.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._count = threads
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._room = asyncio.Semaphore(3 * threads)

    @property
    def size(self) -> int:
        """How many calls run at once."""
        return self._count

    def start(self) -> None:
        """Start the threads. Idempotent."""
        while len(self._threads) < self._count:
            thread = threading.Thread(target=self._serve, name=f"{self._name}-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    async def run(self, call: Callable[[], T]) -> T:
        """Run `call` on a thread and return or raise what it does. Cancelling gives up the answer, not the call."""
        loop = asyncio.get_running_loop()
        async with self._room:
            future: asyncio.Future[T] = loop.create_future()
            self._queue.put(lambda: _answer(loop, future, call))
            return await future

    def close(self) -> None:
        """Let the threads end once their queue is empty. Idempotent, does not wait."""
        for _ in self._threads:
            self._queue.put(None)
        self._threads = []

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            work()


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, and when cancelled let it finish before the cancellation goes on.

    Buffers in use by a copy or by a thread stay ours until it ends; cancelling never hands them back early.
    """
    return await outlast(asyncio.ensure_future(work))


def _answer(loop: asyncio.AbstractEventLoop, future: asyncio.Future[T], call: Callable[[], T]) -> None:
    def tell() -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    error: BaseException | None = None
    try:
        result = call()
    except BaseException as failure:
        error = failure  # crosses to the awaiting task, whatever it is
    with suppress(RuntimeError):  # the loop was closed: nobody waits any more
        loop.call_soon_threadsafe(tell)
