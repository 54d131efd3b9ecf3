"""What a server evicts is counted: by this tier from its opening on, and at the cost of few questions."""

from __future__ import annotations

import asyncio
import errno
import time
from collections import Counter
from typing import Any

import pytest
from support_stack import PLAIN, Engine, keys, running, stack_file, store, until, whole
from support_valkey import Server, stack_tier, valkey_cluster, valkey_server

from kvtier_remote.background import EVICTED, PAUSE_SECONDS, EvictionWatch
from kvtier_remote.conformance.base import Client
from kvtier_remote.valkey.embedded import START_SECONDS
from kvtier_remote.valkey.transport import ValkeyTransport


class Silent:
    """A server that says nothing of evictions."""


class Evicting:
    """A server that says what a test wants it to say; None: nothing."""

    def __init__(self) -> None:
        self.said: int | None = 0
        self.questions = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def evicted(self) -> int:
        self.questions += 1
        await self.may_answer.wait()
        if self.said is None:
            raise OSError(errno.ETIMEDOUT, "the server does not answer")
        return self.said


class Watched:
    """A watch on a server, with a clock that a test sets."""

    def __init__(self, transport: Any) -> None:
        self.counters: Counter[str] = Counter()
        self.now = 100.0
        self.watch = EvictionWatch(transport, lambda: self.now, self.counters)

    async def look(self) -> int:
        """Look once the pause is over; what is counted when all that has begun has ended."""
        self.now += PAUSE_SECONDS
        self.watch.poll()
        for _ in range(5):
            await asyncio.sleep(0)
        return self.counters[EVICTED]


async def test_evictions_count_from_the_opening_on_and_over_a_restart_of_the_server() -> None:
    transport = Evicting()
    transport.said = 1000
    one = Watched(transport)
    await one.watch.begin()
    assert one.counters == {EVICTED: 0}
    transport.said = 1003
    assert await one.look() == 3
    transport.said = None
    assert await one.look() == 3
    transport.said = 2
    assert await one.look() == 5
    await one.watch.close()


async def test_a_server_that_did_not_answer_at_the_opening_counts_from_its_first_answer_on() -> None:
    transport = Evicting()
    transport.said = None
    one = Watched(transport)
    await one.watch.begin()
    transport.said = 70
    assert await one.look() == 0
    transport.said = 71
    assert await one.look() == 1


async def test_questions_are_few_and_closing_waits_for_none() -> None:
    transport = Evicting()
    one = Watched(transport)
    await one.watch.begin()
    for _ in range(100):
        one.watch.poll()
    assert transport.questions == 1
    transport.may_answer.clear()
    for _ in range(3):
        await one.look()
    assert transport.questions == 2
    await one.watch.close()
    assert len(asyncio.all_tasks()) == 1


async def test_a_server_that_cannot_tell_is_not_asked() -> None:
    one = Watched(Silent())
    await one.watch.begin()
    assert await one.look() == 0
    assert EVICTED not in one.counters
    await one.watch.close()


async def test_a_stack_shows_what_its_server_evicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_remote.background.PAUSE_SECONDS", 0.0)
    engine = Engine(PLAIN, 16)
    with valkey_server() as server:
        async with running(stack_file(PLAIN, 16, stack_tier(server)), engine) as stack:
            assert (await store(stack, engine, whole(keys(16)))).ok
            await stack.drain(30)
            assert stack.stats().tiers["valkey"].events[EVICTED] == 0
            evict_all(server)
            assert (await store(stack, engine, whole(keys(16, tag="more")))).ok
            await until(lambda: stack.stats().tiers["valkey"].events[EVICTED] >= 16)


def evict_all(server: Server) -> None:
    """Have the server evict all that it holds, then give it its room back."""
    room = server.client.config_get("maxmemory")["maxmemory"]
    server.client.config_set("maxmemory", 1)
    deadline = time.monotonic() + START_SECONDS
    while server.client.dbsize():
        assert time.monotonic() < deadline, "the server does not evict"
        time.sleep(0.01)
    server.client.config_set("maxmemory", room)


async def test_the_primaries_of_a_cluster_are_added_up() -> None:
    with valkey_cluster() as servers:
        transport = ValkeyTransport(servers[0].options(mode="cluster"))
        await transport.open()
        try:
            client = Client(transport, "evictions")
            await client.put([client.place(number, 64) for number in range(30)])
            assert all(server.client.dbsize() for server in servers)
            assert await transport.evicted() == 0
            for server in servers:
                evict_all(server)
            assert await transport.evicted() == 30
        finally:
            assert await transport.close(20) == 0
