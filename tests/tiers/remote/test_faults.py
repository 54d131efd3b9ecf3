"""A server that is frozen, killed, started again, or that refuses: outcomes within bounds, and rows left alone."""

from __future__ import annotations

import asyncio
import errno
import time
from contextlib import nullcontext

import pytest
from support_counts import full_alone
from support_shutdown import run_in_child
from support_valkey import Blocks, valkey_cluster, valkey_server, warm_up

from faults.machine.tcp_proxy import ProxyFaults, TcpProxy
from kvtier.errors import ResourceError
from kvtier.testing.conformance import make_keys
from kvtier.testing.trace import leaving_no_trace, run_in_loop
from kvtier.types.jobs import BlockStatus

LARGE, SMALL = 0, 1
NAMES = [*make_keys(3, LARGE), *make_keys(3, SMALL)]
SENTINEL = 0x55
SHORT = {"request_timeout_seconds": 0.3, "job_timeout_seconds": 5.0}


@pytest.fixture
def own_server():
    """A server that may be broken."""
    with valkey_server() as one:
        yield one


def statuses(outcomes) -> set[str]:
    return {outcome.status for outcome in outcomes.values()}


async def until_stored(driver, names) -> None:
    """Also by a node that was slow once and is left alone for a while."""
    deadline = time.monotonic() + 60
    while statuses(await driver.store(names)) != {BlockStatus.STORED}:
        assert time.monotonic() < deadline, "a node is not used again"
        await asyncio.sleep(0.05)


async def test_a_frozen_server_costs_its_time_and_writes_nothing_late(own_server, tmp_path):
    """Every call returns while the server is still frozen, and nothing is written to a row when it goes on."""
    async with Blocks(own_server, **SHORT).opened(tmp_path) as driver:
        assert statuses(await driver.store(NAMES)) == {BlockStatus.STORED}
        with own_server.frozen():
            for call in (driver.load, driver.store):
                outcomes = await call(NAMES)
                assert {outcome.errno for outcome in outcomes.values()} == {errno.ETIMEDOUT}
            assert list(await driver.tier.lookup(NAMES)) == ["retry"] * 6
            driver.rows.view[:] = SENTINEL
        assert bool((driver.rows.view == SENTINEL).all())
        await until_answered(driver)
        assert bool((driver.rows.view == SENTINEL).all()), "a row was written after its call had returned"
        assert statuses(await driver.store(NAMES)) == {BlockStatus.STORED}
        assert statuses(await driver.load(NAMES)) == {BlockStatus.LOADED}
        assert driver.tier.counters["errno.ETIMEDOUT"] == 12
        assert driver.tier.counters["lookup.failed"] >= 1


async def until_answered(driver) -> None:
    """Until the tier reaches its server again. A lookup uses no rows."""
    deadline = time.monotonic() + 60
    while "retry" in list(await driver.tier.lookup(NAMES[:1])):
        assert time.monotonic() < deadline, "the tier does not reach its server any more"


async def test_a_cancelled_load_returns_when_its_requests_have_ended(own_server, tmp_path):
    async with Blocks(own_server, **SHORT).opened(tmp_path) as driver:
        assert statuses(await driver.store(NAMES)) == {BlockStatus.STORED}
        with own_server.frozen():
            task = asyncio.create_task(driver.tier.load(driver.load_job(NAMES)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            driver.rows.view[:] = SENTINEL
        await until_answered(driver)
        assert bool((driver.rows.view == SENTINEL).all())


def test_a_tier_over_a_frozen_server_closes_and_leaves_nothing(own_server, tmp_path):
    async def life():
        async with Blocks(own_server, **SHORT).opened(tmp_path) as driver:
            assert statuses(await driver.store(NAMES)) == {BlockStatus.STORED}
            with own_server.frozen():
                load = asyncio.create_task(driver.tier.load(driver.load_job(NAMES)))
                await asyncio.sleep(0)
                await driver.tier.close()
                ended = {outcome.status for group in (await load).outcomes for outcome in group}
                assert ended <= {BlockStatus.FAILED, BlockStatus.DROPPED}
                assert driver.tier.counters["close.stuck"] == 0

    warm_up(own_server)
    own_server.client.ping()  # its connection is not the tier's
    with leaving_no_trace():
        run_in_loop(life())


def test_an_opening_that_is_cancelled_leaves_nothing(own_server, tmp_path):
    async def life(turns: int):
        suite = Blocks(own_server)
        tier = suite.make(tmp_path)
        opening = asyncio.create_task(tier.open(await suite.context(tier)))
        for _ in range(turns):
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        await tier.close()

    warm_up(own_server)
    own_server.client.ping()
    with leaving_no_trace():
        for turns in (0, 1, 2, 5, 20, 1000):
            run_in_loop(life(turns))


async def test_a_reset_that_the_server_did_not_take_stores_nothing_until_it_has(own_server, tmp_path):
    async with Blocks(own_server, **SHORT).opened(tmp_path) as driver:
        assert statuses(await driver.store(NAMES)) == {BlockStatus.STORED}
        with own_server.frozen():
            with pytest.raises(ResourceError, match="the epoch cannot be raised on the server"):
                await driver.tier.reset(1)
            driver.epoch = 1
            assert statuses(await driver.store(NAMES)) == {BlockStatus.FAILED}
        await until_answered(driver)
        assert list(await driver.tier.lookup(NAMES)) == ["miss"] * 6
        assert statuses(await driver.load(NAMES)) == {BlockStatus.MISSING}
        assert statuses(await driver.store(NAMES)) == {BlockStatus.STORED}
    async with Blocks(own_server).opened(tmp_path) as driver:
        assert driver.opened.epoch > 1, "a reset that failed is not counted from the same marker"
        assert statuses(await driver.load(NAMES)) == {BlockStatus.MISSING}


async def test_a_server_that_was_killed_and_comes_back_empty(own_server, tmp_path):
    async with Blocks(own_server, **SHORT).opened(tmp_path) as driver:
        assert statuses(await driver.store(NAMES)) == {BlockStatus.STORED}
        own_server.kill()
        assert statuses(await driver.load(NAMES)) == {BlockStatus.FAILED}
        assert statuses(await driver.store(NAMES)) == {BlockStatus.FAILED}
        own_server.start()
        deadline = time.monotonic() + 60
        while BlockStatus.FAILED in (
            found := statuses(await driver.load(NAMES))
        ):  # each client connects again by itself
            assert time.monotonic() < deadline, "the tier does not reach its server any more"
        assert found == {BlockStatus.MISSING}
        assert statuses(await driver.store(NAMES)) == {BlockStatus.STORED}
        assert statuses(await driver.load(NAMES)) == {BlockStatus.LOADED}


async def test_a_forked_child_connects_to_no_server(own_server, tmp_path):
    """It cannot use the tier, and would wait for a server that is gone."""
    async with Blocks(own_server).opened(tmp_path) as driver:
        assert statuses(await driver.store(NAMES)) == {BlockStatus.STORED}
        before = own_server.client.info()["total_connections_received"]
        assert run_in_child(lambda: None) == 0
        assert own_server.client.info()["total_connections_received"] == before
        assert statuses(await driver.load(NAMES)) == {BlockStatus.LOADED}


async def test_connections_that_are_never_answered_are_replaced(own_server, tmp_path):
    """The server's machine goes without a word, and another one takes its address: nothing is ever said on the
    connections there were."""
    with TcpProxy(("127.0.0.1", own_server.process.port)) as proxy:
        async with Blocks(own_server, servers=[proxy.address], **SHORT).opened(tmp_path) as driver:
            assert statuses(await driver.store(NAMES)) == {BlockStatus.STORED}
            with proxy.during(ProxyFaults(half_open=True)):
                assert statuses(await driver.load(NAMES)) == {BlockStatus.FAILED}
                assert list(await driver.tier.lookup(NAMES)) == ["retry"] * 6
            deadline = time.monotonic() + 20
            while statuses(await driver.load(NAMES)) != {BlockStatus.LOADED}:
                assert time.monotonic() < deadline, "the tier waits for a server that has gone"
            await until_answered(driver)
            assert statuses(await driver.store(NAMES)) == {BlockStatus.STORED}
            driver.tier.counters.clear()
            assert statuses(await driver.load(NAMES)) == {BlockStatus.LOADED}
            assert set(driver.tier.counters) == {"requested"}


@pytest.mark.parametrize("how", ["killed", pytest.param("frozen", marks=full_alone())])
def test_a_node_of_a_cluster_that_is_gone_costs_its_own_blocks_and_no_others(tmp_path, how):
    """Until it is back: then it is used again, empty or not."""

    async def life(servers):
        async with Blocks(servers[0], mode="cluster", **SHORT).opened(tmp_path) as driver:
            names = [*make_keys(8, LARGE), *make_keys(8, SMALL)]
            await until_stored(driver, names)
            places = dict(zip(names, driver.tier._places(names), strict=True))
            last = servers[2].client.execute_command("CLUSTER", "MYID").decode()
            lost = [name for name in names if driver.tier._transport.server_of(places[name]) == last]
            live = [name for name in names if name not in lost]
            assert lost
            with servers[2].frozen() if how == "frozen" else nullcontext(servers[2].kill()):
                for _ in range(3):
                    found = dict(zip(names, await driver.tier.lookup(names), strict=True))
                    assert {found[name] for name in live} == {"hit"}
                    assert {found[name] for name in lost} <= {"retry", "miss"}
                    for call, good in ((driver.load, BlockStatus.LOADED), (driver.store, BlockStatus.STORED)):
                        ended = await call(names)
                        assert {ended[name].status for name in live} == {good}
                        assert {ended[name].status for name in lost} <= {BlockStatus.FAILED, BlockStatus.DROPPED}
                assert {found[name] for name in lost} == {"miss"}, "it is left alone"
            if how == "killed":
                servers[2].start()
            await until_stored(driver, names)
            assert statuses(await driver.load(names)) == {BlockStatus.LOADED}

    with valkey_cluster() as servers:
        warm_up(servers[0])
        for server in servers:
            server.client.ping()
        with leaving_no_trace():
            run_in_loop(life(servers))


async def test_a_cluster_opens_without_one_of_its_nodes(tmp_path):
    """One that does not have the namespace's marker, without which no epoch is known."""
    with valkey_cluster() as servers:
        async with Blocks(servers[0], mode="cluster").opened(tmp_path) as driver:
            assert driver.opened.capacity_bytes == 3 * (256 << 20), "the sum over the nodes"
            marked = driver.tier._transport._nodes.node_of(driver.tier._names.marker)
        gone = next(one for one in servers if one.client.execute_command("CLUSTER", "MYID").decode() != marked)
        gone.kill()
        seeds = [server.address for server in servers]
        async with Blocks(servers[0], mode="cluster", servers=seeds, **SHORT).opened(tmp_path) as driver:
            assert driver.opened.capacity_bytes == 2 * (256 << 20)
            assert "1 of 3 nodes do not answer" in "".join(driver.opened.notes)
            names = make_keys(12, SMALL)
            for call in (driver.store, driver.store, driver.load):
                found = statuses(await call(names))
            assert found == {BlockStatus.LOADED, BlockStatus.DROPPED}


async def test_rights_that_are_taken_away_while_running_are_failures(own_server, tmp_path, monkeypatch):
    monkeypatch.setenv("KVTIER_TEST_PASSWORD", "pw")
    own_server.client.execute_command("ACL", "SETUSER", "kvtier", "on", ">pw", "~kvtier:*", "~{kvtier:*", "+@all")
    suite = Blocks(own_server, username="kvtier", password_env="KVTIER_TEST_PASSWORD")
    async with suite.opened(tmp_path) as driver:
        assert statuses(await driver.store(NAMES)) == {BlockStatus.STORED}
        own_server.client.execute_command("ACL", "SETUSER", "kvtier", "-mget", "-set")
        for call in (driver.load, driver.store):
            assert {outcome.errno for outcome in (await call(NAMES)).values()} == {errno.EACCES}
        own_server.client.execute_command("ACL", "SETUSER", "kvtier", "+mget", "+set")
        assert statuses(await driver.store(NAMES)) == {BlockStatus.STORED}
        assert statuses(await driver.load(NAMES)) == {BlockStatus.LOADED}
