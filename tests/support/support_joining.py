"""A stack behind synchronous calls, and a namespace that is completed when a test says so."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence

from support_stack import Engine, statuses, whole

from kvtier.stack import StackParts, TierStack
from kvtier.stack.watching.stats import TierStats
from kvtier.tier.contract import LookupResult
from kvtier.types.jobs import JobKind, JobResult
from kvtier.types.keys import OffloadKey
from kvtier.types.namespace import Namespace


class Identity:
    """What completes a namespace: it ends with `answer`, or with `error` if there is one."""

    def __init__(self, weights: str = "w") -> None:
        self.weights = weights
        self.error: Exception | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._named: asyncio.Future[Namespace] | None = None

    def begin(self, namespace: Namespace) -> asyncio.Future[Namespace]:
        """Call in the stack's loop: the namespace once it is known."""
        self._loop = asyncio.get_running_loop()
        self._named, self._namespace = self._loop.create_future(), namespace
        return self._named

    @property
    def cancelled(self) -> bool:
        return self._named is not None and self._named.cancelled()

    def answer(self) -> None:
        """From any thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        assert self._named is not None
        if self.error is not None:
            self._named.set_exception(self.error)
        else:
            self._named.set_result(dataclasses.replace(self._namespace, weights=self.weights))


class Driver:
    """One open stack, whose loop turns only within a call. Use it in a `with` block."""

    def __init__(self, parts: StackParts, engine: Engine, identity: Identity | None = None) -> None:
        self.parts, self.engine, self.identity = parts, engine, identity
        self._runner = asyncio.Runner()
        self.stack = TierStack(parts)

    def __enter__(self):
        self.open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def store(self, names: Sequence[OffloadKey], first: int = 0) -> list[str]:
        one = whole(names, first)
        self.engine.compute(one)
        return statuses(self._run(JobKind.STORE, one))

    def load(self, names: Sequence[OffloadKey], first: int = 0) -> list[str]:
        """Every byte of what is said to be loaded is compared."""
        one = whole(names, first)
        result = self._run(JobKind.LOAD, one)
        assert not self.engine.wrong(one, result.outcomes[0])
        return statuses(result)

    def joined(self) -> bool:
        return not self.stack._assembled.plane.control.joining

    def tier(self, name: str) -> TierStats:
        return self.stack.stats().tiers[name]

    def locate(self, names: Sequence[OffloadKey]) -> list[str | None]:
        return self.stack.locate(names)

    def refill(self, spare: Sequence[OffloadKey]) -> None:
        """Store other blocks until the rows hold nothing else, and drain them."""
        for start in range(0, len(spare), 4):
            assert self.store(spare[start : start + 4]) == ["stored"] * 4
            self.drain()

    def until(self, condition: Callable[[], bool], seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not come about in time"
            self.turn()

    def open(self) -> None:
        try:
            self._runner.run(self._open())
        except BaseException:
            self._runner.close()
            raise

    async def _open(self) -> None:
        if self.identity is not None:
            joins = self.identity.begin(self.parts.namespace)
            self.stack._parts = dataclasses.replace(self.parts, joins=joins)
        await self.stack.open()

    def close(self) -> None:
        self._runner.run(self.stack.close())
        self._runner.close()

    def turn(self) -> None:
        self._runner.run(asyncio.sleep(0.002))

    def _run(self, kind, one) -> JobResult:
        job = self.stack.job(kind, [one])
        return self._runner.run(self.stack.run(job))

    def lookup(self, names: Sequence[OffloadKey]) -> list[LookupResult]:
        return list(self._runner.run(self.stack.lookup(names)))

    def lookup_once(self, names: Sequence[OffloadKey]) -> list[LookupResult]:
        plane = self.stack._assembled.plane
        return plane.lookup(names, self.stack._clock())

    def reset(self) -> None:
        self._runner.run(self.stack.reset())

    def drain(self) -> None:
        assert self._runner.run(self.stack.drain(20.0))
