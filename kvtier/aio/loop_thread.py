"""An event loop in a thread of its own, for programs and engines that are not asyncio's."""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

from kvtier.aio.process_guard import ProcessGuard
from kvtier.errors import UsageError

T = TypeVar("T")

OPEN_SECONDS = 60.0
STOP_SECONDS = 10.0


class Latch:
    """Set by one thread, waited for by another; `wait` resets it.

    A `threading.Event` takes a lock in Python code: its waiter, interrupted at the wrong moment by an exception of a
    signal handler, keeps that lock, and the thread that sets the event hangs. Here each step is one call in C.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Let one wait end, this or the next. From any thread; idempotent."""
        try:
            self._lock.release()
        except RuntimeError:  # it was set
            return

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """True when it was set, False once the time is over."""
        return self._lock.acquire(timeout=-1 if timeout_seconds is None else max(0.0, timeout_seconds))


class LoopThread:
    """Runs coroutines for other threads, in the process that opened it. The thread is a daemon.

    Work is a function that makes the coroutine, and is called in the loop: so no coroutine is left that was never
    awaited, wherever Ctrl-C ends the call. `name` is the thread's name, `what` the owner that errors name. `at_exit`
    closes the owner; it is called when the interpreter ends, unless `close` was called before. See `weak_call` for an
    owner that it must not keep alive.
    """

    loop: asyncio.AbstractEventLoop
    _ending: asyncio.Task[None]

    def __init__(self, name: str, what: str, at_exit: Callable[[], object] | None = None) -> None:
        self._what = what
        self._owner = ProcessGuard()
        self._submitting = threading.Lock()
        self._closing = False
        self._made = Latch()
        self._refused: OSError | None = None
        self._calls: set[LoopCall[Any]] = set()
        self._at_exit = at_exit
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def open(self) -> None:
        """Start the thread, once. Raises OSError or RuntimeError if the system has no descriptor or thread to give.

        Call `close` also where this raises: after Ctrl-C the thread may have started.
        """
        self._owner.claim()
        if self._at_exit is not None:
            atexit.register(self._close_at_exit)
        self.thread.start()
        if not self._has_loop(OPEN_SECONDS):
            raise self._refused or RuntimeError(f"the thread of the {self._what} has no loop")

    def _has_loop(self, timeout_seconds: float) -> bool:
        """Wait until the thread has made the loop; False if it could not, or the time is over."""
        if self.thread.ident is not None and self._made.wait(timeout_seconds):
            self._made.set()
        return hasattr(self, "loop")

    @property
    def is_forked_child(self) -> bool:
        """True in a child forked from the process that opened it, where the thread does not exist."""
        return self._owner.is_forked_child

    @property
    def alive(self) -> bool:
        """False before the loop is made, and once the thread has ended: nothing runs in its loop."""
        return self.thread.is_alive() and hasattr(self, "loop")

    def start(self, work: Callable[[], Coroutine[Any, Any, T]]) -> LoopCall[T]:
        """Begin a coroutine and return at once. Raises UsageError after `close` and in a forked child."""
        call = self._new_call(work)
        self._send(call)
        return call

    def _new_call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> LoopCall[T]:
        self._owner.check()
        return LoopCall(self.loop, work, self._calls)

    def _send(self, call: LoopCall[Any]) -> None:
        with self._submitting:
            if self._closing:
                raise UsageError(f"the {self._what} is closed")
            self._calls.add(call)
            self.loop.call_soon_threadsafe(call.begin)

    def run(self, work: Callable[[], Coroutine[Any, Any, T]], timeout_seconds: float | None = None) -> T:
        """The coroutine's result, or what it raised; TimeoutError once the time is over.

        What ends the waiting early cancels the coroutine. Ctrl-C is raised once the coroutine has ended, because its
        buffers are in use until then, or the time is over. Raises UsageError after `close`, or when that ended the
        coroutine; never waits for a loop that has gone.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        call = self._new_call(work)
        try:
            self._send(call)
            if not call.wait(deadline):
                raise TimeoutError
        except BaseException:
            if call in self._calls:  # it was sent and has not ended
                call.cancel()
                call.wait_through(deadline)
            raise
        if self._closing and call.ended.cancelled():
            raise UsageError(f"the {self._what} was closed before the call ended")
        return call.ended.result(0)

    def call_soon(self, callback: Callable[..., object], *args: object) -> None:
        """Call it in the loop soon. From any thread; raises RuntimeError once the loop is closed."""
        self.loop.call_soon_threadsafe(callback, *args)

    def close(self, timeout_seconds: float = STOP_SECONDS) -> bool:
        """Cancel what still runs, then end the loop and its thread. Idempotent; in a forked child it does nothing.

        False if something does not end in time. It is left behind, and the thread ends when that has ended.
        """
        if not self._owner.is_forked_child:
            atexit.unregister(self._close_at_exit)
            self._stop(timeout_seconds)
            if self.thread.is_alive():
                self.thread.join(timeout_seconds)
        return not self.thread.is_alive()

    def _stop(self, timeout_seconds: float) -> None:
        """No call begins from here on; have the loop stop once nothing runs in it."""
        has_loop = self._has_loop(timeout_seconds)
        with self._submitting:
            first, self._closing = not self._closing, True
        if has_loop and first:
            with suppress(RuntimeError):  # it has ended by itself
                self.loop.call_soon_threadsafe(self._begin_to_end)

    def _begin_to_end(self) -> None:
        self._ending = self.loop.create_task(self._wind_up())

    async def _wind_up(self) -> None:
        for task in _other_tasks():
            task.cancel()
        while tasks := _other_tasks():
            await asyncio.wait(tasks)
        await self.loop.shutdown_asyncgens()
        self.loop.stop()

    def _serve(self) -> None:
        """In the thread."""
        try:
            if not self._closing:
                self.loop = asyncio.new_event_loop()
        except OSError as error:
            self._refused = error
        finally:
            self._made.set()
        if hasattr(self, "loop"):
            try:
                self._run_loop()
            finally:
                self._end_loop()

    def _run_loop(self) -> None:
        stopped = False
        while not stopped:
            # A coroutine that raises one of these ends with it, and the loop goes on: others wait for their end.
            with suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_forever()
                stopped = True

    def _end_loop(self) -> None:
        """However the loop was stopped: nothing is sent after this, and no call waits for what will never end."""
        with self._submitting:
            self._closing = True
        if tasks := asyncio.all_tasks(self.loop):
            for task in tasks:
                task.cancel()
            with suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_until_complete(asyncio.wait(tasks, timeout=STOP_SECONDS))
        for call in list(self._calls):
            call.drop()
        self.loop.close()

    def _close_at_exit(self) -> None:
        if self._at_exit is not None and not self.is_forked_child:
            self._at_exit()


class LoopCall(Generic[T]):
    """A coroutine on its way through a loop. `ended` is done when it has ended. `calls` holds the call until then."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, work: Callable[[], Coroutine[Any, Any, T]], calls: set[LoopCall[Any]]
    ) -> None:
        self.ended: Future[T] = Future()
        self._loop = loop
        self._work = work
        self._calls = calls
        self._task: asyncio.Task[T] | None = None
        self._latch = Latch()  # `Future.result` takes a lock in Python code, see `Latch`

    def begin(self) -> None:
        """Begin the coroutine. In the loop."""
        if not self.ended.done():
            self._task = self._loop.create_task(self._run())
            self._task.add_done_callback(self._complete)

    async def _run(self) -> T:
        return await self._work()

    def _complete(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.ended.cancel()
        elif (error := task.exception()) is not None:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(task.result())
        self._calls.discard(self)
        self._latch.set()

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
        self.ended.cancel()
        self._calls.discard(self)
        self._latch.set()

    def wait(self, deadline: float | None) -> bool:
        """True when it has ended, False once the time is over."""
        if not self._latch.wait(None if deadline is None else deadline - time.monotonic()):
            return False
        self._latch.set()
        return True

    def wait_through(self, deadline: float | None) -> None:
        """Wait, however often the waiting is interrupted: the caller raises what the first interruption was."""
        while True:
            with suppress(KeyboardInterrupt):
                self.wait(deadline)
                return


def _other_tasks() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}
