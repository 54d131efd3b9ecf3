"""Calls of a transport as a tier makes them: a bounded number at once, and again where that may help."""

from __future__ import annotations

import asyncio
import errno
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from kvtier.aio.shielded_wait import shielded_wait
from kvtier.types.jobs import BlockOutcome
from kvtier_remote.call_limit import CallLimit, RequestShare

OVERLOADED = (errno.EBUSY, errno.ETIMEDOUT)
"""After these fewer calls are made at once."""
REPEATED = (errno.EBUSY, errno.ECONNRESET)
"""Errors of calls that were refused for now, or cut. A block is the same bytes whenever it is read or written, so that
a request can be repeated that may have reached the server. What has timed out is not: it would cost a job that time
once more."""
_PAUSES_SECONDS = (0.05, 0.2)
_ONE_IN = 10
_AT_ONCE = 10
T = TypeVar("T")
Call = Callable[[Sequence[T]], Awaitable[list[BlockOutcome]]]
Refusal = Callable[[float], BlockOutcome | None]
"""The reason why nothing may begin that many seconds from now; None if it may."""


class Attempts:
    """Makes calls, as many at once as the server bears, and repeats blocks: one for every ten of the jobs, up to twice
    each, after a random pause.

    `counters`: `requested` (blocks, those that are repeated left out), `overloaded` (the limit was halved), `repeated`
    (blocks).
    """

    def __init__(
        self, limit: CallLimit, counters: Counter[str], random_number: Callable[[], float] = random.random
    ) -> None:
        self.limit = limit
        self._counters = counters
        self._random_number = random_number
        self._share = RequestShare(_ONE_IN, _AT_ONCE)

    async def make(
        self, call: Call[T], blocks: Sequence[T], refusal: Refusal, payload_bytes: int
    ) -> list[BlockOutcome]:
        """The outcomes of the blocks of a call. A cancellation is raised once the call has ended."""
        number = await self.limit.begin(payload_bytes)
        try:
            refused = refusal(0.0)
            if refused is not None:
                return [refused] * len(blocks)
            return await shielded_wait(self._made(number, call, blocks, refusal))
        finally:
            self.limit.end(payload_bytes)

    async def _made(self, number: int, call: Call[T], blocks: Sequence[T], refusal: Refusal) -> list[BlockOutcome]:
        self._share.count(len(blocks))
        self._counters["requested"] += len(blocks)
        outcomes = await call(blocks)
        self._judge(number, outcomes)
        for most in _PAUSES_SECONDS:
            again = [position for position, outcome in enumerate(outcomes) if outcome.errno in REPEATED]
            pause = most * self._random_number()
            if not again or refusal(pause) is not None:
                break
            again = [position for position in again if self._share.take()]
            await asyncio.sleep(pause)
            if not again or refusal(0.0) is not None:
                break
            self._counters["repeated"] += len(again)
            repeated = await call([blocks[position] for position in again])
            self._judge(number, repeated)
            for position, outcome in zip(again, repeated, strict=True):
                outcomes[position] = outcome
        return outcomes

    def _judge(self, number: int, outcomes: Sequence[BlockOutcome]) -> None:
        overloaded = any(outcome.errno in OVERLOADED for outcome in outcomes)
        if self.limit.judge(number, overloaded):
            self._counters["overloaded"] += 1
