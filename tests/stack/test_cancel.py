"""Cancelling at any moment: the caller's blocks are the caller's again, no slot is lost, and the rest goes on."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from support_stack import (
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

from kvtier.stack import TierStack
from kvtier.stack.shutdown import end_tiers
from kvtier.types.geometry import GroupLayout, KVLayout, TensorRef

LARGE = KVLayout((GroupLayout((TensorRef(0, 64 << 10),)),))
CASES = 150


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def all_rows_come_back(stack, engine, rows: int, tag: str) -> None:
    """Nothing is filling, quarantined or held: every single row can be filled anew."""
    await until(lambda: not any(slots[s] for slots in held(stack).values() for s in ("filling", "quarantined")))
    stack.check_integrity()
    for start in range(0, rows, rows // 2):
        fresh = keys(rows // 2, start=start, tag=tag)
        assert statuses(await store(stack, engine, whole(fresh, engine.num_blocks - rows // 2))) == ["stored"] * len(
            fresh
        )
        assert await stack.drain(20)
    assert held(stack)["cpu"]["ready"] == rows


@pytest.mark.parametrize("rows", [4, 32])
async def test_a_cancelled_load_changes_no_byte_after_it_has_raised(tmp_path, seed, rows):
    rng = random.Random(seed)
    engine = Engine(LARGE, 96)
    names = keys(24)
    cancelled = 0
    async with running(stack_file(LARGE, rows, fs(tmp_path / "r", capacity=16 << 20)), engine) as stack:
        for start in range(0, 24, 4):
            await store(stack, engine, whole(names[start : start + 4]))
            assert await stack.drain(20)
        for case in range(CASES):
            chosen = rng.sample(names, rng.randint(1, 24))
            one = whole(chosen, rng.randint(0, 40))
            before = engine.snapshot()
            task = asyncio.create_task(stack.run(stack.job(LOAD, [one])))
            await turns(rng.randint(0, 60))
            task.cancel()
            if rng.random() < 0.3:
                await turns(rng.randint(0, 5))
                task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                cancelled += 1
            at_once = engine.snapshot()
            await turns(rng.randint(0, 40))
            if case % 10 == 0:
                await load(stack, engine, whole(rng.sample(names, 8), 80))
                engine.storages[0][80:88] = at_once[0][80:88]
            assert all(np.array_equal(a, b) for a, b in zip(at_once, engine.snapshot(), strict=True)), f"case {case}"
            assert engine.untouched(before, [one]), f"case {case}: bytes beside the job changed"
            if case % 25 == 0:
                stack.check_integrity()
        assert cancelled > CASES // 4, "most cases should really have been cancelled"
        assert statuses(await load(stack, engine, whole(names))) == ["loaded"] * 24
        await all_rows_come_back(stack, engine, rows, "fresh")


@pytest.mark.parametrize("rows", [4, 32])
async def test_a_cancelled_store_leaves_whole_blocks_or_none(tmp_path, seed, rows):
    rng = random.Random(seed)
    engine = Engine(LARGE, 96)
    cancelled = 0
    stored: list = []
    async with running(stack_file(LARGE, rows, fs(tmp_path / "r", capacity=32 << 20)), engine) as stack:
        for case in range(CASES):
            names = keys(rng.randint(1, 8), start=rng.randint(0, 60))
            one = whole(names)
            engine.compute(one)
            task = asyncio.create_task(stack.run(stack.job(STORE, [one])))
            await turns(rng.randint(0, 24))
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                cancelled += 1
            engine.wipe()
            await turns(rng.randint(0, 10))
            stored += names
            if case % 10 == 0:
                wanted = rng.sample(sorted(set(stored)), min(24, len(set(stored))))
                result = await load(stack, engine, whole(wanted, 20))
                assert set(statuses(result)) <= {"loaded", "missing"}
                assert await stack.drain(20)
        assert cancelled > CASES // 8
        await all_rows_come_back(stack, engine, rows, "fresh")


async def test_cancelling_a_load_ends_nothing_for_others_who_wait_for_the_same_blocks(seed):
    rng = random.Random(seed)
    engine = Engine(LARGE, 64)
    names = keys(8)
    parts = parts_of(stack_file(LARGE, 8, {"type": "memory"}, backends=backends()), engine, backends())
    tier = parts.tiers[-1]
    async with opened(parts) as stack:
        await store(stack, engine, whole(names))
        assert await stack.drain(10)
        await store(stack, engine, whole(keys(8, start=100)))
        assert await stack.drain(10)
        tier.hold(LOAD)
        tasks = [asyncio.create_task(load(stack, engine, whole(names, 8 * i))) for i in range(4)]
        await until(lambda: tier.moving[LOAD] > 0)
        victims = rng.sample(tasks, 2)
        for victim in victims:
            victim.cancel()
        results = await asyncio.gather(*victims, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results), "they do not wait for the disk"
        tier.let_go()
        for task in tasks:
            if task not in victims:
                assert statuses(await task) == ["loaded"] * 8


async def test_a_group_of_loads_that_fails_as_one_leaves_the_stack_whole(tmp_path, seed):
    rng = random.Random(seed)
    engine = Engine(LARGE, 96)
    names = keys(24)

    async def fail_soon() -> None:
        await turns(rng.randint(0, 30))
        raise ValueError("one of us failed")

    async def load_as_one(stack) -> None:
        async with asyncio.TaskGroup() as group:
            for i in range(3):
                group.create_task(stack.run(stack.job(LOAD, [whole(rng.sample(names, 12), 24 * i)])))
            group.create_task(fail_soon())

    async with running(stack_file(LARGE, 8, fs(tmp_path / "r", capacity=16 << 20)), engine) as stack:
        for start in range(0, 24, 4):
            await store(stack, engine, whole(names[start : start + 4]))
            assert await stack.drain(20)
        for _ in range(20):
            with pytest.raises(ExceptionGroup):
                await load_as_one(stack)
            after = engine.snapshot()
            await turns(30)
            assert all(np.array_equal(a, b) for a, b in zip(after, engine.snapshot(), strict=True))
        await all_rows_come_back(stack, engine, 8, "fresh")


async def test_waiting_for_lookups_and_settling_can_be_cancelled_at_any_time(seed):
    rng = random.Random(seed)
    engine = Engine(LARGE, 16)
    config = stack_file(LARGE, 8, {"type": "shared"}, backends=backends())
    parts = parts_of(config, engine, backends())
    remote = parts.tiers[-1]
    async with opened(parts) as stack:
        for case in range(60):
            remote.answers.clear()
            looking = asyncio.create_task(stack.lookup(keys(3, start=3 * case)))
            await turns(rng.randint(0, 4))
            looking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await looking
            remote.answers.set()
        assert list(await stack.lookup(keys(3))) == ["miss"] * 3


async def test_closing_that_is_cancelled_ends_the_thread_that_records(tmp_path, monkeypatch):
    begun, go = asyncio.Event(), asyncio.Event()
    engine = Engine(LARGE, 8)
    file = stack_file(LARGE, 4, fs(tmp_path / "r", capacity=16 << 20), record=f"{{folder: {tmp_path / 'traces'}}}")
    async with TierStack(parts_of(file, engine)) as stack:
        stack.request("recorded").end(1, input_tokens=48, prompt=keys(3))
        recorder, tier = stack._assembled.recorder, stack._assembled.to_close[-1]
        close = tier.close

        async def slow() -> None:
            begun.set()
            await go.wait()
            await close()

        monkeypatch.setattr(tier, "close", slow)
        closing = asyncio.ensure_future(end_tiers(stack._assembled, 10.0))
        await begun.wait()
        closing.cancel()
        await turns(3)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert recorder._ended.done()
        assert recorder.recorded == 1
