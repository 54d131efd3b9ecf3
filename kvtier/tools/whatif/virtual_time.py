"""Virtual time: an event loop of asyncio whose clock jumps to the next timer. It waits for nothing."""

from __future__ import annotations

import asyncio
from selectors import SelectorKey, SelectSelector
from typing import Any

from kvtier.errors import IntegrityError


class _Clock(SelectSelector):
    """The part of a loop that waits: time passes at once. `idle` is set where nothing is left to happen."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.idle: asyncio.Future[None] | None = None
        self.error: BaseException | None = None

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        error, self.error = self.error, None
        if error is not None:
            raise error
        if timeout is not None:
            self.now += timeout
        elif self.idle is not None:
            self.idle.set_result(None)
            self.idle = None
        else:
            raise IntegrityError("a simulation waits, and nothing is left to happen")
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose time begins at 0. What a callback raises ends the run."""

    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Raise the exception of a callback from the run."""
        self._clock.error = context.get("exception")

    async def idle(self) -> None:
        """Wait until nothing is left to happen."""
        self._clock.idle = self.create_future()
        await self._clock.idle
