"""Everything at once on real tiers, over several lives: right bytes or a miss, and no slot lost."""

from __future__ import annotations

import asyncio
import random

import pytest
from support_stack import HYBRID, PLAIN, Engine, fs, held, keys, load, running, stack_file, statuses, until, whole
from support_stack_tiers import LOAD, STORE

from kvtier.types.geometry import KVLayout
from kvtier.types.keys import RequestId

CLIENTS = 4
BLOCKS = 24

STACKS: dict[str, tuple[KVLayout, int, str, list[dict[str, object]]]] = {
    "one row": (PLAIN, 1, "lru", [{}]),
    "three rows, on_evict": (PLAIN, 3, "lru", [{"write_policy": "on_evict"}]),
    "arc, small disk": (PLAIN, 16, "arc", [{"capacity": 512 << 10, "policy": "arc"}]),
    "two disks": (PLAIN, 12, "lru", [{"write_policy": "on_evict", "capacity": 1 << 20}, {}]),
    "hybrid, regions formatted anew": (HYBRID, 8, "lru", [{"capacity": 1 << 20, "region_bytes": 128 << 10}]),
    "io_uring": (HYBRID, 24, "lru", [{"io_engine": "auto", "direct": "auto"}]),
    "no disk": (PLAIN, 10, "lru", []),
}
"""(layout, rows, policy, disks) of each stack."""

ALLOWED = {
    LOAD: {"loaded", "missing", "late", "cancelled"},
    STORE: {"stored", "present", "dropped:no_row", "late", "cancelled", "dropped:closing"},
}


class Client:
    """One user of a stack with GPU blocks of its own; it checks every byte it is given."""

    def __init__(self, stack, engine: Engine, number: int, rng: random.Random) -> None:
        self.stack, self.engine, self.number, self.rng = stack, engine, number, rng
        self.first = number * BLOCKS * engine.factor
        self.seen: set[str] = set()

    def some(self):
        group = self.rng.randrange(len(self.engine.layout.groups))
        names = keys(120, group)
        return whole(self.rng.sample(names, self.rng.randint(1, BLOCKS)), self.first, self.engine.factor)

    async def work(self, steps: int) -> None:
        for _ in range(steps):
            action = self.rng.choice(
                [self.store, self.store, self.load, self.load, self.cancel, self.request, self.look]
            )
            await action()

    async def store(self) -> None:
        one = self.some()
        self.engine.compute(one)
        result = await self.stack.run(self.stack.job(STORE, [one], timeout_seconds=self.rng.choice([0.01, 20.0])))
        self.note(STORE, result)

    async def load(self) -> None:
        timeout_seconds = self.rng.choice([0.005, 20.0, 20.0])
        self.note(LOAD, await load(self.stack, self.engine, self.some(), timeout_seconds=timeout_seconds))

    async def cancel(self) -> None:
        one, kind = self.some(), self.rng.choice([LOAD, STORE])
        self.engine.compute(one)
        job = self.stack.job(kind, [one])
        task = asyncio.create_task(self.stack.run(job))
        await asyncio.sleep(self.rng.random() * 0.002)
        task.cancel()
        await asyncio.wait((task,))
        if kind is LOAD and not task.cancelled():
            assert not self.engine.wrong(one, task.result().outcomes[0])

    async def request(self) -> None:
        """Ask for blocks, load the longest prefix that was leased, let go."""
        one, request = self.some(), self.stack.request(RequestId(f"client {self.number}"))
        reservation = request.reserve(one.keys)
        for _ in range(self.rng.randint(0, 20)):
            await asyncio.sleep(0.0005)
        hits = reservation.hits()
        prefix = hits.index(False) if False in hits else len(hits)
        if prefix and not reservation.ended:
            part = whole(one.keys[:prefix], self.first, self.engine.factor)
            result = await self.stack.run(self.stack.job(LOAD, [part]), self.rng.choice([None, request]))
            assert not self.engine.wrong(part, result.outcomes[0])
            self.note(LOAD, result)
        request.end()

    async def look(self) -> None:
        one = self.some()
        answers = await self.stack.lookup(one.keys)
        assert len(answers) == len(one.keys)
        self.stack.request(RequestId("looks")).touch(one.keys)

    def note(self, kind, result) -> None:
        seen = set(statuses(result))
        assert seen <= ALLOWED[kind]
        self.seen |= seen


async def live(config, engine: Engine, rng: random.Random, steps: int) -> set[str]:
    seconds = {"close_timeout_seconds": rng.choice([0.0, 0.05, 10.0]), "reservation_seconds": 1.0, "lease_seconds": 1.0}
    async with running(config, engine, **seconds) as stack:
        clients = [Client(stack, engine, number, rng) for number in range(CLIENTS)]
        async with asyncio.timeout(120):
            await asyncio.gather(*(client.work(steps) for client in clients))
        busy = ("filling", "quarantined")
        await until(lambda: not any(slots[s] for name, slots in held(stack).items() for s in busy if name == "cpu"))
        stack.check_integrity()
    return set.union(*(client.seen for client in clients))


async def run(tmp_path, seed: int, name: str, lives: int, steps: int) -> None:
    rng = random.Random(seed)
    layout, rows, policy, disks = STACKS[name]
    engine = Engine(layout, CLIENTS * BLOCKS * layout.block_size_factor)
    lowers = [fs(tmp_path / f"r{i}", name=f"disk-{i}", **more) for i, more in enumerate(disks)]
    config = stack_file(layout, rows, *lowers, cpu={"policy": policy, "verify_loads": "true"})
    seen: set[str] = set()
    for _ in range(lives):
        seen |= await live(config, engine, rng, steps)
    assert {"stored", "loaded", "missing"} <= seen


@pytest.mark.parametrize("name", STACKS)
async def test_everything_at_once(tmp_path, seed, name):
    await run(tmp_path, seed, name, lives=2, steps=10)


@pytest.mark.long
@pytest.mark.parametrize("name", STACKS)
async def test_everything_at_once_for_long(tmp_path, seed, name):
    await run(tmp_path, seed, name, lives=40, steps=60)
