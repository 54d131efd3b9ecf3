"""Calls that wait: right bytes from several threads, over each kind of tier, and never longer than they may."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from support_engine_memory import LAYOUT, LONG, PAGE, PAGES, Engine, content, key
from support_valkey import valkey_server

from kvtier.engines.engine_memory import tier as module
from kvtier.engines.engine_memory.memory import PagedMemory
from kvtier.engines.engine_memory.options import EngineMemoryOptions, engine_part, read_options
from kvtier.engines.engine_memory.plane import EngineMemoryPlane
from kvtier.engines.engine_memory.tier import BlockingTier
from kvtier.errors import ConfigError
from kvtier.stack.watching.stats_socket import stats_from_json
from kvtier.tier.contract import LookupResult
from kvtier.tier.registry import discover
from kvtier.types.geometry import KVLayout
from kvtier.types.jobs import LATE, LOADED, PRESENT, STORED, BlockStatus, DropReason
from kvtier.types.namespace import Namespace

Open = Callable[..., BlockingTier]


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def valkey() -> Iterator[str]:
    """The address of a server."""
    with valkey_server() as server:
        yield server.address


@pytest.fixture
def opened(tmp_path, engine, request) -> Iterator[Open]:
    """Opens a tier below the engine's memory; the second of one type finds what the first stored."""
    tiers: list[BlockingTier] = []

    def place(backend: str) -> dict[str, Any]:
        if backend == "valkey":
            seconds = {"request_timeout_seconds": 20, "job_timeout_seconds": 40}
            return {"servers": [request.getfixturevalue("valkey")], "tls": False, **seconds}
        folder = str(tmp_path / "kv")
        return {"capacity": 64 << 20, **({"roots": [folder]} if backend == "fs" else {"root": folder})}

    def open_tier(backend: str = "fs", **keys: Any) -> BlockingTier:
        options = read_options(EngineMemoryOptions, backend, {**place(backend), **keys}, "tier")
        tier = BlockingTier(options, Namespace(LAYOUT), engine.memory, backend, logging.getLogger("test"))
        tiers.append(tier)
        return tier

    yield open_tier
    for tier in tiers:
        tier.close()


@pytest.mark.parametrize("backend", ["fs", "shared_fs", "valkey"])
def test_blocks_of_groups_of_different_sizes_come_back_after_a_restart(backend, opened, engine):
    names = [key(number, number % 2) for number in range(8)]
    tier = opened(backend)
    for place, name in enumerate(names):
        engine.write(name, place)
    assert tier.store(names, range(8), LONG) == [STORED] * 8
    assert tier.store(names, range(8), LONG) == [PRESENT] * 8
    tier.close()
    engine.memory = PagedMemory([[engine.halves], [engine.states]])
    engine.halves[:] = engine.states[:] = 0
    tier = opened(backend)
    assert tier.find([*names, key(99)], LONG) == [True] * 8 + [False]
    places = [8 + place for place in range(8)]
    assert tier.load(names, places, LONG) == [LOADED] * 8
    for name, place in zip(names, places, strict=True):
        assert np.array_equal(engine.read(name, place), content(name))
    assert not engine.halves[:, 16:].any()
    assert not engine.states[16:].any()


@pytest.mark.parametrize("backend", ["fs", "shared_fs", "valkey"])
def test_after_a_reset_nothing_is_found_also_by_the_next_process(backend, opened, engine):
    tier = opened(backend)
    assert tier.store([key(1)], [0], LONG) == [STORED]
    tier.reset()
    assert tier.find([key(1)], LONG) == [False]
    assert tier.load([key(1)], [1], LONG)[0].status is BlockStatus.MISSING
    assert tier.store([key(2)], [0], LONG) == [STORED]
    tier.close()
    engine.memory = PagedMemory([[engine.halves], [engine.states]])
    assert opened(backend).find([key(1), key(2)], LONG) == [False, True]


def test_threads_load_and_store_at_once_and_get_their_own_blocks(opened, engine, seed):
    tier = opened(capacity=8 << 20)
    threads, share = 4, PAGES // 4

    def work(number: int) -> int:
        rng, good = random.Random(seed + number), 0
        for _ in range(60):
            names = [key(rng.randrange(40), rng.randrange(2)) for _ in range(rng.randint(1, share))]
            names = list(dict.fromkeys(names))
            places = rng.sample(range(number * share, (number + 1) * share), len(names))
            if rng.random() < 0.4:
                for name, place in zip(names, places, strict=True):
                    engine.write(name, place)
                good += sum(outcome.ok for outcome in tier.store(names, places, LONG))
                continue
            found = tier.find(names, LONG)
            tier.lease(names)
            for name, place, outcome in zip(names, places, tier.load(names, places, LONG), strict=True):
                assert not outcome.ok or np.array_equal(engine.read(name, place), content(name))
                good += outcome.ok
            tier.release([name for name, there in zip(names, found, strict=True) if there])
        return good

    with ThreadPoolExecutor(threads) as pool:
        assert all(pool.map(work, range(threads)))
    assert not tier.stats().errors
    with tier._lock:
        tier.plane.check_integrity()
        assert not tier._jobs
    assert not tier._waiting


class Frozen(threading.Event):
    """Set it, and the disk answers. `begun` are the jobs that the disk was given."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[int] = []


@pytest.fixture
def freeze(monkeypatch) -> Iterator[Callable[[str], Frozen]]:
    """Has a kind of call of the backend `fs` end only once the disk answers."""
    answers = Frozen()
    threads = ThreadPoolExecutor(16)

    def freeze(name: str) -> Frozen:
        backend = discover().get("fs")
        usual = getattr(backend, name)

        async def frozen(tier: Any, job: Any) -> Any:
            answers.begun.append(job.job_id)
            await asyncio.get_running_loop().run_in_executor(threads, answers.wait)
            return await usual(tier, job)

        monkeypatch.setattr(backend, name, frozen)
        return answers

    yield freeze
    answers.set()
    threads.shutdown()


@pytest.mark.parametrize("kind", ["load", "store"])
def test_a_call_ends_at_its_deadline_and_its_memory_is_left_alone(kind, opened, engine, freeze):
    tier = opened()
    engine.write(key(1), 0)
    tier.store([key(1)], [0], LONG)
    answers = freeze(kind)
    engine.halves[:, 5] = 7
    name = key(1) if kind == "load" else key(2)
    assert getattr(tier, kind)([name], [5], 0.5) == [LATE]
    engine.halves[:, 5] = 9
    answers.set()
    others = [key(number) for number in range(10, 14)]
    until = time.monotonic() + LONG
    while not all(outcome.ok for outcome in tier.store(others, range(6, 10), LONG)):
        assert time.monotonic() < until
    assert np.all(engine.halves[:, 5] == 9)
    tier.close()
    assert np.all(engine.halves[:, 5] == 9)


def test_a_tier_that_is_late_again_and_again_is_left_alone(opened, freeze):
    tier = opened(job_timeout_seconds=0.5)
    tier.store([key(1)], [0], LONG)
    freeze("load")
    late = 0
    while tier.find([key(1)], LONG) == [True]:
        late += tier.load([key(1)], [5], LONG) == [LATE]
    assert 5 <= late <= 7, "five, and those under way when the fifth is noticed"
    began = time.monotonic()
    assert not tier.load([key(1)], [5], LONG)[0].ok
    assert time.monotonic() - began < LONG / 2


@pytest.mark.parametrize("kind", ["load", "store"])
def test_a_tier_that_answers_nothing_during_two_calls_is_left_alone(kind, opened, freeze):
    tier = opened(job_timeout_seconds=LONG)
    tier.store([key(1)], [0], LONG)
    answers = freeze(kind)
    for number in range(2):
        assert getattr(tier, kind)([key(1 if kind == "load" else 10 + number)], [5], 1.2) == [LATE]
    began = time.monotonic()
    assert getattr(tier, kind)([key(1 if kind == "load" else 20)], [5], LONG)[0].reason is DropReason.TIER_DOWN
    assert time.monotonic() - began < LONG / 2
    answers.set()
    until = time.monotonic() + LONG
    while not getattr(tier, kind)([key(1 if kind == "load" else 30)], [5], LONG)[0].ok:
        assert time.monotonic() < until, "it is tried again after a pause"
        time.sleep(0.02)


def test_a_slow_tier_is_no_dead_one(opened, freeze):
    tier = opened(job_timeout_seconds=LONG)
    tier.store([key(1)], [0], LONG)
    answers = freeze("load")
    assert tier.load([key(1)], [5], 1.2) == [LATE]
    answers.set()
    assert tier.load([key(1)], [6], LONG) == [LOADED]
    answers.clear()
    assert tier.load([key(1)], [5], 1.2) == [LATE]
    assert tier.find([key(1)], LONG) == [True]
    answers.set()


def test_a_call_that_is_too_short_says_nothing_of_the_tier_and_what_waits_is_not_begun(opened, freeze):
    tier = opened(inflight_bytes="40KiB")  # one block in each direction
    tier.store([key(1)], [0], LONG)
    disk = freeze("load")
    for _ in range(8):
        assert tier.load([key(1)], [5], 0.01) == [LATE]
    assert tier.find([key(1)], LONG) == [True]
    disk.set()
    assert tier.load([key(1)], [5], LONG) == [LOADED]
    assert len(disk.begun) <= 2, "the first, which had begun, and the last"


def test_a_lease_keeps_a_block_while_others_fill_the_tier(opened):
    tier = opened(capacity=8 << 20, lease_seconds=LONG)
    assert tier.store([key(1)], [0], LONG) == [STORED]
    tier.lease([key(1)])
    number = 100
    while not tier.stats().tiers["fs"].evictions or number < 1000:
        tier.store([key(number + each) for each in range(PAGES)], range(PAGES), LONG)
        number += PAGES
    assert tier.find([key(1)], LONG) == [True]
    tier.release([key(1)])
    for _ in range(4):
        while tier.find([key(1)], LONG) == [True]:
            tier.store([key(number + each) for each in range(PAGES)], range(PAGES), LONG)
            number += PAGES


def test_every_call_ends_when_the_plane_fails(opened, monkeypatch):
    tier = opened()
    assert tier.store([key(1)], [0], LONG) == [STORED]
    monkeypatch.setattr(EngineMemoryPlane, "submit", lambda *args: 1 / 0)
    assert not tier.load([key(1)], [1], LONG)[0].ok
    assert tier.find([key(1)], LONG) == [False]
    tier.reset()
    assert not tier.store([key(1)], [0], LONG)[0].ok


def test_figures_are_served_to_kvtier_top(opened, tmp_path):
    path = tmp_path / "stats.sock"
    tier = opened(stats_socket=str(path))
    tier.store([key(1)], [0], LONG)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        found = json.loads(b"".join(iter(lambda: client.recv(1 << 16), b"")))
    assert stats_from_json(found).tiers["fs"].stored == 1
    tier.close()
    assert not path.exists()
    part = engine_part(tier._options, 1, 2)
    assert part.stats_socket == f"{path}-1"
    assert part.roots == [f"{tmp_path / 'kv'}-1"]


def test_calls_after_closing_are_misses(opened):
    tier = opened()
    tier.store([key(1)], [0], LONG)
    tier.close()
    assert tier.find([key(1)], LONG) == [False]
    assert tier.lookup(key(1), "") is LookupResult.MISS
    assert not tier.load([key(1)], [1], LONG)[0].ok


def test_a_tier_above_the_disk_is_refused():
    with pytest.raises(ConfigError, match="cpu is no tier below the CPU"):
        read_options(EngineMemoryOptions, "cpu", {}, "tier")


def test_a_layout_with_other_groups_than_the_memory_is_refused(engine, tmp_path):
    options = read_options(EngineMemoryOptions, "fs", {"roots": [str(tmp_path / "a")], "capacity": 64 << 20}, "tier")
    with pytest.raises(ConfigError, match="the layout has 1 groups, the memory 2"):
        BlockingTier(options, Namespace(KVLayout.of_pages(PAGE)), engine.memory, "fs", logging.getLogger("test"))
    assert module.memory_geometry(LAYOUT, engine.memory, 4096).aligned_bytes(0) == 8192
