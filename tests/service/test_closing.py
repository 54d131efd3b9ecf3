"""What a stack process stores while it closes: only what had been copied when the engines were told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support_sessions import HandEngine, PoolWorld, names, pool_world

from kvtier.service import wire
from kvtier.testing.memory import MemoryStorage
from kvtier.types.geometry import KVLayout

TWO_WORKERS = KVLayout.of_pages(64, world_size=2)


async def closing(world: PoolWorld) -> asyncio.Task[None]:
    """The pool's closing, which has begun."""
    task = asyncio.ensure_future(world.pool.close())
    await world.turn()
    assert not task.done(), "it waits for copies in flight"
    return task


@contextmanager
def raised_in_loop() -> Iterator[list[BaseException]]:
    """Exceptions of callbacks of the loop."""
    loop, raised = asyncio.get_running_loop(), list[BaseException]()
    loop.set_exception_handler(lambda _, context: raised.append(context["exception"]))
    yield raised
    loop.set_exception_handler(None)


async def found_later(storage: MemoryStorage, *numbers: int) -> bytes:
    """What an engine of the next process is told of these keys."""
    async with pool_world(lower=32, storage=storage, layout=TWO_WORKERS) as world:
        engine = await world.engine()
        (found,) = await engine.reserve("r", *numbers)
        return found.states


def fill(engine: HandEngine, place: tuple[int, int], *numbers: int) -> wire.Fill:
    """The item that begins a copy."""
    engine.job += 1
    return wire.Fill(engine.job, wire.Keys.of(names(*numbers)), wire.Places.of(*zip(place, strict=True)))


async def test_a_report_that_comes_after_the_engines_were_told_stores_nothing():
    """The engine may have used its GPU blocks for others since."""
    storage = MemoryStorage()
    async with pool_world(lower=32, storage=storage, layout=TWO_WORKERS) as world:
        engine = await world.engine(rows=8)
        before = engine.fill(names(1))
        engine.report(before, (1, 0))
        begun, in_part = engine.fill(names(2)), engine.fill(names(3))
        engine.report(in_part, (1, 0), worker=0)
        ends = await closing(world)
        engine.report(begun, (1, 0))
        engine.report(in_part, (1, 0), worker=1)
        await ends
    assert await found_later(storage, 1, 2, 3) == bytes((wire.LEASED, wire.MISSING, wire.MISSING))


async def test_a_block_is_nowhere_until_its_row_is_sealed_and_closing_waits_for_that():
    storage, sealed = MemoryStorage(), asyncio.get_running_loop().create_future()
    async with pool_world(lower=32, storage=storage, layout=TWO_WORKERS) as world:
        engine = await world.engine(rows=8)
        seal = world.pool._seals.seal
        world.pool._seals.seal = lambda filled: seal(filled) or sealed
        stored = engine.fill(names(1))
        engine.report(stored, (1, 0))
        await world.turn()
        assert not engine.take(wire.Ended)
        assert world.counts()["ready"] == 0
        ends = await closing(world)
        sealed.set_result(None)
        await ends
    assert await found_later(storage, 1) == bytes((wire.LEASED,))


async def test_a_reset_while_a_row_is_sealed_leaves_nothing_of_it():
    sealed = asyncio.get_running_loop().create_future()
    async with pool_world(layout=TWO_WORKERS) as world:
        engine, other = await world.engine(rows=8), await world.engine()
        world.pool._seals.seal = lambda filled: sealed
        stored = engine.fill(names(1))
        engine.report(stored, (1, 0))
        free = world.counts()["free"]
        other.send(wire.Reset(1, 0))
        await world.turn()
        sealed.set_result(None)
        assert await engine.ended(stored) == [(1, "dropped", "reset", 0)]
        assert world.counts()["free"] == free + 1
        (found,) = await engine.reserve("r", 1)
        assert found.states == bytes((wire.MISSING,))


async def test_a_row_that_cannot_be_sealed_is_a_defect_of_the_process():
    sealed = asyncio.get_running_loop().create_future()
    async with pool_world(layout=TWO_WORKERS) as world:
        engine, defects = await world.engine(rows=8), list[BaseException]()
        world.pool.on_defect = defects.append
        world.pool._seals.seal = lambda filled: sealed
        engine.report(engine.fill(names(1)), (1, 0))
        error = MemoryError()
        with raised_in_loop() as raised:
            sealed.set_exception(error)
            await world.turn()
        assert defects == raised == [error]
        world.pool._failed = False  # so that it can be closed here


async def test_a_copy_of_which_the_process_hears_while_it_closes_stores_nothing():
    """The engine said so before it was told, and its workers may have reported it before that."""
    storage = MemoryStorage()
    async with pool_world(lower=32, storage=storage, layout=TWO_WORKERS) as world:
        engine = await world.engine(rows=8)
        places = engine.lent()
        waits = engine.fill(names(1))
        engine.report(engine.job + 1, (1, 0), worker=0)
        ends = await closing(world)
        engine.send(fill(engine, places.pop(), 2))
        engine.report(engine.job, (1, 0), worker=1)
        engine.report(waits, (1, 0))
        await ends
    assert await found_later(storage, 1, 2) == bytes((wire.MISSING, wire.MISSING))


async def test_a_last_report_before_a_breach_counts_and_closing_does_not_wait_longer():
    async with pool_world(layout=TWO_WORKERS, close_timeout_seconds=60.0) as world:
        engine = await world.engine(rows=8)
        job = engine.fill(names(1))
        engine.report(job, (1, 0), worker=0)
        ends = await closing(world)
        with pytest.raises(wire.Breach):
            world.pool.on_worker_items(engine.session, 1, [wire.Copied(job, [(1, 0)]), wire.Copied(job, [(9, 0)])])
        await asyncio.wait_for(ends, 30.0)


async def test_a_reservation_waits_for_rows_that_are_being_sealed():
    storage, sealed = MemoryStorage(), asyncio.get_running_loop().create_future()
    async with pool_world(lower=32, storage=storage) as world:
        engine = await world.engine(rows=4)
        await engine.store(11, 12, 13, 14)
    async with pool_world(rows=8, lower=32, storage=storage) as world:
        one, two = await world.engine(rows=1), await world.engine()
        seal = world.pool._seals.seal
        world.pool._seals.seal = lambda filled: seal(filled) or sealed
        for number in range(6):
            await one.wait(one.lent)
            one.report(one.fill(names(number)), (1, 0))
        one.send(wire.Want(0))
        two.send(wire.Reserve("r", 1, wire.Keys.of(names(11, 12, 13, 14))))
        await world.turn()
        assert not two.take(wire.Found)
        sealed.set_result(None)
        await two.wait(lambda: any(isinstance(item, wire.Found) for item in two.items))
        (found,) = two.take(wire.Found)
        assert found.states == bytes((wire.LEASED,)) * 4
