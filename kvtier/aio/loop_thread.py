"""An event loop in a thread of its own, for programs and engines that are not asyncio's."""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

from kvtier.aio.process_guard import ProcessGuard
from kvtier.errors import UsageError

T = TypeVar("T")

STOP_SECONDS = 10.0


class LoopThread:
    """Runs coroutines for other threads, in the process that made it. The thread is a daemon.

    `name` is the thread's name, `what` the owner that errors speak of. `at_exit` closes the owner; it is called when
    the interpreter ends, unless `close` was called before. See `weak_call` for an owner that it must not keep alive.
    """

    def __init__(self, name: str, what: str, at_exit: Callable[[], object] | None = None) -> None:
        self.loop = asyncio.new_event_loop()
        self._what = what
        self._owner = ProcessGuard()
        self._owner.claim()
        self._submitting = threading.Lock()
        self._closing = False
        self._calls: dict[Future[Any], LoopCall[Any]] = {}
        self._last_task: asyncio.Task[None] | None = None
        self._at_exit = at_exit
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self.thread.start()
        if at_exit is not None:
            atexit.register(self._close_at_exit)

    @property
    def elsewhere(self) -> bool:
        """True in a child forked from the process that made it, where the thread does not exist."""
        return self._owner.elsewhere

    @property
    def alive(self) -> bool:
        """False once the thread has ended: nothing runs in its loop any more."""
        return self.thread.is_alive()

    def start(self, work: Coroutine[Any, Any, T]) -> LoopCall[T]:
        """Begin a coroutine and return at once. Raises UsageError after `close` and in a forked child."""
        call = LoopCall(self.loop, work)
        self._begin(call)
        return call

    def _begin(self, call: LoopCall[Any]) -> None:
        try:
            self._owner.check()
            with self._submitting:
                if self._closing:
                    raise UsageError(f"the {self._what} is closed")
                self._send(call)
        except UsageError:
            call.drop()
            raise

    def _send(self, call: LoopCall[Any]) -> None:
        self._calls[call.ended] = call
        call.ended.add_done_callback(self._calls.pop)  # holds no call: a future keeps its callbacks
        self.loop.call_soon_threadsafe(call.begin)

    def run(self, work: Coroutine[Any, Any, T], timeout_seconds: float | None = None) -> T:
        """The coroutine's result, or what it raised; TimeoutError once the time is over.

        What ends the waiting early cancels the coroutine. An interruption such as Ctrl-C is raised once the coroutine
        has ended, because its buffers are in use until then, or the time is over. Raises UsageError after `close`, or
        when that ended the coroutine; never waits for a loop that has gone.
        """
        call = LoopCall(self.loop, work)
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        try:
            self._begin(call)  # an interruption may come before this returns, with the coroutine begun
            return call.ended.result(timeout_seconds)
        except BaseException as error:
            if not call.ended.done():
                call.cancel()
                _wait(call.ended, deadline)
            elif self._closing and isinstance(error, CancelledError):
                raise UsageError(f"the {self._what} was closed before the call ended") from error
            raise

    def call_soon(self, callback: Callable[..., object], *args: object) -> None:
        """Call it in the loop soon. From any thread; raises RuntimeError once the loop is closed."""
        self.loop.call_soon_threadsafe(callback, *args)

    def close(self, timeout_seconds: float = STOP_SECONDS) -> bool:
        """Cancel what still runs, then end the loop and its thread. Idempotent; in a forked child it does nothing.

        False if something does not end in time. It is left behind, and the thread ends when that has ended.
        """
        if self._owner.elsewhere:
            return False
        atexit.unregister(self._close_at_exit)
        with self._submitting:
            if self._closing:  # the loop is ending, or has ended by itself
                return not self.alive
            self._closing = True
            last = LoopCall(self.loop, self._wind_up(timeout_seconds))
            self._send(last)
        _wait(last.ended, time.monotonic() + 2 * timeout_seconds)
        if last.ended.done() and (last.ended.cancelled() or last.ended.result()):
            self.thread.join(timeout_seconds)
        return not self.alive

    def _serve(self) -> None:
        stopped = False
        try:
            while not stopped:
                # A coroutine that raises one of these ends with it, and the loop goes on: others wait for their end.
                with suppress(SystemExit, KeyboardInterrupt):
                    self.loop.run_forever()
                    stopped = True
        finally:
            # However the loop was stopped: nothing is sent after this, and no call waits for what will never end.
            with self._submitting:
                self._closing = True
            for call in list(self._calls.values()):
                call.drop()
            self.loop.close()

    async def _wind_up(self, timeout_seconds: float) -> bool:
        """Stop the loop once nothing runs in it; returns whether that is so already."""
        tasks = _other_tasks()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_seconds)
        await self.loop.shutdown_asyncgens()
        ended = not _other_tasks()
        self._last_task = self.loop.create_task(self._stop_when_ended())
        return ended

    async def _stop_when_ended(self) -> None:
        while tasks := _other_tasks():
            await asyncio.wait(tasks)
        self.loop.stop()

    def _close_at_exit(self) -> None:
        if self._at_exit is not None and not self.elsewhere:
            self._at_exit()


class LoopCall(Generic[T]):
    """A coroutine on its way through a loop. `ended` is done when it has ended."""

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> None:
        self.ended: Future[T] = Future()
        self._loop = loop
        self._work = work
        self._task: asyncio.Task[T] | None = None

    def begin(self) -> None:
        """Call in the loop."""
        self._task = self._loop.create_task(self._work)
        self._task.add_done_callback(self._complete)

    def cancel(self) -> None:
        """Cancel the coroutine; `ended` is done once it has ended. From any thread."""
        with suppress(RuntimeError):  # the loop is closed, and everything has ended
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is None:
            self.drop()
        else:
            self._task.cancel()

    def drop(self) -> None:
        """Give up a coroutine that never began, or that will not end because its loop has ended."""
        if self._task is None:
            self._work.close()
        self.ended.cancel()

    def _complete(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.ended.cancel()
        elif (error := task.exception()) is not None:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(task.result())


def _wait(future: Future[Any], deadline: float | None) -> None:
    """Until the future is done, however it ends and however often the waiting is interrupted, or the time is over."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    while not done.is_set():
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return
        try:
            done.wait(left)
        except KeyboardInterrupt:
            # The first interruption is raised when the buffers are free.
            continue


def _other_tasks() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}
