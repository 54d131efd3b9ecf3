"""A service below an engine's memory: right bytes for each engine of a namespace, and calls that end in time."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support_engine_memory import LAYOUT, LONG, PAGE, PAGES, STATE, Engine, content, key
from support_service import PAGE as SMALL_ROW
from support_service import end, peer_pid, stack_process, stack_text, until

from kvtier.engines.engine_memory.options import ServiceOptions
from kvtier.engines.engine_memory.service import ServiceTier
from kvtier.errors import ConfigError, ResourceError, UsageError
from kvtier.types.jobs import LATE, LOADED, BlockStatus
from kvtier.types.namespace import Namespace

ROW = 20480
"""Bytes of a row: a block of the larger group, page-aligned."""
SECONDS, PATIENCE = 1.0, 20.0
"""The time that a call may take, and by how much a busy machine may delay it."""


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "stack.yaml"
    path.write_text(stack_text(64 * ROW // SMALL_ROW, tmp_path / "root"))
    return path


@pytest.fixture
def socket(file, tmp_path) -> Iterator[str]:
    path = str(tmp_path / "socket")
    with stack_process(file, path):
        yield path


@contextmanager
def engine_at(socket: str, tag: str = "", **options: Any) -> Iterator[tuple[Engine, ServiceTier]]:
    engine = Engine()
    given = ServiceOptions.model_validate({"type": "service", "service": socket, **options})
    tier = ServiceTier(given, Namespace(LAYOUT, tag=tag), engine.memory, "test", logging.getLogger("test"))
    try:
        yield engine, tier
    finally:
        tier.close()


def store(engine: Engine, tier: ServiceTier, names: list[bytes], first: int = 0) -> None:
    for place, name in enumerate(names, first):
        engine.write(name, place)
    outcomes = tier.store(names, range(first, first + len(names)), LONG)
    assert [each.status for each in outcomes] == [BlockStatus.STORED] * len(names)


def check(engine: Engine, names: list[bytes], first: int = 0) -> None:
    for place, name in enumerate(names, first):
        assert np.array_equal(engine.read(name, place), content(name))


def test_what_one_engine_stored_another_finds_and_loads_out_of_rows_and_from_the_disk(file, tmp_path):
    path, names = str(tmp_path / "socket"), [key(number, number % 2) for number in range(12)]
    with stack_process(file, path) as service:
        with engine_at(path) as (one, first), engine_at(path) as (two, second):
            assert second.find(names, LONG) == [False] * 12
            store(one, first, names)
            assert second.find([*names, key(99)], LONG) == [True] * 12 + [False]
            assert second.load(names, range(12), LONG) == [LOADED] * 12
            check(two, names)
            assert first.store(names, range(12), LONG)[0].ok
            assert first.stats().tiers["cpu"].stored == 12
        end(service)
    with stack_process(file, path), engine_at(path) as (three, third):
        assert third.find(names, LONG) == [True] * 12
        third.lease(names)
        assert third.load(names, range(4, 16), LONG) == [LOADED] * 12
        third.release(names)
        check(three, names, 4)


def test_more_blocks_than_rows_pass_through_in_one_call_of_several_threads(socket):
    with engine_at(socket) as (engine, tier):
        for first in range(0, 96, PAGES):
            store(engine, tier, [key(number) for number in range(first, first + PAGES)])
        chosen = [[key(number) for number in range(first, first + 8)] for first in (0, 40, 72, 88)]
        engine.halves[:] = 0
        with ThreadPoolExecutor(4) as threads:
            calls = [threads.submit(tier.load, some, range(8 * at, 8 * at + 8), LONG) for at, some in enumerate(chosen)]
            for at, (call, some) in enumerate(zip(calls, chosen, strict=True)):
                assert call.result() == [LOADED] * 8
                check(engine, some, 8 * at)


def test_while_the_service_is_gone_all_is_a_miss_and_the_next_one_is_found(file, tmp_path):
    path, names = str(tmp_path / "socket"), [key(number) for number in range(8)]
    with stack_process(file, path) as service, engine_at(path) as (engine, tier):
        store(engine, tier, names)
        service.kill()
        service.wait()
        until(lambda: not any(tier.find(names, 1.0)), "a service that was killed has nothing")
        assert not any(each.ok for each in tier.load(names, range(8), 1.0))
        assert not any(each.ok for each in tier.store(names, range(8), 1.0))
        with stack_process(file, path):
            until(lambda: all(each.ok for each in tier.store(names, range(8), 1.0)), "the next one stores")
            engine.halves[:] = 0
            assert tier.load(names, range(8), LONG) == [LOADED] * 8
            check(engine, names)


def test_a_call_to_a_frozen_service_ends_in_its_time_and_nothing_touches_its_memory_any_more(socket):
    names = [key(number) for number in range(8)]
    with engine_at(socket, lease_seconds=0.2) as (engine, tier):
        store(engine, tier, names)
        pid = peer_pid(socket)
        os.kill(pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            assert tier.load(names, range(8), 0.5) == [LATE] * 8
            assert tier.find([key(50)], 0.5) == [False]
            assert time.monotonic() - began < 10
            engine.halves[:] = 7
        finally:
            os.kill(pid, signal.SIGCONT)
        assert tier.find(names, LONG) == [True] * 8
        time.sleep(0.3)  # what was late would have come by now
        assert np.all(engine.halves == 7)
        assert tier.load(names, range(8), LONG) == [LOADED] * 8
        check(engine, names)


def test_a_reset_is_one_for_all_engines_and_closing_ends_calls(socket):
    names = [key(number) for number in range(4)]
    with engine_at(socket) as (engine, one), engine_at(socket) as (_, two):
        store(engine, one, names)
        assert two.find(names, LONG) == [True] * 4
        two.reset(LONG)
        assert one.find(names, LONG) == [False] * 4
        os.kill(peer_pid(socket), signal.SIGSTOP)
        try:
            found: list[Any] = []
            call = threading.Thread(target=lambda: found.extend(one.load(names, range(4), LONG)))
            call.start()
            until(lambda: one._jobs, "it has begun")
            one.close()
            call.join(20)
            assert [each.ok for each in found] == [False] * 4
        finally:
            os.kill(peer_pid(socket), signal.SIGCONT)
        assert one.find(names, 1.0) == [False] * 4
        assert not one.store(names, range(4), 1.0)[0].ok


def test_engines_of_another_tag_find_nothing_and_wrong_calls_are_refused(socket, tmp_path):
    with engine_at(socket) as (engine, tier), engine_at(socket, tag="other") as (_, other):
        store(engine, tier, [key(1)])
        assert other.find([key(1)], LONG) == [False]
        with pytest.raises(UsageError):
            tier.load([key(1)], [PAGES], LONG)
        assert tier.load([key(1), key(1)], [2, 3], LONG) == [LOADED] * 2
        check(engine, [key(1), key(1)], 2)
        with pytest.raises(ConfigError, match="namespace"), engine_at(socket, tag="third"):
            pass
    with pytest.raises(ResourceError, match="no stack process answers"), engine_at(str(tmp_path / "nothing")):
        pass
    until(lambda: not any(each.name.startswith("kvtier") for each in threading.enumerate()), "all threads have ended")
    assert PAGE < STATE <= ROW


class RandomCalls:
    """Random calls of one engine's thread on pages of its own: wrong bytes or a late call are faults."""

    def __init__(self, engine: Engine, tier: ServiceTier, first: int, seed: int) -> None:
        self._engine, self._tier, self._first = engine, tier, first
        self._rng = random.Random(seed)
        self.loaded = self.failed = 0
        self.slowest = 0.0

    def run(self, over: threading.Event) -> None:
        while not over.is_set():
            began = time.monotonic()
            self._call()
            self.slowest = max(self.slowest, time.monotonic() - began)

    def _call(self) -> None:
        rng, tier = self._rng, self._tier
        count = rng.randint(1, 8)
        numbers = rng.sample(range(120), count)
        names = [key(number, number % 2) for number in numbers]
        places = range(self._first, self._first + count)
        chance = rng.random()
        if chance < 0.02:
            with suppress(ResourceError):
                tier.reset(SECONDS)
        elif chance < 0.4:
            for place, name in zip(places, names, strict=True):
                self._engine.write(name, place)
            self.failed += not all(each.ok for each in tier.store(names, places, SECONDS))
        else:
            if rng.random() < 0.5 and any(tier.find(names, SECONDS)):
                tier.lease(names)
            outcomes = tier.load(names, places, SECONDS)
            tier.release(names)
            for place, name, outcome in zip(places, names, outcomes, strict=True):
                if outcome is LOADED:
                    assert np.array_equal(self._engine.read(name, place), content(name)), name
                    self.loaded += 1
            if rng.random() < 0.5:  # the memory is the engine's again
                for place, name in zip(places, names, strict=True):
                    self._engine.write(name, place)
                time.sleep(0.002)
                for place, name in zip(places, names, strict=True):
                    assert np.array_equal(self._engine.read(name, place), content(name)), name


def test_random_calls_while_the_service_is_killed_and_frozen(file, tmp_path, seed, dial):
    """Two engines, two threads each. No wrong byte, no call that is late, no byte written after a call."""
    rng, path, strikes = random.Random(seed), str(tmp_path / "socket"), dial(60, 3)
    with ExitStack() as opened:
        service = opened.enter_context(stack_process(file, path))
        engines = [opened.enter_context(engine_at(path, lease_seconds=0.3)) for _ in range(2)]
        threads = opened.enter_context(ThreadPoolExecutor(4))
        calls = [RandomCalls(*each, first, rng.randrange(1 << 30)) for each in engines for first in (0, 16)]
        over = threading.Event()
        opened.callback(over.set)
        ended = [threads.submit(each.run, over) for each in calls]
        for _ in range(strikes):
            time.sleep(rng.uniform(0.3, 1.0))
            if rng.random() < 0.5:
                service.kill()
                service.wait()
                service = opened.enter_context(stack_process(file, path))
            else:
                service.send_signal(signal.SIGSTOP)
                time.sleep(rng.uniform(0.1, 1.5))
                service.send_signal(signal.SIGCONT)
        time.sleep(1.0)
        over.set()
        for each in ended:
            each.result()
    loaded, slowest = sum(each.loaded for each in calls), max(each.slowest for each in calls)
    failed = sum(each.failed for each in calls)
    print(f"{strikes} strikes, {loaded} blocks loaded, {failed} stores failed, slowest call {slowest:.2f} s")
    assert loaded > 10 * strikes
    assert slowest < SECONDS + PATIENCE
