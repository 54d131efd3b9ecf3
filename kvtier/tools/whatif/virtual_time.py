"""Virtual time: callbacks in the order of their times, and coroutines that wait for them. No clock, no threads.

Everything is deterministic: what is due at the same time runs in the order of the calls that scheduled it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any


class Waiting:
    """An awaitable that coroutines of one `VirtualTime` wait for until it is set."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self._is_set = False
        self._waiting: list[Coroutine[Any, Any, Any]] = []

    def set(self) -> None:
        """Let everything that waits go on, at this time and in its order."""
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for coroutine in waiting:
            self._time.call_at(self._time.now, partial(self._time.step, coroutine))

    def add(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Have a coroutine wait too."""
        self._waiting.append(coroutine)

    def __await__(self) -> Generator[Waiting, None, None]:
        if not self._is_set:
            yield self


class VirtualTime:
    """`now` in seconds, moved on by `run` from one event to the next."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._coroutines: dict[Coroutine[Any, Any, Any], None] = {}

    def call_at(self, time: float, callback: Callable[[], object]) -> None:
        """Call it at a time, or now if that has passed."""
        heapq.heappush(self._events, (max(time, self.now), next(self._numbers), callback))

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Begin a coroutine, which may await `Waiting` and `sleep` of this time only."""
        self._coroutines[coroutine] = None
        self.call_at(self.now, partial(self.step, coroutine))

    def step(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine to where it waits next. What it raises ends the whole `run`."""
        try:
            waited = coroutine.send(None)
        except StopIteration:
            del self._coroutines[coroutine]
            return
        waited.add(coroutine)

    async def sleep(self, seconds: float) -> None:
        """Wait for a time span."""
        if seconds > 0:
            over = Waiting(self)
            self.call_at(self.now + seconds, over.set)
            await over

    def run(self) -> None:
        """Until nothing is left to do. Coroutines that wait then, or when one raises, are closed."""
        events = self._events
        try:
            while events:
                self.now, _, callback = heapq.heappop(events)
                callback()
        finally:
            for coroutine in self._coroutines:
                coroutine.close()


class VirtualCondition:
    """In place of an `asyncio.Condition`. There is nothing to lock: a step is never interrupted."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self._changed = Waiting(time)

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, *error: object) -> None:
        return None

    async def wait(self) -> None:
        """Until `notify_all`."""
        await self._changed

    def notify_all(self) -> None:
        """Wake all that wait."""
        changed, self._changed = self._changed, Waiting(self._time)
        changed.set()
