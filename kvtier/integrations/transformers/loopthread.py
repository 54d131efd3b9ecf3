"""An event loop in a thread of its own, for callers that wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, Generic, TypeVar

from kvtier.errors import UsageError
from kvtier.stack.forking import OwnerProcess

T = TypeVar("T")

STOP_SECONDS = 10.0


class LoopThread:
    """Runs coroutines for other threads, which wait for their end. Belongs to the process that made it."""

    def __init__(self) -> None:
        self._owner = OwnerProcess()
        self._owner.claim()
        self._submitting = threading.Lock()
        self._stopping = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvtier-prefixes", daemon=True)
        self._thread.start()

    @property
    def elsewhere(self) -> bool:
        """True in a child forked from the process that made it, where the thread does not exist."""
        return self._owner.elsewhere

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result, or what it raised. Whatever interrupts the waiting, such as Ctrl-C, cancels the
        coroutine and is raised once that has ended, because its buffers are in use until then.

        Raises UsageError after `stop`, or when that ended the coroutine; never waits for a loop that has gone.
        """
        call = _Call(work)
        try:
            with self._submitting:
                if self._stopping:
                    raise UsageError("the prefix cache is closed")
                self._loop.call_soon_threadsafe(call.begin)
            return call.ended.result()
        except UsageError:
            call.forget()
            raise
        except BaseException as error:
            if not call.ended.done():
                self._loop.call_soon_threadsafe(call.cancel)
                _wait(call.ended)
            elif self._stopping and isinstance(error, CancelledError):
                raise UsageError("the prefix cache was closed before the call ended") from error
            raise

    def stop(self) -> None:
        """End what is left, then the loop and its thread. Called once; in a forked child it does nothing."""
        if self._owner.elsewhere:
            return
        last = _Call(_end_tasks())
        with self._submitting:
            self._stopping = True
            self._loop.call_soon_threadsafe(last.begin)
        _wait(last.ended)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()


class _Call(Generic[T]):
    """A coroutine on its way through a loop; `begin` and `cancel` are called in the loop, in any order."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self.ended: Future[T] = Future()
        self._work = work
        self._task: asyncio.Task[T] | None = None

    def begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._work)
        self._task.add_done_callback(self._pass_on)

    def cancel(self) -> None:
        if self._task is None:
            self.forget()
        else:
            self._task.cancel()

    def forget(self) -> None:
        """It never began, or has ended."""
        self._work.close()
        self.ended.cancel()

    def _pass_on(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.ended.cancel()
        elif (error := task.exception()) is not None:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(task.result())


def _wait(future: Future[T]) -> None:
    """Until the future is done, however it ends and however often the waiting is interrupted."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    while not done.is_set():
        try:
            done.wait()
        except KeyboardInterrupt:
            # What interrupted first is raised when the buffers are free.
            continue


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=STOP_SECONDS)
    await asyncio.get_running_loop().shutdown_asyncgens()
