"""New weights: nothing from before a reset is ever found again, in memory, on disk, or under way."""

from __future__ import annotations

import asyncio
import random

import pytest
from support_stack import (
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
    statuses,
    store,
    until,
    whole,
)
from support_stack_tiers import LOAD, STORE, backends

from kvtier.errors import ResourceError


def over_memory(engine: Engine, rows: int = 16, kind: str = "memory", **settings: float):
    parts = parts_of(stack_file(PLAIN, rows, {"type": kind}, backends=backends()), engine, backends(), **settings)
    return parts, parts.tiers[-1]


async def test_nothing_from_before_is_found_in_memory_or_after_reopening(tmp_path):
    engine = Engine(PLAIN, 64)
    config = stack_file(PLAIN, 16, fs(tmp_path / "r"))
    old, new = keys(30), keys(30)[10:20]
    async with running(config, engine) as stack:
        for start in (0, 10, 20):
            await store(stack, engine, whole(old[start : start + 10]))
            assert await stack.drain(20)
        assert set(stack.locate(old)) == {"cpu", "fs"}
        await stack.reset()
        assert stack.locate(old) == [None] * 30
        assert list(await stack.lookup(old)) == ["miss"] * 30
        before = engine.snapshot()
        assert statuses(await load(stack, engine, whole(old, 30))) == ["missing"] * 30
        assert engine.untouched(before, [])
        slots = held(stack)
        assert slots["cpu"]["ready"] == slots["fs"]["ready"] == 0
        assert slots["cpu"]["quarantined"] == slots["fs"]["quarantined"] == 0
        assert statuses(await store(stack, engine, whole(new))) == ["stored"] * 10
    async with running(config, engine) as stack:
        assert stack.locate(old) == [None] * 10 + ["fs"] * 10 + [None] * 10
        engine.wipe()
        assert statuses(await load(stack, engine, whole(new))) == ["loaded"] * 10


async def test_a_reset_stays_reset_when_nothing_is_stored_after_it(tmp_path):
    engine = Engine(PLAIN, 64)
    config = stack_file(PLAIN, 16, fs(tmp_path / "a", tmp_path / "b"))
    async with running(config, engine) as stack:
        await store(stack, engine, whole(keys(16)))
        assert await stack.drain(20)
        await stack.reset()
    for _ in range(2):
        async with running(config, engine) as stack:
            assert stack.locate(keys(16)) == [None] * 16


async def test_the_same_key_after_a_reset_has_the_new_bytes(tmp_path):
    engine = Engine(PLAIN, 64)
    config = stack_file(PLAIN, 16, fs(tmp_path / "r"))
    names = keys(8)
    async with running(config, engine) as stack:
        engine.pages[0][:8] = 0x01
        assert statuses(await stack.run(stack.job(STORE, [whole(names)]))) == ["stored"] * 8
        assert await stack.drain(20)
        await stack.reset()
        engine.pages[0][:8] = 0x02
        assert statuses(await stack.run(stack.job(STORE, [whole(names)]))) == ["stored"] * 8
    async with running(config, engine) as stack:
        engine.wipe()
        assert statuses(await stack.run(stack.job(LOAD, [whole(names)]))) == ["loaded"] * 8
        assert (engine.pages[0][:8] == 0x02).all()


async def test_loads_under_way_from_a_tier_are_not_loaded():
    engine = Engine(PLAIN, 64)
    parts, tier = over_memory(engine, rows=32)
    names = keys(8)
    async with opened(parts) as stack:
        for start in range(0, 500, 100):
            await store(stack, engine, whole(keys(8, start=start)))
            assert await stack.drain(10)
        assert stack.locate(names) == ["memory"] * 8
        before = engine.snapshot()
        tier.hold(LOAD)
        loading = asyncio.create_task(stack.run(stack.job(LOAD, [whole(names, 20)])))
        await until(lambda: tier.moving[LOAD] == 8)
        await stack.reset()
        assert statuses(await loading) == ["cancelled"] * 8
        assert held(stack)["cpu"]["quarantined"] == 8, "the tier still writes into these rows"
        assert held(stack)["memory"]["quarantined"] == 8, "and still reads these slots"
        assert statuses(await store(stack, engine, whole(names))) == ["stored"] * 8
        tier.let_go()
        await until(lambda: held(stack)["cpu"]["quarantined"] + held(stack)["memory"]["quarantined"] == 0)
        assert engine.untouched(before, [whole(names)])
        assert statuses(await load(stack, engine, whole(names, 20))) == ["loaded"] * 8
        assert tier.epochs == [1]


async def test_copies_to_the_gpu_under_way_are_not_loaded():
    engine = Engine(PLAIN, 64)
    parts, _ = over_memory(engine)
    gpu, names = parts.tiers[0], keys(8)
    copy, begun, go_on = gpu.store, asyncio.Event(), asyncio.Event()

    async def held_up(job):
        begun.set()
        await go_on.wait()
        return await copy(job)

    gpu.store = held_up
    async with opened(parts) as stack:
        await store(stack, engine, whole(names))
        loading = asyncio.create_task(stack.run(stack.job(LOAD, [whole(names, 20)])))
        await begun.wait()
        await stack.reset()
        assert held(stack)["cpu"]["quarantined"] == 8, "the copy still reads these rows"
        assert not loading.done(), "its GPU blocks are in use"
        go_on.set()
        assert statuses(await loading) == ["cancelled"] * 8
        assert held(stack)["cpu"]["free"] == 16


async def test_copies_from_the_gpu_under_way_do_not_become_visible():
    engine = Engine(PLAIN, 64)
    parts, _ = over_memory(engine)
    gpu, names = parts.tiers[0], keys(8)
    copy, begun, go_on = gpu.load, asyncio.Event(), asyncio.Event()

    async def held_up(job):
        begun.set()
        await go_on.wait()
        return await copy(job)

    gpu.load = held_up
    async with opened(parts) as stack:
        storing = asyncio.create_task(store(stack, engine, whole(names)))
        await begun.wait()
        await stack.reset()
        go_on.set()
        assert statuses(await storing) == ["dropped:reset"] * 8
        assert stack.locate(names) == [None] * 8
        assert held(stack)["cpu"]["free"] == 16


async def test_stores_under_way_do_not_become_visible():
    engine = Engine(PLAIN, 64)
    parts, tier = over_memory(engine)
    names = keys(8)
    async with opened(parts) as stack:
        tier.hold(STORE)
        await store(stack, engine, whole(names))
        assert tier.moving[STORE] == 4
        await stack.reset()
        assert stack.locate(names) == [None] * 8
        assert held(stack)["memory"]["quarantined"] == 4
        tier.let_go()
        await until(lambda: held(stack)["memory"]["quarantined"] == 0)
        assert await stack.drain(10)
        assert stack.locate(names) == [None] * 8
        assert statuses(await load(stack, engine, whole(names, 20))) == ["missing"] * 8
        assert held(stack)["cpu"]["free"] == 16


@pytest.mark.parametrize("kind", ["memory", "shared"])
async def test_a_reset_at_any_moment_of_loads_and_stores(seed, kind):
    """Payloads of every age of the weights differ, so a block that outlived a reset shows itself."""
    rng = random.Random(seed)
    engine = Engine(PLAIN, 96)
    parts, _ = over_memory(engine, 8, kind)
    names = keys(12)

    async def put(age: int, chosen: list) -> None:
        engine.pages[0][: len(chosen)] = age
        await stack.run(stack.job(STORE, [whole(chosen)]))

    async def get(age: int, chosen: list) -> None:
        result = await stack.run(stack.job(LOAD, [whole(chosen, 40)]))
        for i, status in enumerate(statuses(result)):
            if status == "loaded":
                assert (engine.pages[0][40 + i] == age).all(), f"bytes of age {engine.pages[0][40 + i, 0]} in age {age}"
        seen.update(statuses(result))

    seen: set[str] = set()
    async with opened(parts) as stack:
        for current in range(1, 80):
            await put(current, rng.sample(names, 6))
            await put(current, rng.sample(names, 6))
            tasks = [
                asyncio.create_task(put(current, rng.sample(names, 6))),
                asyncio.create_task(get(current, rng.sample(names, 12))),
            ]
            if rng.random() < 0.3:
                await asyncio.wait(tasks)
            elif rng.random() < 0.7:
                await asyncio.sleep(rng.random() * 0.006)
            await asyncio.gather(*tasks, stack.reset())
            stack.check_integrity()
            assert stack.locate(names) == [None] * 12
        assert {"loaded", "missing", "cancelled"} <= seen
        await until(lambda: held(stack)["cpu"]["free"] == 8)


async def test_stores_that_wait_for_a_row_are_dropped_by_a_reset():
    engine = Engine(PLAIN, 64)
    parts, tier = over_memory(engine, rows=4)
    async with opened(parts) as stack:
        tier.hold(STORE)
        await store(stack, engine, whole(keys(4)))
        waiting = asyncio.create_task(store(stack, engine, whole(keys(6, start=50), 20)))
        await asyncio.sleep(0)
        await stack.reset()
        result = statuses(await waiting)
        assert result.count("dropped:reset") >= 2
        assert set(result) <= {"dropped:reset", "stored"}
        stored = result.count("stored")
        assert [place is not None for place in stack.locate(keys(6, start=50))].count(True) == stored
        tier.let_go()


async def test_leases_end_with_a_reset():
    engine = Engine(PLAIN, 64)
    parts, _ = over_memory(engine, rows=8)
    async with opened(parts) as stack:
        await store(stack, engine, whole(keys(8)))
        assert await stack.drain(10)
        with stack.request("request") as request:
            assert request.reserve(keys(8)).hits() == [True] * 8
            await stack.reset()
            assert request.reserve(keys(8)).hits() == [False] * 8
        assert held(stack)["cpu"]["free"] == 8


async def test_a_disk_that_cannot_keep_the_reset_is_an_error_and_memory_is_reset_all_the_same(tmp_path):
    engine = Engine(PLAIN, 64)
    parts, tier = over_memory(engine)

    async def refuse(epoch: int) -> None:
        raise ResourceError("the superblock cannot be written")

    tier.reset = refuse
    async with opened(parts) as stack:
        await store(stack, engine, whole(keys(8)))
        with pytest.raises(ResourceError, match="superblock"):
            await stack.reset()
        assert stack.locate(keys(8)) == [None] * 8


async def test_resets_follow_each_other(tmp_path):
    engine = Engine(PLAIN, 64)
    config = stack_file(PLAIN, 16, fs(tmp_path / "r"))
    for session in range(3):
        async with running(config, engine) as stack:
            await store(stack, engine, whole(keys(8)))
            assert await stack.drain(20)
            await asyncio.gather(stack.reset(), stack.reset())
            await stack.reset()
            assert stack.locate(keys(8)) == [None] * 8
            await store(stack, engine, whole(keys(4, start=100 + session)))
    async with running(config, engine) as stack:
        assert stack.locate(keys(8)) == [None] * 8
        assert stack.locate(keys(4, start=102)) == ["fs"] * 4
