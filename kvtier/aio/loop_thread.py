"""An event loop in a thread of its own, for programs and engines that are not asyncio's."""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

from kvtier.aio.latch import Latch
from kvtier.aio.process_guard import ProcessGuard
from kvtier.errors import UsageError

_log = logging.getLogger(__name__)
T = TypeVar("T")

OPEN_SECONDS = 60.0
STOP_SECONDS = 10.0
AGAIN_SECONDS = 0.05


class LoopThread:
    """Runs coroutines for other threads, in the process that opened it. The thread is a daemon.

    Work is a function that makes the coroutine, and is called in the loop: so no coroutine is left that was never
    awaited, wherever an exception of a signal handler ends the call. `name` is the thread's name, `what` the owner that
    errors speak of. `at_exit` closes the owner; it is called when the interpreter ends, unless `close` was called
    before. See `weak_call` for an owner that it must not keep alive.
    """

    loop: asyncio.AbstractEventLoop
    _service: list[Callable[[], None]]

    def __init__(self, name: str, what: str, at_exit: Callable[[], object] | None = None) -> None:
        self._what = what
        self._owner = ProcessGuard()
        self._submitting = threading.Lock()
        self._serving = threading.Lock()
        self._begun = self._decided = self._stopped = self._closing = False
        self._refused: BaseException | None = None
        self._looked = Latch()
        self._calls: set[LoopCall[Any]] = set()
        self._last_task: asyncio.Task[None] | None = None
        self._at_exit = at_exit
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def open(self) -> None:
        """Start the thread, once. Raises OSError or RuntimeError if the system has no descriptor or thread to give.

        The thread makes the loop: where the exception of a signal handler cuts `socket.socketpair` short, a socket is
        lost. Call `close` also where this raises: such an exception may leave the thread started.
        """
        self._service = [self._make_loop, self._run_loop, self._end_service]
        self._owner.claim()
        if self._at_exit is not None:
            atexit.register(self._close_at_exit)
        self.thread.start()
        if not self._has_loop(OPEN_SECONDS):
            raise self._refused or RuntimeError(f"the thread of the {self._what} has no loop")

    def _has_loop(self, timeout_seconds: float) -> bool:
        """Wait until the thread has made the loop; False if it could not, or the time is over."""
        while not self._decided:
            if not self._looked.wait(timeout_seconds):
                return False
            self._looked.set()
        return hasattr(self, "loop")

    @property
    def elsewhere(self) -> bool:
        """True in a child forked from the process that opened it, where the thread does not exist."""
        return self._owner.elsewhere

    @property
    def alive(self) -> bool:
        """False before the loop is made, and once the thread has ended: nothing runs in its loop."""
        return self.thread.is_alive() and hasattr(self, "loop")

    def start(self, work: Callable[[], Coroutine[Any, Any, T]]) -> LoopCall[T]:
        """Begin a coroutine and return at once. Raises UsageError after `close` and in a forked child."""
        call = LoopCall(self.loop, work, self._calls)
        self._begin(call)
        return call

    def _begin(self, call: LoopCall[Any]) -> None:
        try:
            self._owner.check()
            with self._submitting:
                if self._closing:
                    raise UsageError(f"the {self._what} is closed")
                call.send()
        except UsageError:
            call.drop()
            raise

    def run(self, work: Callable[[], Coroutine[Any, Any, T]], timeout_seconds: float | None = None) -> T:
        """The coroutine's result, or what it raised; TimeoutError once the time is over.

        What ends the waiting early cancels the coroutine. An interruption such as Ctrl-C is raised once the coroutine
        has ended, because its buffers are in use until then, or the time is over. Raises UsageError after `close`, or
        when that ended the coroutine; never waits for a loop that has gone.
        """
        call = LoopCall(self.loop, work, self._calls)
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        try:
            self._begin(call)  # an interruption may come before this returns, with the coroutine begun
            if not call.wait(deadline):
                raise TimeoutError
            return call.ended.result(0)
        except BaseException as error:
            if not call.over:
                call.cancel()
                call.wait_through(deadline)
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
            return not self.thread.is_alive()
        atexit.unregister(self._close_at_exit)
        if not self._begins(timeout_seconds):
            return not self.thread.is_alive()
        with self._submitting:
            if self._closing:  # the loop is ending, or has ended by itself
                return not self.thread.is_alive()
            last = LoopCall(self.loop, lambda: self._wind_up(timeout_seconds), self._calls)
            try:
                self._closing = True  # before a call that this ends looks why
                last.send()
            except BaseException:
                self._closing = False
                raise
        last.wait_through(time.monotonic() + 2 * timeout_seconds)
        if self._last_task is None and last.over and not last.ended.cancelled() and last.ended.exception() is not None:
            self._closing = False  # it could not be said to the loop, as without memory: close again
        if last.over and (last.ended.cancelled() or last.ended.result()) and self.thread.is_alive():
            self.thread.join(timeout_seconds)
        return not self.thread.is_alive()

    def _begins(self, timeout_seconds: float) -> bool:
        """True if the thread has a loop. If it has not begun to make one, it ends when it tries to."""
        if self._serving.acquire(blocking=False):
            self._decided = True
        if self._has_loop(timeout_seconds):
            return True
        if self.thread.is_alive():
            self.thread.join(timeout_seconds)
        return False

    def _serve(self) -> None:
        """In the thread. A step that a lack of memory interrupted is taken again: nothing else would end the loop."""
        while self._service:
            try:
                self._service[0]()
            except MemoryError:
                time.sleep(AGAIN_SECONDS)
                continue
            except Exception:
                _log.exception("the loop of the %s has failed", self._what)
            del self._service[0]

    def _make_loop(self) -> None:
        if not self._begun and not self._serving.acquire(blocking=False):  # `close` came first
            del self._service[1:]
        else:
            self._begun = True
            self._try_to_make_loop()
        self._decided = True
        self._looked.set()

    def _try_to_make_loop(self) -> None:
        try:
            if not hasattr(self, "loop"):
                self.loop = asyncio.new_event_loop()
        except Exception as error:
            self._refused = error
            del self._service[1:]

    def _run_loop(self) -> None:
        while not self._stopped:
            # A coroutine that raises one of these ends with it, and the loop goes on: others wait for their end.
            with suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_forever()
                self._stopped = True

    def _end_service(self) -> None:
        """However the loop was stopped: nothing is sent after this, and no call waits for what will never end."""
        with self._submitting:
            self._closing = True
        self._end_tasks()
        with self._submitting:
            self._end_loop()

    def _end_tasks(self) -> None:
        """Cancel what began as the loop stopped, such as the second `close` after one that a signal interrupted."""
        if tasks := asyncio.all_tasks(self.loop):
            for task in tasks:
                task.cancel()
            with suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_until_complete(asyncio.wait(tasks, timeout=STOP_SECONDS))

    def _end_loop(self) -> None:
        for call in list(self._calls):
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
        stopped = False
        while not stopped:
            try:
                while tasks := _other_tasks():
                    await asyncio.wait(tasks)
                self.loop.stop()
                stopped = True
            except MemoryError:  # nothing else would stop the loop
                await asyncio.sleep(AGAIN_SECONDS)

    def _close_at_exit(self) -> None:
        if self._at_exit is not None and not self.elsewhere:
            self._at_exit()


class LoopCall(Generic[T]):
    """A coroutine on its way through a loop. `ended` is done when it has ended; `over` says the same without a lock.

    `calls` holds the call from `send` until it is over.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, work: Callable[[], Coroutine[Any, Any, T]], calls: set[LoopCall[Any]]
    ) -> None:
        self.ended: Future[T] = Future()
        self.over = False
        self._loop = loop
        self._work = work
        self._calls = calls
        self._task: asyncio.Task[T] | None = None
        self._latch = Latch()

    def send(self) -> None:
        """Have the coroutine begin in the loop."""
        self._calls.add(self)
        self._loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        if self.over:
            return
        work: Coroutine[Any, Any, T] | None = None
        try:
            work = self._work()
            self._task = self._loop.create_task(work)
            self._task.add_done_callback(self._complete)
        except Exception as error:  # such as no memory for a task
            if self._task is not None:
                self._task.add_done_callback(self._complete)
                return
            if work is not None:
                work.close()
            self._end(partial(self.ended.set_exception, error))

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
        self._end(self.ended.cancel)

    def _complete(self, task: asyncio.Task[T]) -> None:
        try:
            if task.cancelled():
                self._end(self.ended.cancel)
            elif (error := task.exception()) is not None:
                self._end(partial(self.ended.set_exception, error))
            else:
                self._end(partial(self.ended.set_result, task.result()))
        except Exception as failure:  # its caller waits for it, whatever happens here
            self.over = False
            self._end(partial(self.ended.set_exception, failure) if not self.ended.done() else self.ended.cancel)

    def _end(self, record: Callable[[], object]) -> None:
        try:
            if not self.over:
                record()
        finally:
            self._calls.discard(self)
            self.over = True
            self._latch.set()

    def wait(self, deadline: float | None) -> bool:
        """True when it is over, False once the time is over."""
        while not self.over:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            if self._latch.wait(left):
                self._latch.set()
        return True

    def wait_through(self, deadline: float | None) -> None:
        """Wait, however often the waiting is interrupted: what the first interruption was is raised by the caller."""
        while True:
            try:
                self.wait(deadline)
            except BaseException:
                continue
            return


def _other_tasks() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}
