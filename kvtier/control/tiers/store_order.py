"""The order in which stores were sent to a tier, kept in its recency however the stores end."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from kvtier.control.tiers.owned_tier import OwnedTier

ORDER_JOBS = 16
"""Stores of one tier that are kept in the order they were sent."""


class SentStore(Protocol):
    """A store as its order needs it: the (slot, generation) of what it stored so far, and whether it is over."""

    stored: list[tuple[int, int]]
    over: bool


class StoreOrder:
    """The last stores sent to one tier."""

    def __init__(self, owned: OwnedTier | None) -> None:
        self._owned = owned
        self._line: deque[SentStore] = deque()

    def sent(self, job: SentStore) -> None:
        self._line.append(job)
        if len(self._line) > ORDER_JOBS:
            self._line.popleft()

    def ended(self, job: SentStore) -> None:
        """The job is over. Jobs that were sent after it and ended before it hold what is more recent all the same."""
        line, owned = self._line, self._owned
        if owned is not None and job in line:
            for later in list(line)[line.index(job) + 1 :]:
                owned.reorder([slot for slot, generation in later.stored if owned.has(slot, generation)])
        job.over = True
        while line and line[0].over:
            line.popleft()
