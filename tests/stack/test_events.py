"""Events replayed into sets give exactly what lookup finds, in every tier, however much is evicted."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
from support_stack import (
    HYBRID,
    PLAIN,
    Engine,
    fs,
    held,
    keys,
    load,
    opened,
    parts_of,
    running,
    stack_file,
    store,
    until,
    whole,
)
from support_stack_tiers import LOAD, STORE, backends

from kvtier.tier.contract import LookupResult
from kvtier.types.arrays import int_array
from kvtier.types.events import OffloadingEvent
from kvtier.types.jobs import CORRUPT
from kvtier.types.keys import CPU, FS, Medium, OffloadKey


class Index:
    """What a router knows: a set of keys for each medium, kept by events alone."""

    def __init__(self) -> None:
        self.sets: dict[Medium, set[OffloadKey]] = {}
        self.removals: dict[Medium, int] = {}

    def take(self, events: Iterable[OffloadingEvent]) -> None:
        for event in events:
            assert event.keys
            mine = self.sets.setdefault(event.medium, set())
            for key in event.keys:
                if event.removed:
                    assert key in mine, "removed and was not there"
                    mine.remove(key)
                    self.removals[event.medium] = self.removals.get(event.medium, 0) + 1
                else:
                    assert key not in mine, "stored and was there"
                    mine.add(key)

    def of(self, medium: Medium) -> set[OffloadKey]:
        return self.sets.setdefault(medium, set())


async def agree(stack, index: Index, universe: list[OffloadKey]) -> None:
    """What the index says is what the stack answers."""
    index.take(stack.take_events())
    in_cpu, below = index.of(CPU), index.of(FS)
    for key, place, answer in zip(universe, stack.locate(universe), await stack.lookup(universe), strict=True):
        expected = "cpu" if key in in_cpu else "fs" if key in below else None
        assert place == expected
        found = {"cpu": LookupResult.HIT, "fs": LookupResult.HIT_PENDING, None: LookupResult.MISS}
        assert answer is found[place]
    assert in_cpu | below <= set(universe)


@pytest.mark.parametrize("write_policy", ["write_through", "on_evict"])
async def test_events_tell_what_is_where_under_eviction(tmp_path, seed, write_policy):
    rng = random.Random(seed)
    engine = Engine(PLAIN, 64)
    lower = fs(tmp_path / "r", capacity=512 << 10, write_policy=write_policy)
    universe = keys(160)
    index = Index()
    async with running(stack_file(PLAIN, 16, lower), engine) as stack:
        for _ in range(60):
            await store(stack, engine, whole(rng.sample(universe, rng.randint(1, 12))))
            if rng.random() < 0.5:
                await load(stack, engine, whole(rng.sample(universe, rng.randint(1, 30)), 20))
            if rng.random() < 0.3:
                await stack.drain(10)
            await agree(stack, index, universe)
        assert await stack.drain(10)
        await agree(stack, index, universe)
        assert index.removals[CPU] > 20
        assert index.removals[FS] > 20, "the disk evicted too"
        assert stack.stats().tiers["fs"].evictions == index.removals[FS]
        assert stack.stats().tiers["cpu"].evictions == index.removals[CPU]


async def test_one_event_may_mix_groups_and_regions_that_are_cut_anew_are_told(tmp_path, seed):
    rng = random.Random(seed)
    engine = Engine(HYBRID, 64)
    lower = fs(tmp_path / "r", capacity=1 << 20, region_bytes=128 << 10)
    full, window = keys(60, 0), keys(60, 1)
    index = Index()
    async with running(stack_file(HYBRID, 8, lower), engine) as stack:
        for turn in range(40):
            mine = full if turn // 10 % 2 else window
            names = rng.sample(mine, 4)
            await store(stack, engine, whole(names, 0, 4))
            assert await stack.drain(10)
            await agree(stack, index, full + window)
        assert index.removals[FS] > 10
    reopened = Index()
    async with running(stack_file(HYBRID, 8, lower), engine) as stack:
        reopened.take(stack.take_events())
        assert reopened.of(FS) == index.of(FS)


async def test_what_is_found_at_opening_is_told_and_a_reset_takes_it_all_back(tmp_path):
    engine = Engine(PLAIN, 64)
    config = stack_file(PLAIN, 16, fs(tmp_path / "r"))
    names = keys(12)
    index = Index()
    async with running(config, engine) as stack:
        await store(stack, engine, whole(names))
        assert await stack.drain(10)
        index.take(stack.take_events())
    assert index.of(CPU) == index.of(FS) == set(names)
    found = Index()
    async with running(config, engine) as stack:
        found.take(stack.take_events())
        assert (found.of(CPU), found.of(FS)) == (set(), set(names))
        await load(stack, engine, whole(names[:5]))
        await agree(stack, found, names)
        assert found.of(CPU) == set(names[:5])
        await stack.reset()
        await agree(stack, found, names)
        assert (found.of(CPU), found.of(FS)) == (set(), set())


async def test_a_block_that_proves_corrupt_is_told_as_removed():
    engine = Engine(PLAIN, 64)
    parts = parts_of(stack_file(PLAIN, 8, {"type": "memory"}, backends=backends()), engine, backends())
    tier = parts.tiers[-1]
    medium = tier.medium
    names = keys(4)
    index = Index()
    async with opened(parts) as stack:
        await store(stack, engine, whole(names))
        assert await stack.drain(10)
        for start in (100, 104):
            await store(stack, engine, whole(keys(4, start=start), 8))
            assert await stack.drain(10)
        tier.spoil = lambda kind, key: CORRUPT if kind is LOAD and key == names[1] else None
        await load(stack, engine, whole(names))
        index.take(stack.take_events())
        assert names[1] not in index.of(medium)
        assert set(names) - {names[1]} <= index.of(medium)
        assert stack.locate(names[1:2]) == [None]


async def test_stores_that_are_late_partial_or_cancelled_are_told_as_far_as_they_are_found(seed):
    rng = random.Random(seed)
    engine = Engine(HYBRID, 64)
    parts = parts_of(stack_file(HYBRID, 8), engine)
    universe = keys(40)
    index = Index()
    async with opened(parts) as stack:
        for _ in range(60):
            one = whole(rng.sample(universe, 6), 0, 4)
            if rng.random() < 0.5:
                one = replace(one, runs=one.runs.select(int_array([0, 2])), keys=one.keys[:2])
            job = stack.job(STORE, [one], timeout_seconds=rng.choice([0.0, 0.0005, 10.0]))
            task = asyncio.create_task(stack.run(job))
            await asyncio.sleep(rng.random() * 0.001)
            if rng.random() < 0.5:
                task.cancel()
            await asyncio.wait((task,))
            await agree(stack, index, universe)
        await until(lambda: held(stack)["cpu"]["filling"] + held(stack)["cpu"]["quarantined"] == 0)
        await agree(stack, index, universe)


async def test_events_that_nobody_takes_are_bounded_and_counted():
    engine = Engine(PLAIN, 64)
    async with opened(parts_of(stack_file(PLAIN, 8), engine, events_max=10)) as stack:
        for i in range(30):
            await store(stack, engine, whole(keys(1, start=i)))
        events = stack.take_events()
        assert len(events) == 10
        told = sum(len(event.keys) for event in events)
        assert stack.stats().events_lost == 30 + 22 - told
    async with opened(parts_of(stack_file(PLAIN, 8), engine, events_max=0)) as stack:
        await store(stack, engine, whole(keys(4)))
        assert stack.take_events() == []
