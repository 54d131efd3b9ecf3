"""An asyncio event loop without time, threads or sockets: one seeded generator decides when everything happens.

What asyncio promises is kept: callbacks of `call_soon` run in order, timers never early. Everything else is random:
how late a timer is, and which events of disks and threads happen between two callbacks.
When nothing is ready the clock jumps to whatever comes next; when nothing comes next, that is a hang.
"""

from __future__ import annotations

import asyncio
import heapq
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextvars import Context
from random import Random
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

STEP_SECONDS = 2e-6
LATE_SECONDS = 5e-3
STEPS_MAX = 200_000
TURNS_BETWEEN_CHECKS = 16


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs one coroutine to its end, or until `stop`. `errors` holds uncaught exceptions, `hang` why the run hung."""

    def __init__(self, rng: Random, now: float = 0.0, seconds_max: float = 1000.0) -> None:
        self._rng = rng
        self._now = now
        self._until = now + seconds_max
        self._queue: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._outside: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._over = False
        self._running = False
        self._gone = False
        self._main: asyncio.Task[Any] | None = None
        self.steps = 0
        self.hang = ""
        self.errors: list[str] = []
        self.check_sometimes: Callable[[], None] = lambda: None
        self._turns = 0
        super().__init__()

    # -- running -------------------------------------------------------------------------------------------------

    def run(self, main: Coroutine[Any, Any, None]) -> bool:
        """Run a coroutine. False if it did not end: it hung (`hang` says so) or the loop was stopped."""
        before = events._get_running_loop()
        events._set_running_loop(self)
        self._running = True
        try:
            task = self._main = self.create_task(main)  # kept, so that `close` finds it
            while not (task.done() or self._over or self.hang):
                self._turn()
            if not task.done():
                return False
            failure = None if task.cancelled() else task.exception()
            if failure is not None:
                self.errors.append(f"{type(failure).__name__}: {failure}")
            return True
        finally:
            self._running = False
            events._set_running_loop(before)

    def stop(self) -> None:
        """End the run: no further callback runs."""
        self._over = True

    def close(self) -> None:
        """Unwind the coroutines that have not ended, without any effect of theirs."""
        self._over = self._gone = True
        before = events._get_running_loop()
        events._set_running_loop(self)
        try:
            ended: set[asyncio.Task[Any]] = set()
            while left := asyncio.all_tasks(self) - ended:
                for task in left:
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    _end(task.get_coro())
                ended |= left
        finally:
            events._set_running_loop(before)
        self._queue.clear()
        self._timers.clear()
        self._outside.clear()

    def _turn(self) -> None:
        if not self._queue and not self._jump():
            return
        self._run_outside()
        while self._timers and self._timers[0][0] <= self._now:
            timer = heapq.heappop(self._timers)[2]
            if not timer.cancelled():
                self._queue.append(timer)
        queue, outside = self._queue, self._outside
        for _ in range(len(queue)):
            handle = queue.popleft()
            if handle._cancelled:
                continue
            try:  # what Handle._run does, without a call more for each callback
                handle._context.run(handle._callback, *handle._args)  # type: ignore[attr-defined]
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.call_exception_handler({"message": "an exception in a callback", "exception": error})
            self.steps += 1
            self._now += STEP_SECONDS
            if outside and outside[0][0] <= self._now:
                self._run_outside()
            if self._over:
                return
        if self.steps > STEPS_MAX:
            self.hang = f"more than {STEPS_MAX} callbacks ran"
        self._turns += 1
        if not self._turns % TURNS_BETWEEN_CHECKS:
            self.check_sometimes()

    def _jump(self) -> bool:
        """Move the clock to the next thing that happens. False if that is nothing, or too far away."""
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        times = [heap[0][0] for heap in (self._timers, self._outside) if heap]
        if not times:
            self.hang = "a task waits, and no event is pending"
        elif min(times) > self._until:
            self.hang = f"not done after {self._until:.0f} s"
        else:
            self._now = max(self._now, min(times))
        return not self.hang

    def _run_outside(self) -> None:
        while self._outside and self._outside[0][0] <= self._now and not self._over:
            heapq.heappop(self._outside)[2]()

    def outside(self, delay_seconds: float, event: Callable[[], None]) -> None:
        """Schedule an event of a disk or a thread: it happens at its own time, between any two callbacks."""
        if not self._over:
            heapq.heappush(self._outside, (self._now + delay_seconds, self._next(), event))

    def _next(self) -> int:
        """Orders what is due at one time: randomly, then by arrival."""
        self._sequence += 1
        return self._rng.getrandbits(20) << 32 | self._sequence

    # -- what asyncio asks of a loop -----------------------------------------------------------------------------

    def time(self) -> float:
        return self._now

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        if not self._gone:
            self._queue.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        late = self._rng.random() * LATE_SECONDS if self._rng.random() < 0.2 else 0.0
        if not self._gone:
            heapq.heappush(self._timers, (when + late, self._next(), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are skipped when their time comes."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: object = None, context: Context | None = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(
            coro, loop=self, name=name if name is None else str(name), context=context
        )
        if self._gone:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            coro.close()
        return task

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        if executor is None:
            self.errors.append(f"{func} was given to the default executor")
            raise RuntimeError("a simulated process has no default executor")
        return asyncio.wrap_future(executor.submit(func, *args), loop=self)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._over:
            error = context.get("exception")
            self.errors.append(f"{context.get('message')}: {type(error).__name__}: {error}")

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._gone


def _end(coroutine: Any) -> None:
    """Unwind a coroutine of a closed loop. It may await and raise; nothing is delivered."""
    for _ in range(100):
        try:
            coroutine.close()
            return
        except BaseException:
            continue
