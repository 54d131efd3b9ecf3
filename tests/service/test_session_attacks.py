"""Mutated messages and lies about rows against a session: no other session is harmed, and all rows come back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec
import pytest
from support_sessions import PAGE, HandEngine, PoolWorld, names, pool_world

from kvtier.errors import UsageError
from kvtier.service import wire
from kvtier.service.wire import FROM_ENGINE, FROM_WORKER, Breach, Codec, Item, Keys, Places, WireError
from kvtier.types.geometry import KVLayout

NUMBERS = (0, 1, -1, 2, 63, 64, 1024, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, -(2**63), 10**30)
REFUSED = (Breach, WireError, UsageError)


class Attacker:
    """An engine that works as others do, and then says something else."""

    def __init__(self, world: PoolWorld, engine: HandEngine, rng: Random, covered: Counter[str]) -> None:
        self.world = world
        self.engine = engine
        self.rng = rng
        self.covered = covered
        self.asked: dict[int, str] = {}
        self.leased: dict[str, Places] = {}
        self.open: dict[int, int] = {}

    def item(self) -> Item:
        """A valid item of its state."""
        rng, engine = self.rng, self.engine
        keys = names(*rng.sample(range(20), rng.randint(1, 3)))
        engine.number += 1
        request = f"r{rng.randrange(6)}"
        kinds = ["ask", "reserve", "drop", "want", "begin", "extend", "end", "hint", "computed", "announce", "stats"]
        kind = rng.choice([*kinds, *["fill", "load", "return"] * 3])
        if kind == "fill" and len(engine.lent()) >= len(keys):
            places = [engine.lent().pop(0) for _ in keys]
            engine.job += 1
            self.open[engine.job] = len(keys)
            self.covered["fills"] += 1
            return wire.Fill(engine.job, Keys.of(keys), Places.of(*zip(*places, strict=True)))
        if kind == "load" and self.leased:
            request, places = self.leased.popitem()
            engine.job += 1
            self.open[engine.job] = len(places.rows) // 4
            self.covered["loads"] += 1
            return wire.Load(engine.job, request, places)
        if kind == "return" and engine.lent():
            place = engine.lent().pop()
            return wire.Return(Places.of([place[0]], [place[1]]))
        if kind in ("ask", "reserve"):
            self.asked[engine.number] = request
        hint = rng.choice(("retain", "pin", "prefetch", "demote", "release"))
        items: dict[str, Item] = {
            "ask": wire.Ask(request, engine.number, Keys.of(keys)),
            "reserve": wire.Reserve(request, engine.number, Keys.of(keys)),
            "drop": wire.Drop(request),
            "want": wire.Want(rng.randrange(100)),
            "begin": wire.Begin(request, Keys.of(keys), {"tenant": "t"}, rng.random() < 0.2),
            "extend": wire.Extend(request, Keys.of(keys)),
            "end": wire.End(request, 5, 6, Keys.of(keys), 0.5, rng.random() < 0.2),
            "hint": wire.Hint(hint, Keys.of(keys), "s", 0.5),
            "computed": wire.Computed(32, 0.2, 0.1),
            "announce": wire.Announce(Keys.of(keys)),
            "stats": wire.AskStats(),
        }
        return items.get(kind, items["ask"])

    def take_in(self) -> None:
        """Note what it was leased."""
        self.engine.lent()
        for item in self.engine.take(wire.Found):
            request = self.asked.pop(item.number, "")
            if len(item.places.rows):
                self.leased[request if self.rng.random() < 0.9 else "r0"] = item.places
        self.covered["jobs ended"] += len(self.engine.take(wire.Ended))
        self.engine.items.clear()

    def mutated(self, item: Item) -> Any:
        """The item with a value that was changed, of a type that the protocol allows there."""
        fields = list(msgspec.structs.asdict(item).items())
        if not fields:
            return item
        name, value = self.rng.choice(fields)
        try:
            return msgspec.structs.replace(item, **{name: self._other(value)})
        except (TypeError, OverflowError, ValueError):
            return item

    def _other(self, value: Any) -> Any:
        rng = self.rng
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return rng.choice((*NUMBERS, value + 1, value - 1))
        if isinstance(value, float):
            return rng.choice((-1.0, 0.0, 1e300, float("inf"), float("nan"), -value))
        if isinstance(value, str):
            return rng.choice(("", "r0", "r1", "x" * 5000, "\0", "retain", value + "1"))
        if isinstance(value, Keys):
            wrong = (0, b""), (1, b"abc"), (12, b"abcd" * 3), (0, b"\xff\xff"), (36, b"x"), (-4, b"abcd")
            return Keys(*rng.choice(wrong))
        if isinstance(value, Places):
            rows, generations = value.unpack()
            row = rng.randrange(-1, len(self.world.table) + 1)
            changed = [
                Places.of([row], [1]),
                Places.of([row], self.world.table.generations[row : row + 1] if 0 <= row < 64 else [0]),
                Places(value.rows, b""),
                Places(value.rows[:-1], value.generations),
                Places.of([*rows, *rows], [*generations, *generations]),
                Places.of(rows, generations + 1),
            ]
            return rng.choice(changed)
        return rng.choice(({}, {"session": 5}, {"colour": "x"}, None, []))

    def report(self) -> tuple[int, Item]:
        """A worker's report, true or not."""
        rng, layout = self.rng, self.world.layout
        worker = rng.randrange(layout.world_size)
        if self.open and rng.random() < 0.97:
            job = rng.choice(list(self.open))
            blocks = self.open[job] if rng.random() < 0.97 else rng.choice((1, 2, 3))
            return worker, wire.Copied(job, [(blocks, 0)], rng.random() < 0.02)
        verdict = rng.choice(NUMBERS[:4])
        number = rng.choice(NUMBERS[:9])
        reports = wire.Copied(number, [(1, 0)]), wire.Answer(1, verdict), wire.Copied(1, [(number, 0)]), wire.Loaded()
        return worker, rng.choice(reports)


def scrambled(rng: Random, items: Sequence[Item], codec: Codec) -> list[Any]:
    """What a peer reads from messages in which bytes were changed. Raises WireError."""
    found: list[Any] = []
    for message in codec.encode(items, 0):
        data = bytearray(message)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data))
            choice = rng.random()
            if choice < 0.6:
                data[at] = rng.randrange(256)
            elif choice < 0.8:
                del data[at:]
                break
            else:
                data[at:at] = rng.randbytes(rng.randint(1, 8))
        found += codec.decode(bytes(data))[1]
    return found


def sent(item: Item) -> list[Any]:
    """What a peer reads of an item. Raises WireError for one whose values are of other types."""
    try:
        return [each for message in FROM_ENGINE.encode([item], 0) for each in FROM_ENGINE.decode(message)[1]]
    except OverflowError:  # a number that no message holds
        return []


async def attack(world: PoolWorld, rng: Random, messages: int, covered: Counter[str]) -> None:
    """Send so many messages as one attacker after another."""
    attacker: Attacker | None = None
    for number in range(messages):
        if attacker is None:
            attacker = Attacker(world, await world.engine(), rng, covered)
            attacker.engine.send(wire.Want(6))
        attacker.take_in()
        try:
            if rng.random() < (0.5 if attacker.open else 0.03):
                worker, report = attacker.report()
                items = scrambled(rng, [report], FROM_WORKER) if rng.random() < 0.05 else [report]
                world.pool.on_worker_items(attacker.engine.session, worker, items)
            else:
                item = attacker.item()
                chance = rng.random()
                if chance < 0.04:
                    attacker.engine.send(*scrambled(rng, [item], FROM_ENGINE))
                else:
                    attacker.engine.send(*sent(attacker.mutated(item) if chance < 0.14 else item))
        except REFUSED:
            covered["refused"] += 1
            attacker.engine.lose()
            if rng.random() < 0.5:
                await world.turn()
            attacker.engine.exit()
            attacker = None
        if not number % 16:
            await world.turn()
    if attacker is not None:
        attacker.engine.exit()


async def work(engine: HandEngine, number: int) -> None:
    """Store, find and load a block, as an honest engine does."""
    if number % 2:
        found = engine.ask("h", number - 1)
        if len(found.places.rows):
            job = engine.load("h", found.places)
            engine.report(job, (1, 0))
            assert await engine.ended(job) in ([(1, "loaded", "", 0)], [(1, "cancelled", "", 0)])
        engine.send(wire.Drop("h"))
        return
    (outcome,) = await engine.store(number)
    assert outcome[1] in ("stored", "present", "dropped"), outcome


@pytest.mark.full
@pytest.mark.parametrize("world_size", [1, 2])
async def test_mutated_messages_harm_no_other_session(world_size, seed, dial):
    rng = Random(seed)
    rounds, messages = dial(1000, 25), 40
    layout = KVLayout.of_pages(PAGE, world_size=world_size)
    covered = Counter[str]()
    async with pool_world(rows=64, layout=layout, lower=128, curves=True, reservation_seconds=0.05) as world:
        honest = await world.engine(rows=4)
        for number in range(rounds):
            await attack(world, rng, messages, covered)
            await world.turn()
            assert honest.session.serves
            assert not honest.session.lost
            await work(honest, 5000 + number)
            honest.items = [item for item in honest.items if isinstance(item, wire.Lent)]
        honest.exit()
        for _ in range(10):
            await world.turn()
        counts, quotas = world.counts(), world.pool.quotas
        assert (counts["lent"], counts["quarantined"], quotas.found, quotas.lent) == (0, 0, 0, 0)
        retained = world.pool.plane.control.cpu.retained.slots
        dirty = world.pool.plane.dirty_rows
        assert len([row for row in world.pinned() if row not in retained]) <= dirty
    for what in ("refused", "fills", "loads", "jobs ended"):
        assert covered[what] > rounds // 5, f"attacks that reach nothing test nothing: {covered}"
