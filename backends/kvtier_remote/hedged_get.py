"""A second get beside one that is slow: the first that is verified counts, and one of them alone writes a row."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.aio.shielded_wait import shielded_wait, wait_done
from kvtier.tier.contract import Clock
from kvtier.types.jobs import BlockOutcome, BlockStatus
from kvtier_remote.call_limit import RequestShare
from kvtier_remote.value import RemoteBlock

_SECONDS_LEAST = 0.05
_WINDOW_SECONDS = 60.0
_SAMPLES = 1024
_RENEWED_SECONDS = 1.0
_ONE_IN = 20
_AT_ONCE = 4
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
        self._share = RequestShare(_ONE_IN, _AT_ONCE)
        self._threads = DaemonPool("kvtier-hedge", 1)

    async def get(self, get: Get, block: RemoteBlock) -> BlockOutcome:
        """The outcome of a block, once no request uses its row. Not to be cancelled."""
        begun = self._clock()
        self._share.count(1)
        first = get(block)
        await asyncio.wait((first,), timeout=self._durations.patience_seconds())
        slow = not first.done() and self._share.take()
        outcome = await self._hedged(get, block, first) if slow else (await first)[0]
        if outcome.ok:
            self._durations.add(self._clock() - begun)
        return outcome

    async def _hedged(self, get: Get, block: RemoteBlock, first: Reading) -> BlockOutcome:
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
