"""A journal before policies that follow requests: calls that return nothing wait there until an answer is needed.

Most steps of an engine notify a policy of requests and of blocks that became ready, and need no answer. These calls are
made later, in the same order, so every answer is the one that it would have been: in the thread that needs it, or
between the engine's steps in a second one (`take_in_some`). Which of them it was makes no difference to any answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

ENTRIES_MAX = 128
"""Calls that wait, at most: beyond that all are made."""
PIECE = 8
"""Calls that `take_in_some` makes at once."""


class Journal:
    """Calls of the models and policies of one stack that have yet to be made, in their order.

    One thread calls `add` and `take_in`. A second one may call `take_in_some` while it holds `lock`, once that is one.
    A call that raises there leaves its policy half-way through a change: `add` and `take_in` raise it from then on.
    `added` and `done` count calls: that of number n was made once `done >= n`.
    """

    def __init__(self) -> None:
        self.lock: AbstractContextManager[object] = nullcontext()
        self._calls: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()
        self._error: BaseException | None = None
        self.added = self.done = 0

    def add(self, call: Callable[..., None], *arguments: object) -> int:
        """Make this call later; returns its number. Nothing that is passed may change until then."""
        self._calls.append((call, arguments))
        self.added = number = self.added + 1
        if number - self.done > ENTRIES_MAX or self._error is not None:
            self.take_in()
        return number

    def take_in(self) -> None:
        """Make every call that waits. Then models and policies may answer, until the next `add`."""
        with self.lock:
            if self._error is not None:
                raise self._error
            while self._calls:
                self._make_next()

    def take_in_some(self) -> bool:
        """Make some of the calls that wait; True if more are left. From a thread that holds `lock`. Never raises."""
        if self._error is not None:
            return False
        try:
            for _ in range(min(PIECE, len(self._calls))):
                self._make_next()
        except BaseException as error:
            self._error = error
            return False
        return bool(self._calls)

    def _make_next(self) -> None:
        call, arguments = self._calls.popleft()
        call(*arguments)
        self.done += 1
