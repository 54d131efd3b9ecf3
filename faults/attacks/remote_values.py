"""Values that are wrong on a server or on their way, hosts that reset, and whether these attacks notice anything."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import replace
from functools import partial

from faults.machine.tcp_proxy import ProxyFaults, StreamFaults, TcpProxy
from kvtier.errors import ResourceError
from kvtier.testing.conformance import make_keys
from kvtier.tier.contract import LookupResult
from kvtier.types.keys import OffloadKey

from ..attack import Attack, Budget, Tally
from ..remote.hosts import SENTINEL, Host, host
from ..remote.server import RemoteServer, Start, valkey, without_valkey
from .remote import leaving_nothing

BOUND_BYTES = 128 << 20
HEADER_BYTES = 300
"""What a request or an answer says before a payload, the block envelope included."""
PAYLOAD_BYTES = (300 << 10, 5000)
DAY_NS = 86_400 * 10**9
PATIENT = {"request_timeout_seconds": 20.0, "job_timeout_seconds": 40.0, "connections": 1}
"""For what is not about time, on a slow machine."""

# ---- on their way


def bytes_on_the_way(budget: Budget, start: Start) -> Tally:
    """One connection through a proxy, which is cut, stalls or flips a bit at some byte of a store or of a load."""
    tally = Tally()
    with start(BOUND_BYTES) as server, leaving_nothing(tally, "bytes on the way"), TcpProxy(server.address) as proxy:
        asyncio.run(_on_the_way(tally, server, proxy, budget))
    tally.iterations = budget.count
    return tally


async def _on_the_way(tally: Tally, server: RemoteServer, proxy: TcpProxy, budget: Budget) -> None:
    rng = random.Random(budget.seed)
    async with host(tally, server, through=proxy, connections=1) as one:
        for number in range(budget.count):
            group, storing = number % 2, number // 2 % 2 == 1
            kind = ("cut_after", "flip_bit", "stall_after")[number // 4 % 3]
            step = number // 12
            at = step if budget.long and step < HEADER_BYTES else rng.randrange(HEADER_BYTES)
            if rng.random() < 0.3:
                at = rng.randrange(PAYLOAD_BYTES[group])
            place = 8 * at + rng.randrange(8) if kind == "flip_bit" else at
            direction = "to_server" if storing else "to_client"
            faults = ProxyFaults(**{direction: StreamFaults(**{kind: place})})
            names = make_keys(2, group, 2 * number)
            await _one_way(tally, one, names, proxy, faults, f"{direction} {kind} {place}, group {group}")


async def _one_way(
    tally: Tally, one: Host, names: Sequence[OffloadKey], proxy: TcpProxy, faults: ProxyFaults, what: str
) -> None:
    storing, happened = faults.to_client == StreamFaults(), proxy.happened.total()
    if not storing:
        await one.until(partial(_all_ok, one.puts, names), what)
    proxy.set(faults)
    outcomes = await (one.puts if storing else one.gets)(names, what)
    one.rows.view[:] = SENTINEL
    proxy.set(ProxyFaults())
    tally.notes["faults that took place"] += proxy.happened.total() > happened
    await one.until(partial(_answered, one, names), what)
    if not bool((one.rows.view == SENTINEL).all()):
        tally.wrong_bytes += 1
        tally.expect(False, f"{what}: a row was written after its call had returned")
    after = await one.gets(names, what)
    for outcome in (*outcomes.values(), *after.values()):
        tally.notes[f"blocks {outcome.status}"] += 1
    await one.until(partial(_all_ok, one.puts, names), what)
    await one.until(partial(_all_ok, one.gets, names), what)


async def _all_ok(call: Callable[..., Awaitable[dict[OffloadKey, object]]], names: Sequence[OffloadKey]) -> bool:
    outcomes = await call(names)
    return bool(outcomes) and all(outcome.ok for outcome in outcomes.values())  # type: ignore[attr-defined]


async def _answered(one: Host, names: Sequence[OffloadKey]) -> bool:
    return LookupResult.RETRY not in await one.finds(names)


# ---- on the server

Lie = Callable[[random.Random, RemoteServer, Sequence[str], Sequence[str]], None]


def _changed(change: Callable[[random.Random, bytes], bytes]) -> Lie:
    def lie(rng: random.Random, server: RemoteServer, mine: Sequence[str], others: Sequence[str]) -> None:
        name = rng.choice(mine)
        server.write(name, change(rng, server.read(name)))

    return lie


def _exchanged(rng: random.Random, server: RemoteServer, mine: Sequence[str], others: Sequence[str]) -> None:
    for one, other in zip(mine, others, strict=True):
        values = server.read(one), server.read(other)
        server.write(one, values[1])
        server.write(other, values[0])


def _copied(rng: random.Random, server: RemoteServer, mine: Sequence[str], others: Sequence[str]) -> None:
    for one, other in zip(mine, others, strict=True):
        server.write(one, server.read(other))


def _half_copied(rng: random.Random, server: RemoteServer, mine: Sequence[str], others: Sequence[str]) -> None:
    at = rng.randrange(len(mine))
    server.write(mine[at], server.read(others[at]))


def _flipped(rng: random.Random, value: bytes) -> bytes:
    at = rng.randrange(8 * len(value))
    return value[: at // 8] + bytes([value[at // 8] ^ 1 << at % 8]) + value[at // 8 + 1 :]


LIES: dict[str, Lie] = {
    "exchanged with another key's": _exchanged,
    "another key's": _copied,
    "one part of another key's": _half_copied,
    "another namespace's": _copied,
    "an earlier epoch's": _copied,
    "an earlier incarnation's": _copied,
    "truncated": _changed(lambda rng, value: value[: rng.randrange(len(value))]),
    "longer": _changed(lambda rng, value: value + rng.randbytes(rng.randrange(1, 5000))),
    "zeros": _changed(lambda rng, value: bytes(len(value))),
    "a flipped bit": _changed(_flipped),
    "other bytes": _changed(lambda rng, value: rng.randbytes(len(value))),
}


def wrong_values(budget: Budget, start: Start) -> Tally:
    """Each lie in turn about blocks of either size; a load says what it is, and never gives other bytes."""
    tally, rng = Tally(), random.Random(budget.seed)
    with start(BOUND_BYTES) as server, leaving_nothing(tally, "values"):
        for number in range(budget.count):
            name = list(LIES)[number % len(LIES)]
            asyncio.run(_lie(tally, server, rng, name, number // len(LIES) % 2))
    tally.iterations = budget.count
    return tally


async def _lie(tally: Tally, server: RemoteServer, rng: random.Random, name: str, group: int) -> None:
    """`others` are the names of another block that `mine` is given the value of, or a part of it."""
    server.empty()
    key, other = make_keys(2, group)
    async with AsyncExitStack() as hosts:
        one = await hosts.enter_async_context(host(tally, server, **PATIENT))
        others = await _names_of(server, one, key)
        if name == "another namespace's":
            elsewhere = replace(one.context.namespace, tag="other")
            one = await hosts.enter_async_context(host(tally, server, 1, namespace=elsewhere, **PATIENT))
        elif name == "an earlier epoch's":
            await one.update(1)
        elif name == "an earlier incarnation's":
            for marker in server.markers():
                server.remove(marker)
            one = await hosts.enter_async_context(host(tally, server, 1, **PATIENT))
        else:
            key, other = other, key
        mine = await _names_of(server, one, key)
        LIES[name](rng, server, mine, others)
        outcomes = await one.gets([key], name)
        for outcome in outcomes.values():
            tally.notes[f"loads {outcome.status}"] += 1
        tally.expect(not any(outcome.ok for outcome in outcomes.values()), f"{name}: {outcomes}")
        await one.until(partial(_all_ok, one.puts, [key]), name)
        await one.until(partial(_all_ok, one.gets, [key]), name)


async def _names_of(server: RemoteServer, one: Host, key: OffloadKey) -> list[str]:
    before = set(server.blocks())
    await one.until(partial(_all_ok, one.puts, [key]), "the first store")
    return [name for name in server.blocks() if name not in before]


# ---- hosts

NUM_HOSTS = 3
STEPS = 50


def hosts_that_reset(budget: Budget, start: Start) -> Tally:
    """Random lives of a few hosts: stores, loads, new weights that each takes when it takes them, also two at once,
    markers that are lost, damaged and emptied servers, restarts, and a clock that is off by a day."""
    tally = Tally()
    with start(BOUND_BYTES) as server, leaving_nothing(tally, "hosts"):
        for number in range(budget.count):
            server.empty()
            asyncio.run(Fleet(tally, server, random.Random(budget.seed + number)).live())
    tally.iterations = budget.count
    return tally


class Fleet:
    """Hosts that take each version of the weights once, in order. A host that starts has the newest weights; it starts
    only once one of those at work has reset for them, as operators must."""

    def __init__(self, tally: Tally, server: RemoteServer, rng: random.Random) -> None:
        self._tally, self._server, self._rng = tally, server, rng
        self._newest = self._taken = 0
        self._hosts: dict[int, Host] = {}
        self._open = [AsyncExitStack() for _ in range(NUM_HOSTS)]
        self._names = [*make_keys(1, 0), *make_keys(2, 1)]

    async def live(self) -> None:
        """Some steps by chance; then every host loads all that there is."""
        steps = {self._store: 4, self._load: 3, self._update: 6, self._start: 3, self._stop: 2, self._lose: 1}
        try:
            for number in range(NUM_HOSTS):
                await self._start(number)
            for step in self._rng.choices(list(steps), list(steps.values()), k=STEPS):
                await step(self._rng.randrange(NUM_HOSTS))
                self._tally.notes[f"steps: {step.__name__.strip('_')}"] += 1
            for number in self._hosts:
                await self._load(number)
        finally:
            for stack in self._open:
                await stack.aclose()

    async def _start(self, number: int) -> None:
        if number not in self._hosts and self._taken == self._newest:
            off = self._rng.choice([-DAY_NS, 0, DAY_NS])
            opened = host(self._tally, self._server, self._newest, clock_ns=partial(_clock_ns, off), **PATIENT)
            self._hosts[number] = await self._open[number].enter_async_context(opened)

    async def _stop(self, number: int) -> None:
        if len(self._hosts) > 1 and self._hosts.pop(number, None) is not None:
            await self._open[number].aclose()

    async def _store(self, number: int) -> None:
        if one := self._hosts.get(number):
            await one.puts(self._names)

    async def _load(self, number: int) -> None:
        if one := self._hosts.get(number):
            for outcome in (await one.gets(self._names)).values():
                self._tally.notes[f"loads {outcome.status}"] += 1

    async def _update(self, number: int) -> None:
        """One host takes the next weights it lacks, or all that lack some do at once."""
        if all(one.epoch == self._newest for one in self._hosts.values()):
            self._newest += 1
        late = [one for one in self._hosts.values() if one.epoch < self._newest]
        chosen = late if self._rng.random() < 0.5 else [self._rng.choice(late)]
        with suppress(ResourceError):
            await asyncio.gather(*(one.update(one.epoch + 1) for one in chosen))
            self._taken = max(self._taken, *(one.epoch for one in chosen))

    async def _lose(self, number: int) -> None:
        if self._rng.random() < 0.2:
            self._server.empty()
        for name in self._server.markers():
            self._server.remove(name)


def _clock_ns(off_ns: int) -> int:
    import time

    return time.time_ns() + off_ns


# ---- the attacks themselves


def remote_harness(budget: Budget) -> Tally:
    """Turn protections of values off one at a time; the attacks above must notice."""
    import pytest
    from support_protections import REMOTE_SWITCHES

    attacks = {"values": wrong_values, "hosts": hosts_that_reset}
    tally = Tally()
    for name, (switch, attack, count) in REMOTE_SWITCHES.items():
        with pytest.MonkeyPatch.context() as monkeypatch, ExitStack() as undo:
            undo.callback(monkeypatch.undo)
            switch(monkeypatch)
            found = attacks[attack](replace(budget, count=count), valkey)
        tally.iterations += 1
        tally.expect(found.wrong_bytes > 0, f"without {name} nothing was noticed in {count} iterations")
        tally.notes[f"wrong bytes without {name}"] = found.wrong_bytes
    return tally


ATTACKS = (
    Attack(
        "bytes on the way to valkey",
        "a TCP proxy cuts the connection, stalls it or flips a bit, at a byte of a store or of a load: in the long run "
        "every byte before the payload, and random ones of payloads kept under one name and under two",
        12, 6000, lambda budget: bytes_on_the_way(budget, valkey), missing=without_valkey, shards=8,
    ),
    Attack(
        "values on valkey",
        "exchanged between keys, wholly and in part; of another namespace, epoch, incarnation; truncated, longer, "
        "zeros, flipped bits, other bytes",
        22, 5000, lambda budget: wrong_values(budget, valkey), missing=without_valkey, shards=4,
    ),
    Attack(
        "hosts on valkey",
        "three hosts store, load, start, stop and take new weights, one by one and at once; markers are lost, the "
        "server is emptied, clocks are off by a day",
        10, 3000, lambda budget: hosts_that_reset(budget, valkey), missing=without_valkey, shards=4,
    ),
    Attack(
        "the remote harness itself",
        "one protection of remote values turned off at a time; wrong bytes must be noticed",
        5, 5, remote_harness, missing=without_valkey,
    ),
)  # fmt: skip
