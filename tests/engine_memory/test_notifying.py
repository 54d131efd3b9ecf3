"""A tier that tells what ended: each call is answered once, from any thread, whatever the tier below does."""

from __future__ import annotations

import asyncio
import logging
import queue
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtier.engines.engine_memory import tier as module
from kvtier.engines.engine_memory.memory import ArenaMemory
from kvtier.engines.engine_memory.notifying import Changes, NotifyingTier
from kvtier.engines.engine_memory.options import EngineMemoryOptions, read_options
from kvtier.engines.engine_memory.plane import EngineMemoryPlane
from kvtier.engines.engine_memory.transfers import EngineTransfer
from kvtier.errors import UsageError
from kvtier.options import SharedTierOptions
from kvtier.testing.memory import MemoryOptions, SharedMemoryTier
from kvtier.tier.contract import LookupResult
from kvtier.types.geometry import KVLayout
from kvtier.types.jobs import DropReason, JobKind
from kvtier.types.keys import OffloadKey, make_key
from kvtier.types.namespace import Namespace

BLOCK = 8192
PLACES = 64
LONG = 60.0
NAMESPACE = Namespace(KVLayout.of_pages(BLOCK))


def key(number: int) -> OffloadKey:
    return make_key(number.to_bytes(16, "big"), 0)


class Engine:
    """An arena, and the calls of an engine that waits for each answer."""

    def __init__(self, tier: NotifyingTier, arena: np.ndarray, memory: ArenaMemory) -> None:
        self.tier, self.arena, self.memory = tier, arena, memory
        self.changes: Changes = []
        tier.start(self.changes.extend)

    def fill(self, place: int, name: OffloadKey, length: int = BLOCK) -> None:
        block = self.arena[place * BLOCK :][:length]
        block[:] = np.random.default_rng(list(name)).integers(0, 256, length, dtype=np.uint8)

    def begin(
        self, kind: JobKind, names: list[OffloadKey], places: list[int], length: int = BLOCK
    ) -> queue.Queue[EngineTransfer]:
        told: queue.Queue[EngineTransfer] = queue.Queue()
        where = [self.memory.place(0, place * BLOCK, length) for place in places]
        self.tier.transfer(kind, names, where, told.put)
        return told

    def store(self, *numbers: int) -> bool:
        for number in numbers:
            self.fill(number % PLACES, key(number))
        places = [number % PLACES for number in numbers]
        return self.begin(JobKind.STORE, list(map(key, numbers)), places).get(timeout=LONG).ok

    def load(self, number: int, place: int) -> bool:
        return self.begin(JobKind.LOAD, [key(number)], [place]).get(timeout=LONG).ok

    def find(self, *numbers: int, seconds: float = LONG) -> list[bool]:
        told: queue.Queue[list[bool]] = queue.Queue()
        self.tier.find(list(map(key, numbers)), seconds, told.put)
        return told.get(timeout=LONG)


Open = Callable[..., Engine]


@pytest.fixture
def opened(tmp_path) -> Iterator[Open]:
    tiers = []

    def open_tier(**keys: Any) -> Engine:
        place = {"roots": [str(tmp_path / "kv")], "capacity": 64 << 20}
        options = read_options(EngineMemoryOptions, "fs", {**place, **keys}, "tier")
        arena = np.zeros(PLACES * BLOCK, dtype=np.uint8)
        memory = ArenaMemory(arena.ctypes.data, arena.size, (BLOCK,))
        tier = NotifyingTier(options, NAMESPACE, memory, "fs", logging.getLogger("test"))
        tiers.append(tier)
        return Engine(tier, arena, memory)

    yield open_tier
    for tier in tiers:
        tier.close()


def test_what_was_stored_is_found_and_loaded_also_after_a_restart(opened):
    engine = opened()
    assert engine.store(1, 2, 3)
    assert engine.find(1, 2, 3, 4) == [True, True, True, False]
    engine.tier.close()
    again = opened()
    assert again.find(1, 2, 3, 4) == [True, True, True, False]
    assert again.load(2, 9)
    assert np.array_equal(again.arena[9 * BLOCK :][:BLOCK], engine.arena[2 * BLOCK :][:BLOCK])
    assert [(removed, set(names)) for removed, names in again.changes] == [(False, {key(1), key(2), key(3)})]


def test_a_shorter_block_comes_back_with_zeros_behind_it_and_a_load_writes_no_further(opened):
    engine = opened()
    engine.fill(0, key(7), 5000)
    assert engine.begin(JobKind.STORE, [key(7)], [0], 5000).get(timeout=LONG).ok
    engine.arena[BLOCK:] = 5
    assert engine.begin(JobKind.LOAD, [key(7)], [1]).get(timeout=LONG).ok
    assert engine.begin(JobKind.LOAD, [key(7)], [3], 5000).get(timeout=LONG).ok
    whole, short = engine.arena[BLOCK:][:BLOCK], engine.arena[3 * BLOCK :][:BLOCK]
    assert np.array_equal(whole[:5000], engine.arena[:5000])
    assert not whole[5000:].any()
    assert np.array_equal(short[:5000], engine.arena[:5000])
    assert np.all(short[5000:] == 5)


def test_blocks_that_are_removed_or_evicted_are_reported_once(opened):
    engine = opened(capacity=8 << 20)
    assert engine.store(1, 2)
    engine.tier.remove([key(1), key(1), key(99)])
    assert engine.find(1, 2) == [False, True]
    for start in range(100, 1700, PLACES):
        assert engine.store(*range(start, start + PLACES))
    here: set[OffloadKey] = set()
    for removed, names in engine.changes:
        assert here.issuperset(names) if removed else here.isdisjoint(names)
        here = here.difference(names) if removed else here.union(names)
    owned = engine.tier.plane.lower.owned
    assert owned is not None
    assert here == set(owned.directory)
    owned.check()


def test_a_leased_block_is_not_removed(opened):
    engine = opened(lease_seconds=LONG)
    assert engine.store(1)
    engine.tier.lease([key(1)])
    engine.tier.remove([key(1)])
    assert engine.find(1) == [True]
    engine.tier.release([key(1)])
    engine.tier.remove([key(1)])
    assert engine.find(1) == [False]
    engine.tier.plane.check_integrity()


def test_a_touched_block_outlives_those_that_were_not(opened):
    engine = opened(capacity=8 << 20)
    assert engine.store(1)
    for start in range(100, 1700, PLACES):
        engine.tier.touch([key(1), key(12345)])
        assert engine.store(*range(start, start + PLACES))
    assert engine.tier.stats().tiers["fs"].evictions > PLACES
    assert engine.find(1) == [True]


def test_calls_of_many_threads_are_each_answered_once(opened, seed):
    engine = opened(inflight_bytes="256KiB")
    lock = threading.Lock()
    answers: list[int] = []

    def run(number: int) -> None:
        rng = random.Random(seed + number)
        for turn in range(40):
            name, place = rng.randrange(400), 8 * number + rng.randrange(8)
            found = engine.find(name)[0]
            if found and rng.random() < 0.7:
                engine.arena[place * BLOCK :][:BLOCK] = 0
                if engine.load(name, place):
                    expected = np.random.default_rng(list(key(name))).integers(0, 256, BLOCK, dtype=np.uint8)
                    assert np.array_equal(engine.arena[place * BLOCK :][:BLOCK], expected)
            else:
                engine.fill(place, key(name))
                engine.begin(JobKind.STORE, [key(name)], [place]).get(timeout=LONG)
            with lock:
                answers.append(turn)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(8)))
    assert len(answers) == 8 * 40
    assert not engine.tier._tells
    assert not engine.tier.plane.busy


def test_an_answer_may_lead_to_further_calls(opened):
    engine, last = opened(), threading.Event()
    engine.fill(0, key(1))

    def stored(transfer: EngineTransfer) -> None:
        assert transfer.ok
        engine.tier.find([key(1)], LONG, found)

    def found(here: list[bool]) -> None:
        assert here == [True]
        engine.tier.remove([key(1)])
        engine.tier.find([key(1)], LONG, lambda gone: last.set() if gone == [False] else None)

    engine.tier.transfer(JobKind.STORE, [key(1)], [engine.memory.place(0, 0, BLOCK)], stored)
    assert last.wait(LONG)


def test_a_load_from_a_frozen_tier_ends_at_its_deadline_and_leases_end_by_themselves(opened, monkeypatch):
    engine = opened(job_timeout_seconds=0.5, lease_seconds=0.5)
    assert engine.store(1)
    answer, backend = threading.Event(), type(engine.tier._staged.backend)
    usual = backend.load

    async def frozen(tier: Any, job: Any) -> Any:
        await asyncio.get_running_loop().run_in_executor(None, answer.wait)
        return await usual(tier, job)

    monkeypatch.setattr(backend, "load", frozen)
    engine.tier.lease([key(1)])
    told = engine.begin(JobKind.LOAD, [key(1)], [5])
    assert not told.get(timeout=LONG).ok
    engine.arena[5 * BLOCK :][:BLOCK] = 3
    answer.set()
    while engine.tier.plane.lower.rows_late or engine.tier.plane._leases._of_key:
        engine.find(1)
    assert np.all(engine.arena[5 * BLOCK :][:BLOCK] == 3)


def test_every_call_is_answered_when_the_plane_fails(opened, monkeypatch):
    engine = opened()
    assert engine.store(1)
    with monkeypatch.context() as patched:
        patched.setattr(EngineMemoryPlane, "find", lambda *args: 1 / 0)
        assert engine.find(1) == [False]
    assert engine.changes[-1] == (True, [key(1)])
    assert not engine.load(1, 5)
    assert not engine.store(2)


def test_calls_after_closing_are_answered_and_closing_answers_what_is_open(opened):
    engine = opened()
    assert engine.store(1)
    told = engine.begin(JobKind.LOAD, [key(1)], [5])
    engine.tier.close()
    assert told.get(timeout=LONG).ended
    assert engine.find(1) == [False]
    after = engine.begin(JobKind.STORE, [key(1)], [0]).get(timeout=LONG)
    assert [outcome.reason for outcome in after.outcomes] == [DropReason.CLOSING]


def test_a_place_outside_the_arena_is_refused_and_leaves_nothing_open(opened):
    engine = opened()
    with pytest.raises(UsageError, match="no block of group 0"):
        engine.tier.transfer(JobKind.STORE, [key(1)], [1 << 40], lambda transfer: None)
    assert not engine.tier._tells


def test_a_shared_tier_is_waited_for_and_no_longer_than_the_call_says(monkeypatch):
    class SharedOptions(EngineMemoryOptions, SharedTierOptions, MemoryOptions):
        """A shared tier in memory."""

    class Silent(SharedMemoryTier):
        asked = 0

        async def lookup(self, keys: Any) -> Any:
            type(self).asked += 1
            if type(self).asked == 1:
                await asyncio.sleep(0)
                return [LookupResult.HIT if name == key(1) else LookupResult.MISS for name in keys]
            return await asyncio.Event().wait()

    monkeypatch.setattr(module, "discover", lambda: SimpleNamespace(get=lambda name: Silent))
    arena = np.zeros(PLACES * BLOCK, dtype=np.uint8)
    memory = ArenaMemory(arena.ctypes.data, arena.size, (BLOCK,))
    options = SharedOptions(type="memory", name="below")
    tier = NotifyingTier(options, NAMESPACE, memory, "below", logging.getLogger("test"))
    engine = Engine(tier, arena, memory)
    try:
        assert engine.find(1, 2) == [True, False]
        assert engine.find(1, 3, seconds=0.5) == [True, False]
        assert not tier._searches
    finally:
        tier.close()
