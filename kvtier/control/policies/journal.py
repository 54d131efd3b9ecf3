"""A journal before policies that follow requests: calls that only tell them something wait there until they are asked.

Most steps of an engine tell a policy of requests and of blocks that became ready, and ask it nothing. The policy takes
these calls in later, in the same order, so every answer is the one that it would have been: in the thread that asks,
or between the engine's steps in a second one (`take_in_some`). Which of them it was makes no difference to any answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

from kvtier.control.policies.base import RequestPolicy
from kvtier.types.keys import GroupIndex, OffloadKey, RequestId
from kvtier.types.requests import RequestUse

ENTRIES_MAX = 128
"""Calls that wait, at most: beyond that all are taken in."""
PIECE = 8
"""Calls that `take_in_some` takes in at once."""


class Journal:
    """The calls that the models and policies of one stack have yet to take in, in the order in which they were made.

    One thread calls `add` and `take_in`. A second one may call `take_in_some` while it holds `lock`, once that is one.
    A call that raises there leaves its policy half-way through a change: `add` and `take_in` raise it from then on.
    """

    def __init__(self) -> None:
        self.lock: AbstractContextManager[object] = nullcontext()
        self._calls: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()
        self._error: BaseException | None = None

    def add(self, call: Callable[..., None], *arguments: object) -> None:
        """Make this call later. Nothing that is passed may change until then."""
        self._calls.append((call, arguments))
        if len(self._calls) > ENTRIES_MAX or self._error is not None:
            self.take_in()

    def take_in(self) -> None:
        """Make every call that waits. Then models and policies may be asked, until the next `add`."""
        with self.lock:
            if self._error is not None:
                raise self._error
            calls = self._calls
            while calls:
                call, arguments = calls.popleft()
                call(*arguments)

    def take_in_some(self) -> bool:
        """Make some of the calls that wait; True if more are left. From a thread that holds `lock`. Never raises."""
        if self._error is not None:
            return False
        calls = self._calls
        try:
            for _ in range(min(PIECE, len(calls))):
                call, arguments = calls.popleft()
                call(*arguments)
        except BaseException as error:
            self._error = error
            return False
        return bool(calls)


class JournaledPolicy(RequestPolicy):
    """A policy behind a journal. `policy` is itself, for calls that come from the journal."""

    def __init__(self, policy: RequestPolicy, journal: Journal) -> None:
        self.policy = policy
        self._journal = journal

    # -- what tells it something: later --------------------------------------------------------------------------

    def admit(self, keys: Sequence[OffloadKey]) -> None:
        self._journal.add(self.policy.admit, keys)

    def insert(self, slots: Sequence[int]) -> None:
        self._journal.add(self.policy.insert, tuple(slots))

    def touch(self, slots: Sequence[int]) -> None:
        self._journal.add(self.policy.touch, tuple(slots))

    def renew(self, slots: Sequence[int]) -> None:
        self._journal.add(self.policy.renew, tuple(slots))

    def begin_request(self, use: RequestUse, slots: Sequence[int]) -> None:
        self._journal.add(self.policy.begin_request, use, slots)

    def extend_request(
        self, request_id: RequestId, group: GroupIndex, keys: Sequence[OffloadKey], slots: Sequence[int]
    ) -> None:
        self._journal.add(self.policy.extend_request, request_id, group, keys, slots)

    def end_request(self, request_id: RequestId, output_tokens: int | None) -> None:
        self._journal.add(self.policy.end_request, request_id, output_tokens)

    def advance(self, time: float) -> None:
        self._journal.add(self.policy.advance, time)

    # -- what is asked, or frees a slot: at once -----------------------------------------------------------------

    def recover(self, slots: Sequence[int]) -> None:
        self.policy.recover(slots)  # before all else, perhaps in another thread

    def remove(self, slots: Sequence[int]) -> None:
        self._journal.take_in()
        self.policy.remove(slots)

    def forget(self, slots: Sequence[int]) -> None:
        self._journal.take_in()
        self.policy.forget(slots)

    def evict(self, count: int, pins: Sequence[int]) -> list[int] | None:
        self._journal.take_in()
        return self.policy.evict(count, pins)

    def evict_some(self, count: int, pins: Sequence[int]) -> Sequence[int]:
        self._journal.take_in()
        return self.policy.evict_some(count, pins)

    def coldest(self) -> Iterator[int]:
        self._journal.take_in()
        return self.policy.coldest()

    def bypass(self, keys: Sequence[OffloadKey], evictions: int, pins: Sequence[int]) -> Sequence[int]:
        self._journal.take_in()
        return self.policy.bypass(keys, evictions, pins)
