"""Opening and closing for ever costs nothing; a stack that nobody closed says so."""

from __future__ import annotations

import asyncio
import gc
import random
import tracemalloc
import warnings
import weakref
from collections.abc import Iterator

import pytest
from support_driver import ServedStack
from support_shutdown import IO_ENGINES
from support_stack import PLAIN, Engine, fs, keys, parts_of, stack_file, statuses, until, whole
from support_stack_tiers import LOAD, STORE, backends

from faults.machine.belongings import belongings, left_behind, new_since
from kvtier.errors import KVTierError, UsageError
from kvtier.stack import TierStack
from kvtier.types.jobs import GPUGroup, JobKind

WARM_LIVES = 20
BYTES_PER_LIFE_MAX = 500


async def tier_life(rng: random.Random, root, engine: Engine, io_engine: str) -> None:
    """A short life with everything in it that may leak: loads, misses, misuse, cancelled jobs, one refused opening."""
    parts = parts_of(stack_file(PLAIN, 8, fs(root, capacity=1 << 20, io_engine=io_engine)), engine)
    async with TierStack(parts) as stack:
        names = keys(4, start=rng.randrange(1000))
        await stack.run(stack.job(STORE, [whole(names)]))
        await stack.run(stack.job(LOAD, [whole(names + keys(2, tag="absent"), 8)]))
        with pytest.raises(UsageError):
            await stack.run(stack.job(LOAD, [GPUGroup(9, (names[0],), whole(names[:1]).runs)]))
        task = asyncio.create_task(stack.run(stack.job(STORE, [whole(keys(4, start=2000), 16)])))
        for _ in range(rng.randrange(12)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if rng.random() < 0.2:
            with pytest.raises(KVTierError):
                await TierStack(parts_of(stack_file(PLAIN, 8, fs(root, capacity=1 << 20)), engine)).open()


def engine_life(rng: random.Random, root, engine: Engine, io_engine: str) -> None:
    """The same for a synchronous engine, closed with jobs under way; its stack process is a thread."""
    parts = parts_of(stack_file(PLAIN, 8, fs(root, capacity=1 << 20, io_engine=io_engine)), engine)
    with ServedStack(parts) as stack:
        names = keys(4, start=rng.randrange(1000))
        for kind, first in ((STORE, 0), (LOAD, 8)):
            job = stack.job(kind, [whole(names, first)])
            stack.submit(job)
            for _ in range(rng.randrange(4)):
                stack.step()
                stack.wait(0.001)
            if rng.random() < 0.3:
                stack.cancel(job.job_id)


async def lives(count: int, rng: random.Random, root, io_engine: str) -> None:
    engine = Engine(PLAIN, 32)
    for life in range(count):
        if life % 4:
            await tier_life(rng, root, engine, io_engine)
        else:
            await asyncio.to_thread(engine_life, rng, root, engine, io_engine)


async def check_flat(count: int, seed: int, root, io_engine: str) -> None:
    """What leaks does so in each of two rounds; in one alone a table of the interpreter may grow, as that of its
    interned strings does, by megabytes."""
    rng = random.Random(seed)
    await lives(WARM_LIVES, rng, root, io_engine)
    before = belongings()
    tracemalloc.start()
    try:
        for _ in range(2):
            start, _ = tracemalloc.get_traced_memory()
            await lives(count, rng, root, io_engine)
            await until(lambda: not new_since(before), 10.0)
            end, _ = tracemalloc.get_traced_memory()
            print(f"{count} lives, {(end - start) / count:.0f} bytes each")
            if flat := end - start < count * BYTES_PER_LIFE_MAX + 100_000:
                break
            print(*tracemalloc.take_snapshot().statistics("lineno")[:20], sep="\n")
    finally:
        tracemalloc.stop()
    assert flat


@pytest.mark.parametrize("io_engine", IO_ENGINES)
async def test_lives_leave_nothing_behind(tmp_path, seed, io_engine, dial):
    await check_flat(dial(80, 25), seed, tmp_path / "r", io_engine)


@pytest.mark.long
@pytest.mark.parametrize("io_engine", IO_ENGINES)
async def test_many_lives_leave_nothing_behind(tmp_path, seed, io_engine):
    await check_flat(2000, seed, tmp_path / "r", io_engine)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def held_by(stack: TierStack) -> list[weakref.ref]:
    """What a stack consists of, from its plane to the queue of a disk."""
    fs_tier = stack._parts.tiers[-1]
    return [weakref.ref(one) for one in (stack, stack._opened().plane, fs_tier, fs_tier._roots[0])]


@pytest.mark.parametrize("io_engine", IO_ENGINES)
async def test_a_closed_stack_is_freed_without_the_collector(tmp_path, no_collector, io_engine):
    engine = Engine(PLAIN, 32)

    async def life() -> list[weakref.ref]:
        parts = parts_of(stack_file(PLAIN, 8, fs(tmp_path / "r", capacity=1 << 20, io_engine=io_engine)), engine)
        async with TierStack(parts) as stack:
            await stack.run(stack.job(STORE, [whole(keys(4))]))
            return held_by(stack)

    references = await life()
    # A thread of the tier may still be on its way out of its last call.
    await until(lambda: not any(reference() for reference in references))


def memory_parts(engine: Engine):
    return parts_of(stack_file(PLAIN, 8, {"type": "memory"}, backends=backends()), engine, backends())


async def test_a_stack_that_nobody_closed_says_so_when_it_is_collected():
    engine = Engine(PLAIN, 16)
    stack = TierStack(memory_parts(engine))
    await stack.open()
    cpu, gpu = stack._parts.tiers[1], stack._parts.tiers[0]
    del stack
    with pytest.warns(ResourceWarning, match="unclosed <.*TierStack"):
        gc.collect()
    await gpu.close()
    await cpu.close()


def test_a_stack_left_open_is_closed_by_the_end_of_its_loop():
    before = belongings()
    kept = []

    async def main() -> None:
        engine = Engine(PLAIN, 16)
        stack = TierStack(memory_parts(engine))
        await stack.open()
        stack._parts.tiers[-1].hold(JobKind.LOAD)
        assert set(statuses(await stack.run(stack.job(STORE, [whole(keys(4))])))) == {"stored"}
        kept.append(stack)

    with pytest.warns(ResourceWarning, match="closed by the end of its loop"):
        asyncio.run(main())
    assert kept[0].close_report is not None
    assert not left_behind(before)


async def test_an_abandoned_generator_closes_its_stack():
    """Python closes an async generator that is collected half way in its loop, with block and all."""
    stacks = []

    async def generate():
        async with TierStack(memory_parts(Engine(PLAIN, 16))) as stack:
            stacks.append(stack)
            yield stack
            yield stack

    generator = generate()
    await anext(generator)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del generator
        gc.collect()
        await until(lambda: stacks[0].close_report is not None)
