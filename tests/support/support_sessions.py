"""A pool without sockets and without real copies, and engines that send it items by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from kvtier.control.settings import StackSettings
from kvtier.control.tiers.slot_table import FREE, LENT, QUARANTINED, READY
from kvtier.service import wire
from kvtier.service.pool import Pool
from kvtier.service.session import Session
from kvtier.service.wire import Hello, Keys, Places
from kvtier.stack.assembly import StackParts
from kvtier.testing.memory import MemoryOptions, MemoryStorage, MemoryTier
from kvtier.types.geometry import KVLayout
from kvtier.types.keys import OffloadKey, make_key
from kvtier.types.namespace import Namespace
from simulator.service.rows import ServiceCPU, ServiceCPUOptions

PAGE = 64


def names(*numbers: int, group: int = 0) -> list[OffloadKey]:
    """Keys by numbers."""
    return [make_key(number.to_bytes(8, "big"), group) for number in numbers]


class PoolWorld:
    """A pool, and what its sessions were sent."""

    def __init__(
        self,
        rows: int = 64,
        layout: KVLayout | None = None,
        lower: int = 0,
        storage: MemoryStorage | None = None,
        **settings: Any,
    ) -> None:
        self.layout = layout or KVLayout.of_pages(PAGE)
        tiers: list[Any] = [ServiceCPU(ServiceCPUOptions(rows=rows))]
        if lower:
            below = MemoryOptions(capacity=lower * PAGE * self.layout.world_size, slots_per_region=lower // 2)
            tiers.append(MemoryTier(below, storage))
        parts = StackParts(tiers, Namespace(self.layout), settings=StackSettings(**settings))
        self.pool = Pool(parts, self._send)
        self.engines: list[HandEngine] = []

    def _send(self, sessions: Sequence[Session]) -> None:
        for engine in [each for each in self.engines if each.session in sessions]:
            engine.items += engine.session.take_items()
            engine.questions += engine.session.take_questions()

    @property
    def table(self) -> Any:
        """The slots of the rows."""
        return self.pool.plane.control.cpu.table

    def counts(self) -> dict[str, int]:
        """How many rows are free, ready, lent or in quarantine."""
        states = {"free": FREE, "ready": READY, "lent": LENT, "quarantined": QUARANTINED}
        return {name: self.table.counts[state] for name, state in states.items()}

    def pinned(self) -> list[int]:
        """Rows that are pinned."""
        return [row for row in range(len(self.table)) if self.table.pins[row]]

    async def turn(self) -> None:
        """Let what was decided go on, until nothing moves any more."""
        for _ in range(50):
            await asyncio.sleep(0)
        self.pool.check_integrity()

    async def engine(self, model: str = "m", joins: bool = True, rows: int = 0, **hello: Any) -> HandEngine:
        """An engine that has connected; `joins`: with a complete greeting. With `rows` it was lent so many at least."""
        engine = HandEngine(self, model, joins, hello)
        self.engines.append(engine)
        engine.connect()
        if joins:
            await engine.joined()
        if rows:
            engine.send(wire.Want(rows))
            await engine.wait(lambda: len(engine.lent()) >= min(rows, self.pool.quotas.lent_most))
        return engine


class HandEngine:
    """An engine whose items a test writes itself. `items` are those that came and were not taken."""

    def __init__(self, world: PoolWorld, model: str, joins: bool, hello: dict[str, Any]) -> None:
        self.world = world
        self.manifest = Namespace(world.layout, model=model).manifest().encode()
        self.session: Session = world.pool.begin_session()
        self.items: list[Any] = []
        self.questions: list[Any] = []
        self._joins = joins
        self._hello = hello
        self._places: list[tuple[int, int]] = []
        self.job = self.number = 0

    def connect(self) -> None:
        """All workers, then the scheduler."""
        for worker in range(self.world.layout.world_size):
            self.world.pool.on_worker(self.session, self._greeting("worker", worker))
        self.world.pool.on_scheduler(self.session, self._greeting("scheduler", 0))

    def _greeting(self, role: str, participant: int) -> Hello:
        note = f"note {participant}"
        return Hello([1], "", role, participant, "", "t", self.manifest, note, self._joins, **self._hello)

    async def wait(self, what: Callable[[], object]) -> None:
        """Until this is true; the tiers open and write in their own time."""
        while not what():  # noqa: ASYNC110 - the tiers tell nobody
            await asyncio.sleep(0.001)

    async def joined(self) -> wire.Joined:
        """The answer to joining, which stays among the items."""
        await self.wait(lambda: any(isinstance(item, wire.Joined) for item in self.items))
        await self.world.turn()
        return next(item for item in self.items if isinstance(item, wire.Joined))

    def send(self, *items: Any) -> None:
        """Send items in one message."""
        self.world.pool.handle(self.session, items)

    def report(self, job: int, *runs: tuple[int, int], worker: int | None = None) -> None:
        """A worker's report, or that of all of them."""
        for each in range(self.world.layout.world_size) if worker is None else [worker]:
            self.world.pool.on_worker_items(self.session, each, [wire.Copied(job, list(runs))])

    def take(self, kind: type[Any]) -> list[Any]:
        """The items of a kind that have come."""
        found = [item for item in self.items if isinstance(item, kind)]
        self.items = [item for item in self.items if not isinstance(item, kind)]
        return found

    def lent(self) -> list[tuple[int, int]]:
        """(row, generation) of what is lent and was not used."""
        for item in self.take(wire.Lent):
            rows, generations = item.places.unpack()
            self._places += zip(rows.tolist(), generations.tolist(), strict=True)
        return self._places

    def fill(self, keys: Sequence[OffloadKey]) -> int:
        """Begin a copy of blocks into lent rows; its number."""
        places = [self.lent().pop(0) for _ in keys]
        self.job += 1
        self.send(wire.Fill(self.job, Keys.of(keys), Places.of(*zip(*places, strict=True))))
        return self.job

    async def store(self, *numbers: int) -> list[tuple[int, str, str, int]]:
        """Store blocks, once there are rows for them; what became of them."""
        await self.wait(lambda: len(self.lent()) >= len(numbers))
        job = self.fill(names(*numbers))
        self.report(job, (len(numbers), 0))
        return await self.ended(job)

    async def ended(self, job: int) -> list[tuple[int, str, str, int]]:
        """The outcomes of a job."""
        await self.world.turn()
        return [run for item in self.take(wire.Ended) if item.job == job for run in item.outcomes]

    def ask(self, request: str, *numbers: int) -> wire.Found:
        """Look keys up; the answer."""
        self.number += 1
        self.send(wire.Ask(request, self.number, Keys.of(names(*numbers))))
        found: wire.Found = next(
            each for each in self.items if isinstance(each, wire.Found) and each.number == self.number
        )
        self.items.remove(found)
        return found

    async def reserve(self, request: str, *numbers: int) -> list[wire.Found]:
        """Reserve keys; the answer, if it has come."""
        self.number += 1
        self.send(wire.Reserve(request, self.number, Keys.of(names(*numbers))))
        await self.world.turn()
        return self.take(wire.Found)

    def load(self, request: str, places: Places) -> int:
        """Begin a copy out of leased rows; its number."""
        self.job += 1
        self.send(wire.Load(self.job, request, places))
        return self.job

    def lose(self) -> None:
        """The connection has ended."""
        self.world.pool.end_session(self.session, exited=False)

    def exit(self) -> None:
        """All processes have exited."""
        self.world.pool.end_session(self.session, exited=True)
        self.world.engines.remove(self)


@asynccontextmanager
async def pool_world(**given: Any) -> AsyncIterator[PoolWorld]:
    """An open pool."""
    world = PoolWorld(**given)
    await world.pool.open()
    try:
        yield world
    finally:
        await world.pool.close()
