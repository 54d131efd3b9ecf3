"""Hosts that share a server: each a tier with rows of its own, and weights of some version that its blocks follow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from faults.machine.tcp_proxy import TcpProxy
from kvtier.testing import TestRows
from kvtier.testing.conformance.base import ConformanceBase
from kvtier.testing.driver import Driver
from kvtier.tier.contract import LoadStore, LookupResult
from kvtier.types.geometry import GroupLayout, KVLayout, TensorRef
from kvtier.types.jobs import BlockOutcome, TransferJob
from kvtier.types.keys import OffloadKey
from kvtier.types.namespace import Namespace

from ..attack import Tally
from .server import RemoteServer

LARGE, SMALL = 0, 1
SENTINEL = 0x55
CALL_SECONDS = 60.0
"""A call that takes longer hangs; all of its requests together have less."""
AGAIN_SECONDS = 30.0


class Shape(ConformanceBase):
    """One group whose values are split, and one whose values are not."""

    layout: ClassVar[KVLayout] = KVLayout((GroupLayout((TensorRef(0, 300 << 10),)), GroupLayout((TensorRef(1, 5000),))))

    def make(self, place: Path) -> LoadStore:
        raise NotImplementedError


class Host(Driver):
    """A process on some host. `epoch`, which the content of blocks follows, is the version of its weights here;
    `resets` is the epoch of its namespace. Whatever breaks a promise is counted in `tally`."""

    tally: Tally
    resets: int

    def _job(self, *given: Any) -> TransferJob:
        return replace(super()._job(*given), epoch=self.resets)

    async def _held(self, call: Awaitable[Any], what: str) -> Any:
        try:
            return await asyncio.wait_for(call, CALL_SECONDS)
        except TimeoutError:
            self.tally.hangs += 1
            self.tally.expect(False, f"{what} took {CALL_SECONDS} s")
        except AssertionError as error:
            self.tally.wrong_bytes += 1
            self.tally.expect(False, f"{what}: {error}")
        return {}

    async def puts(self, keys: Sequence[OffloadKey], what: str = "a store") -> dict[OffloadKey, BlockOutcome]:
        """Store; nothing if that broke a promise."""
        return dict(await self._held(self.store(keys), what))

    async def gets(self, keys: Sequence[OffloadKey], what: str = "a load") -> dict[OffloadKey, BlockOutcome]:
        """Load and compare; nothing if that broke a promise."""
        return dict(await self._held(self.load(keys), what))

    async def finds(self, keys: Sequence[OffloadKey]) -> list[LookupResult]:
        """What a lookup says."""
        return list(await self._held(self.tier.lookup(keys), "a lookup"))  # type: ignore[attr-defined]

    async def update(self, version: int) -> None:
        """New weights, and the reset that goes with them."""
        self.resets += 1
        self.epoch = version
        await self.tier.reset(self.resets)  # type: ignore[attr-defined]

    async def until(self, held: Callable[[], Awaitable[bool]], what: str) -> None:
        """Repeat until it holds; a tier that does not come back counts as one that hangs."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + AGAIN_SECONDS
        while not await held():
            if loop.time() > deadline:
                self.tally.hangs += 1
                self.tally.expect(False, f"{what}: not well again after {AGAIN_SECONDS} s: {self.tier.counters}")  # type: ignore[attr-defined]
                return
            await asyncio.sleep(0.01)


@asynccontextmanager
async def host(
    tally: Tally, server: RemoteServer, version: int = 0, *, through: TcpProxy | None = None,
    namespace: Namespace | None = None, clock_ns: Callable[[], int] | None = None, **changes: Any,
) -> AsyncIterator[Host]:  # fmt: skip
    """A host with an open tier on a server, whose weights have this version."""
    suite, tier = Shape(), server.tier(through, **changes)
    if clock_ns is not None:
        tier._wall_ns = clock_ns
    context = await suite.context(tier, namespace)
    assert isinstance(context.rows, TestRows)
    try:
        one = Host(tier, await tier.open(context), context, context.rows)
        one.tally, one.resets, one.epoch = tally, one.epoch, version
        yield one
    finally:
        await tier.close()
