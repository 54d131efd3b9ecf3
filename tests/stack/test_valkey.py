"""Whole stacks over a real Valkey server: three tiers, two hosts, resets, and a server that goes away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import support_hosts
from support_hosts import loaded, stored
from support_stack import PLAIN, Engine, keys, running, stack_file
from support_valkey import Server, stack_tier, valkey_server

from kvtier.errors import ConfigError


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    with valkey_server() as one:
        yield one


@pytest.fixture
def server(shared_server: Server) -> Server:
    """The shared server, empty."""
    shared_server.client.flushall()
    return shared_server


def host(server: Server, engine: Engine, folder: Path | None = None):
    """A stack of a host of its own over the shared server."""
    return support_hosts.host(stack_tier(server), engine, folder)


async def test_what_the_disk_has_evicted_is_loaded_from_the_server(server, tmp_path):
    engine, names = Engine(PLAIN, 80), keys(80)
    async with host(server, engine, tmp_path / "fs") as stack:
        await stored(stack, engine, names)
        assert await loaded(stack, engine, names[::-1]) == 80
        tiers = stack.stats().tiers
        assert tiers["valkey"].hits
        assert tiers["fs"].hits


async def test_two_hosts_share_what_one_stored_also_without_their_disks(server, tmp_path):
    engine, names = Engine(PLAIN, 24), keys(24)
    async with host(server, engine, tmp_path / "a") as one:
        await stored(one, engine, names)
        async with host(server, engine, tmp_path / "b") as other:
            assert await loaded(other, engine, names) == 24
            assert other.stats().tiers["valkey"].hits == 24
    async with host(server, engine) as third:
        assert await loaded(third, engine, names) == 24


async def test_what_another_host_has_stored_is_not_written_again(server, tmp_path):
    """One question for each job, and no byte: the values of the server stay as they are."""
    engine, names, others = Engine(PLAIN, 40), keys(24), keys(8, start=100)
    async with host(server, engine) as one:
        await stored(one, engine, names)
    async with host(server, engine, tmp_path / "b") as other:
        written = server.client.info("commandstats")["cmdstat_set"]["calls"]
        await stored(other, engine, names)
        figures = other.stats().tiers["valkey"]
        assert (figures.store_bytes, figures.stored, figures.skipped) == (0, 0, {"already_there": 24})
        assert server.client.info("commandstats")["cmdstat_set"]["calls"] == written
        await stored(other, engine, others)
        assert other.stats().tiers["valkey"].stored == 8
        assert await loaded(other, engine, names) == 24


async def test_a_reset_of_one_host_is_obeyed_by_the_other_after_its_own(server, tmp_path):
    engine, old, new = Engine(PLAIN, 24), keys(8), keys(8, start=100)
    async with host(server, engine, tmp_path / "a") as one, host(server, engine, tmp_path / "b") as other:
        await stored(one, engine, old)
        await one.reset()
        assert await loaded(one, engine, old) == 0
        assert await loaded(other, engine, old) == 8
        await stored(one, engine, new)
        await other.reset()
        assert await loaded(other, engine, old) == 0
        assert await loaded(other, engine, new) == 8
    async with host(server, engine, tmp_path / "b") as other:
        assert await loaded(other, engine, old) == 0
        assert await loaded(other, engine, new) == 8


async def test_a_disk_that_missed_a_reset_holds_nothing_from_before_and_takes_new_blocks(server, tmp_path):
    """While a host was down another one has reset; its disk is behind the server."""
    engine, old, new = Engine(PLAIN, 24), keys(8), keys(8, start=100)
    async with host(server, engine, tmp_path / "a") as one:
        await stored(one, engine, old)
    async with host(server, engine) as other:
        await other.reset()
    async with host(server, engine, tmp_path / "a") as one:
        assert one.locate(old) == [None] * 8
        assert await loaded(one, engine, old) == 0
        await stored(one, engine, new)
        assert one.stats().tiers["fs"].stored == 8
    async with host(server, engine, tmp_path / "a") as one:
        assert one.locate([*old, *new]) == [None] * 8 + ["fs"] * 8
        assert await loaded(one, engine, new) == 8
        assert one.stats().tiers["fs"].corrupt == 0


async def refused(entry: dict[str, object], engine: Engine, line: str) -> None:
    """A stack with this tier raises one line that matches when it is opened."""
    with pytest.raises(ConfigError, match=line):
        async with running(stack_file(PLAIN, 8, entry), engine):
            pass


async def test_opening_over_no_server_is_one_line_with_the_path_of_the_key() -> None:
    engine = Engine(PLAIN, 8)
    with valkey_server(maxmemory="0", maxmemory_policy="noeviction") as server:
        entry = stack_tier(server)
        await refused(entry, engine, r"^tiers\[2\]\.allow_unbounded: the server has no maxmemory")
    line = rf"^tiers\[2\]\.servers: {server.address}: Connection refused$"
    await refused(entry | {"request_timeout_seconds": 1}, engine, line)


async def test_how_long_is_believed_what_the_server_holds_stands_in_the_file(server):
    engine, names = Engine(PLAIN, 8), keys(4)
    entry = stack_tier(server, hit_hint_seconds=0.001, miss_hint_seconds=3600)
    async with running(stack_file(PLAIN, 8, entry), engine, lookup_timeout_seconds=40.0) as one:
        assert await hits(one, names) == 0
        async with host(server, engine) as other:
            await stored(other, engine, names)
            assert await hits(other, names) == 4
        assert await hits(one, names) == 0, "for an hour it is believed that they are not there"


async def hits(stack, names) -> int:
    """How many of the names a lookup finds, once all is known."""
    while "retry" in (found := list(await stack.lookup(names))):
        pass
    return len(names) - found.count("miss")
