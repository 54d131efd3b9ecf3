"""A journal before policies that follow requests: calls that return nothing wait there until an answer is needed.

Most steps of an engine notify a policy of requests and of blocks that became ready, and need no answer. These calls are
made later, in the same order, so every answer is the one that it would have been.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

ENTRIES_MAX = 128
"""Calls that wait, at most: beyond that all are made."""


class Journal:
    """Calls of the models and policies of one stack that have yet to be made, in their order.

    `added` and `done` count calls: that of number n was made once `done >= n`.
    """

    def __init__(self) -> None:
        self._calls: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()
        self.added = self.done = 0

    def add(self, call: Callable[..., None], *arguments: object) -> int:
        """Make this call later; returns its number. Nothing that is passed may change until then."""
        self._calls.append((call, arguments))
        self.added = number = self.added + 1
        if number - self.done > ENTRIES_MAX:
            self.take_in()
        return number

    def take_in(self) -> None:
        """Make every call that waits. Then models and policies may answer, until the next `add`."""
        while self._calls:
            call, arguments = self._calls.popleft()
            call(*arguments)
            self.done += 1
