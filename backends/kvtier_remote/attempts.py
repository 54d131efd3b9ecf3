"""Calls of a transport as a tier makes them: a bounded number at once, and again where that may help.

Beside a get that is slow a second one is made: the first that is verified counts, and one of them alone writes a row.
"""

from __future__ import annotations

import asyncio
import errno
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.aio.shielded_wait import shielded_wait, wait_done
from kvtier.tier.contract import Clock
from kvtier.types.jobs import BlockOutcome, BlockStatus
from kvtier_remote.call_limit import CallLimit, RequestShare
from kvtier_remote.value import RemoteBlock

_SECONDS_LEAST = 0.05
_WINDOW_SECONDS = 60.0
_SAMPLES = 1024
_RENEWED_SECONDS = 1.0
_HEDGED_ONE_IN = 20
_HEDGED_AT_ONCE = 4
_FINAL = (BlockStatus.LOADED, BlockStatus.MISSING)


class Durations:
    """Durations of the gets of the last minute: at most the last 1,024 of them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, float]] = deque(maxlen=_SAMPLES)
        self._patience_seconds = _SECONDS_LEAST
        self._renew_at = 0.0

    def add(self, seconds: float) -> None:
        """A get has ended."""
        self._samples.append((self._clock(), seconds))

    def patience_seconds(self) -> float:
        """The time after which a second get is worth it: longer than 95 of 100 took, and at least 50 ms."""
        now = self._clock()
        if now >= self._renew_at:
            self._renew_at = now + _RENEWED_SECONDS
            recent = sorted(seconds for at, seconds in self._samples if now - at <= _WINDOW_SECONDS)
            late = recent[len(recent) * 95 // 100] if recent else 0.0
            self._patience_seconds = max(_SECONDS_LEAST, late)
        return self._patience_seconds


Reading = asyncio.Future[list[BlockOutcome]]
Get = Callable[[RemoteBlock], Reading]
"""Begins to read and verify one block. When it is cancelled, the block's memory is soon no longer in use."""


async def _first_final(first: Reading, second: Reading) -> Reading:
    """The first that loaded a block or found none. The first one if both failed."""
    pending = {first, second}
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for one in done:
            if one.exception() is None and one.result()[0].status in _FINAL:
                return one
    return first


class HedgedGets:
    """Gets of one block each, the slow ones twice: at most one get in 20, and 4 in a row.

    The second reads into memory of its own, which is copied to the row once the first has ended. `counters`: `hedged`,
    and `hedged.won` for those that were needed.
    """

    def __init__(self, clock: Clock, counters: Counter[str]) -> None:
        self._clock = clock
        self._counters = counters
        self._durations = Durations(clock)
        self._share = RequestShare(_HEDGED_ONE_IN, _HEDGED_AT_ONCE)
        self._threads = DaemonPool("kvtier-hedge", 1)

    async def get(self, get: Get, block: RemoteBlock) -> BlockOutcome:
        """The outcome of a block, once no request uses its row. Not to be cancelled."""
        begun = self._clock()
        self._share.count(1)
        first = get(block)
        await asyncio.wait((first,), timeout=self._durations.patience_seconds())
        slow = not first.done() and self._share.take()
        outcome = await self._hedge(get, block, first) if slow else (await first)[0]
        if outcome.ok:
            self._durations.add(self._clock() - begun)
        return outcome

    async def _hedge(self, get: Get, block: RemoteBlock, first: Reading) -> BlockOutcome:
        self._counters["hedged"] += 1
        memory = np.empty(len(block.value.payload), np.uint8)
        spare = replace(block, value=block.value._replace(payload=memory.data))
        second = get(spare)
        won = await _first_final(first, second)
        for other in (first, second):
            if other is not won:
                other.cancel()
                await wait_done(other)
        if won is second:
            await shielded_wait(self._threads.run(np.copyto, np.frombuffer(block.value.payload, np.uint8), memory))
            block.found = spare.found
            self._counters["hedged.won"] += 1
        return won.result()[0]

    async def close(self, timeout_seconds: float) -> int:
        """Returns how many threads are stuck at the deadline. Idempotent."""
        return await self._threads.close(timeout_seconds)


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
            return await shielded_wait(self._make(number, call, blocks, refusal))
        finally:
            self.limit.end(payload_bytes)

    async def _make(self, number: int, call: Call[T], blocks: Sequence[T], refusal: Refusal) -> list[BlockOutcome]:
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
