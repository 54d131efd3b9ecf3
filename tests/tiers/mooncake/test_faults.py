"""A pool whose master or store is frozen or killed: outcomes within bounds, and rows left alone."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support_mooncake import Pool, PoolBlocks

from kvtier.errors import ResourceError
from kvtier.testing.conformance import make_keys
from kvtier.testing.trace import leaving_no_trace, run_in_loop
from kvtier.types.jobs import BlockStatus

pytestmark = [pytest.mark.remote, pytest.mark.mooncake]

LARGE, SMALL = 0, 1
NAMES = [*make_keys(3, LARGE), *make_keys(3, SMALL)]
SENTINEL = 0x55
SHORT = {"request_timeout_seconds": 0.5, "job_timeout_seconds": 10.0}
LOADED = {BlockStatus.LOADED}


def statuses(outcomes) -> set[str]:
    return {outcome.status for outcome in outcomes.values()}


@asynccontextmanager
async def stored(pool: Pool, path: Path, **options):
    """A tier with the names stored and loaded once."""
    async with PoolBlocks(pool, **options).opened(path) as driver:
        await recovered(driver)  # a slow machine may need more than one attempt within so short a time
        yield driver


async def until(driver, wanted: set[str]) -> None:
    """Until a load ends like this; every byte of what is loaded is compared."""
    deadline = time.monotonic() + 100
    while (found := statuses(await driver.load(NAMES))) != wanted:
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.2)


def processes(driver) -> list[int]:
    """The client processes of this test process."""
    own = os.getpid()
    found = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in found if parent_of(pid) == own and b"client_main" in read(pid, "cmdline")]


def parent_of(pid: int) -> int:
    fields = read(pid, "stat").rpartition(b")")[2].split()
    return int(fields[1]) if fields else 0


def read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("frozen", ["store", "master"])
async def test_what_is_frozen_costs_time_and_writes_nothing_late(own_pool, tmp_path, frozen):
    """The library waits for a frozen store for longer than 40 s, and writes into its buffers afterwards."""
    async with stored(own_pool, tmp_path, **SHORT) as driver:
        with own_pool.frozen(frozen):
            loads = await driver.load(NAMES)
            assert statuses(loads) == {BlockStatus.FAILED}
            stores = await driver.store(NAMES)
            assert BlockStatus.STORED not in statuses(stores)
            driver.rows.view[:] = SENTINEL
        await asyncio.sleep(1)
        assert bool((driver.rows.view == SENTINEL).all()), "a row was written after its call had returned"
        assert driver.tier.counters["errno.ETIMEDOUT"]
        await recovered(driver)


async def recovered(driver) -> None:
    """The tier stores and loads again. A store that was taken for dead comes back empty."""
    deadline = time.monotonic() + 100
    while statuses(await driver.store(NAMES)) != {BlockStatus.STORED}:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)
    await until(driver, LOADED)


async def test_lookups_of_a_frozen_master_are_retries_and_the_loop_runs_on(own_pool, tmp_path):
    """Connecting holds the interpreter's lock, in a process of its own: here nothing waits for it."""
    async with stored(own_pool, tmp_path, **SHORT) as driver:
        with own_pool.frozen("master"):
            longest = asyncio.create_task(longest_turn())
            for _ in range(3):
                assert set(await driver.tier.lookup(NAMES)) == {"retry"}
            longest.cancel()
            assert await longest < 5, "the event loop stood still"
        deadline = time.monotonic() + 100
        while set(await driver.tier.lookup(NAMES)) != {"hit"}:
            assert time.monotonic() < deadline


async def longest_turn() -> float:
    longest, last = 0.0, time.monotonic()
    try:
        while True:
            await asyncio.sleep(0.005)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
    except asyncio.CancelledError:
        return longest


def test_a_tier_over_a_frozen_pool_closes_and_leaves_nothing(own_pool, tmp_path):
    async def life():
        async with stored(own_pool, tmp_path, **SHORT) as driver:
            with own_pool.frozen("master"), own_pool.frozen("store"):
                load = asyncio.create_task(driver.tier.load(driver.load_job(NAMES)))
                await asyncio.sleep(0.05)
                started = time.monotonic()
                await driver.tier.close()
                assert time.monotonic() - started < 20
                ended = {outcome.status for group in (await load).outcomes for outcome in group}
                assert ended <= {BlockStatus.FAILED, BlockStatus.DROPPED}
                assert driver.tier.counters["close.stuck"] == 0
                assert processes(driver) == []

    with leaving_no_trace():
        run_in_loop(life())


async def test_a_store_that_was_killed_loses_blocks_and_nothing_else(own_pool, tmp_path):
    async with stored(own_pool, tmp_path, **SHORT) as driver:
        own_pool.kill("store")
        assert not statuses(await driver.load(NAMES)) & LOADED
        own_pool.start_store()
        await recovered(driver)


async def test_a_master_that_was_killed_has_forgotten_everything(own_pool, tmp_path):
    async with stored(own_pool, tmp_path, **SHORT) as driver:
        own_pool.kill("master")
        assert statuses(await driver.load(NAMES)) == {BlockStatus.FAILED}
        assert set(await driver.tier.lookup(NAMES)) == {"retry"}
        own_pool.start_master()
        own_pool.kill("store")
        own_pool.start_store()
        await recovered(driver)


async def test_a_client_that_dies_is_started_again(own_pool, tmp_path):
    """As the library does when it is called after `close`."""
    async with stored(own_pool, tmp_path) as driver:
        clients = processes(driver)
        assert len(clients) == 3
        for pid in clients:
            os.kill(pid, signal.SIGSEGV)
        assert statuses(await driver.load(NAMES)) <= {BlockStatus.FAILED, BlockStatus.LOADED}
        await until(driver, LOADED)
        assert not set(processes(driver)) & set(clients)


async def test_a_full_pool_drops_or_evicts_and_gives_right_blocks_or_none(own_pool, tmp_path):
    async with PoolBlocks(own_pool).opened(tmp_path) as driver:
        found = set()
        for start in range(0, 800, 16):
            names = make_keys(16, LARGE, start)
            found |= statuses(await driver.store(names))
            found |= statuses(await driver.load(names))
        assert found <= {BlockStatus.STORED, BlockStatus.LOADED, BlockStatus.DROPPED, BlockStatus.MISSING}
        assert BlockStatus.LOADED in found
        assert {BlockStatus.DROPPED, BlockStatus.MISSING} & set(await everything(driver))


async def everything(driver) -> set[str]:
    found = set[str]()
    for start in range(0, 800, 16):
        found |= statuses(await driver.load(make_keys(16, LARGE, start)))
    return found


async def test_a_reset_holds_for_processes_that_open_later(own_pool, tmp_path):
    async with stored(own_pool, tmp_path) as driver:
        await driver.tier.reset(1)
        driver.epoch = 1
        assert statuses(await driver.load(NAMES)) == {BlockStatus.MISSING}
        assert statuses(await driver.store(NAMES)) == {BlockStatus.STORED}
    async with PoolBlocks(own_pool).opened(tmp_path) as driver:
        assert driver.opened.epoch == 1
        assert statuses(await driver.load(NAMES)) == LOADED


async def test_nothing_of_a_failed_request_is_in_a_log_or_an_error(own_pool, tmp_path, caplog, capfd):
    """The library says on standard error what it does, with the names of blocks."""
    with caplog.at_level(logging.DEBUG):
        async with stored(own_pool, tmp_path, **SHORT) as driver:
            with own_pool.frozen("master"):
                assert statuses(await driver.load(NAMES)) == {BlockStatus.FAILED}
                with pytest.raises(ResourceError, match="the epoch cannot be raised") as caught:
                    await driver.tier.reset(1)
            own_pool.kill("store")
            assert not statuses(await driver.load(NAMES)) & LOADED
            assert statuses(await driver.store(NAMES)) != {BlockStatus.STORED}
    out, err = capfd.readouterr()
    said = f"{caught.value} {caught.value.__cause__} {caplog.text} {out} {err}"
    assert "kvtier:b:" not in said
    assert "kvtier:m:" not in said
