"""Tiers that hang, fail or raise: loads end in time, stores go on, nobody touches a slot whose I/O has not ended."""

from __future__ import annotations

import asyncio
import errno

import pytest
from support_stack import PLAIN, Engine, held, keys, load, opened, parts_of, stack_file, statuses, store, until, whole
from support_stack_tiers import LOAD, STORE, MemoryTier, backends

from kvtier.types.jobs import failed

ROWS = 32
LATE_SECONDS, JOB_SECONDS = 0.5, 1.0
"""The deadline of a load whose tier hangs, and that of any job. A machine that stops for a while must not pass them
before the job has begun."""


def stack_over_memory(engine: Engine, rows: int = ROWS, settings: dict[str, float] | None = None, **options: object):
    """(parts, the memory tier) of a stack whose lowest tier is one that obeys."""
    config = stack_file(PLAIN, rows, {"type": "memory", **options}, backends=backends())
    parts = parts_of(config, engine, backends(), **(settings or {}))
    tier = parts.tiers[-1]
    assert isinstance(tier, MemoryTier)
    return parts, tier


async def only_below(stack, engine, names):
    """Store blocks and push them out of the CPU tier."""
    for start in range(0, len(names), 8):
        await store(stack, engine, whole(names[start : start + 8]))
        assert await stack.drain(10)
    filler = keys(ROWS, start=10_000)
    for start in range(0, ROWS, 8):
        await store(stack, engine, whole(filler[start : start + 8]))
        assert await stack.drain(10)
    assert set(stack.locate(names)) == {"memory"}


async def test_a_load_that_hangs_ends_late_and_its_rows_wait_for_the_io(caplog):
    engine = Engine(PLAIN, 64)
    parts, tier = stack_over_memory(engine, job_timeout_seconds=JOB_SECONDS)
    names = keys(8)
    async with opened(parts) as stack:
        await only_below(stack, engine, names)
        engine.wipe()
        before = engine.snapshot()
        tier.hold(LOAD)
        async with asyncio.timeout(10):
            result = await stack.run(stack.job(LOAD, [whole(names)], timeout_seconds=LATE_SECONDS))
        assert statuses(result) == ["late"] * 8
        assert not tier.gates[LOAD].is_set()
        assert tier.moving[LOAD] == 8, "the I/O goes on"
        await until(lambda: held(stack)["cpu"]["quarantined"] == 8)
        assert stack.stats().tiers["memory"].late == 8
        assert held(stack)["memory"]["ready"] >= 8, "what was late is still there"

        fresh = keys(16, start=100)
        async with asyncio.timeout(10):
            for start in (0, 8):
                stored = await store(stack, engine, whole(fresh[start : start + 8], 40))
                assert statuses(stored) == ["stored"] * 8
        assert held(stack)["cpu"]["quarantined"] == 8, "no row is reused before its I/O has ended"
        stack.check_integrity()

        after = engine.snapshot()
        tier.let_go()
        await until(lambda: held(stack)["cpu"]["quarantined"] == 0)
        assert all((a == b).all() for a, b in zip(after, engine.snapshot(), strict=True))
        assert (engine.pages[0][:8] == before[0][:8]).all(), "what came late never reached the GPU blocks"
        assert statuses(await load(stack, engine, whole(names))) == ["loaded"] * 8
        assert statuses(await load(stack, engine, whole(fresh[8:], 40))) == ["loaded"] * 8


async def test_a_store_that_hangs_holds_up_neither_stores_nor_loads():
    engine = Engine(PLAIN, 64)
    parts, tier = stack_over_memory(engine, job_timeout_seconds=JOB_SECONDS)
    async with opened(parts) as stack:
        tier.hold(STORE)
        batches = [keys(8, start=100 * i) for i in range(5)]
        async with asyncio.timeout(20):
            for batch in batches:
                assert statuses(await store(stack, engine, whole(batch))) == ["stored"] * 8
                assert statuses(await load(stack, engine, whole(batch, 20))) == ["loaded"] * 8
        assert tier.moving[STORE] == ROWS // 4, "a hung tier holds a quarter of the rows, no more"
        await until(lambda: held(stack)["memory"]["quarantined"] == ROWS // 4)
        stats = stack.stats().tiers["memory"]
        assert stats.late == ROWS // 4
        assert sum(stats.dropped.values()) > 0, "what went without is counted"
        assert stats.stored == 0
        tier.let_go()
        await until(lambda: held(stack)["memory"]["quarantined"] == 0)
        fresh = keys(4, start=5000)
        await store(stack, engine, whole(fresh))
        assert await stack.drain(10)
        assert stack.stats().tiers["memory"].stored >= 4, "and the tier serves again"


async def test_a_long_load_from_a_hung_tier_holds_up_nobody_else():
    engine = Engine(PLAIN, 64)
    parts, tier = stack_over_memory(engine, job_timeout_seconds=60.0)
    names = keys(24)
    async with opened(parts) as stack:
        await only_below(stack, engine, names)
        here = keys(4, start=10_000 + ROWS - 4)
        assert stack.locate(here) == ["cpu"] * 4
        tier.hold(LOAD)
        hung = asyncio.create_task(stack.run(stack.job(LOAD, [whole(names)], timeout_seconds=60.0)))
        await until(lambda: tier.moving[LOAD] > 0)
        async with asyncio.timeout(20):
            assert statuses(await load(stack, engine, whole(here, 50))) == ["loaded"] * 4
            assert statuses(await store(stack, engine, whole(keys(2, start=777), 60))) == ["stored"] * 2
        assert not hung.done()
        tier.let_go()
        assert set(statuses(await hung)) == {"loaded"}


async def test_loads_that_wait_behind_hung_ones_give_their_rows_back_in_time():
    engine = Engine(PLAIN, 64)
    parts, tier = stack_over_memory(engine, job_timeout_seconds=JOB_SECONDS, inflight_bytes=4 * 4096)
    names = keys(8)
    async with opened(parts) as stack:
        await only_below(stack, engine, names)
        tier.hold(LOAD)
        jobs = [stack.job(LOAD, [whole([name])], timeout_seconds=LATE_SECONDS) for name in names]
        results = await asyncio.gather(*(stack.run(job) for job in jobs))
        assert [statuses(result) for result in results] == [["late"]] * 8
        assert tier.moving[LOAD] == 4, "four fill the bound, four wait"
        await until(lambda: held(stack)["cpu"]["quarantined"] == 4 and held(stack)["cpu"]["filling"] == 0)
        assert tier.begun.count(LOAD) == 4, "what waited too long is never begun"
        assert held(stack)["memory"]["ready"] >= 8
        tier.let_go()
        await until(lambda: held(stack)["cpu"]["quarantined"] == 0)


async def test_loads_go_before_stores():
    engine = Engine(PLAIN, 64)
    parts, tier = stack_over_memory(engine, inflight_bytes=2 * 4096)
    names = keys(4)
    async with opened(parts) as stack:
        await only_below(stack, engine, names)
        tier.begun.clear()
        tier.hold(LOAD, STORE)
        first = asyncio.create_task(load(stack, engine, whole(names[:2])))
        await until(lambda: tier.begun == [LOAD])
        await store(stack, engine, whole(keys(2, start=500), 20))
        second = asyncio.create_task(load(stack, engine, whole(names[2:], 8)))
        await until(lambda: held(stack)["cpu"]["filling"] == 4)
        assert tier.begun == [LOAD], "the bound is full, a store and then a load wait"
        tier.let_go()
        assert statuses(await first) + statuses(await second) == ["loaded"] * 4
        assert await stack.drain(10)
        assert tier.begun == [LOAD, LOAD, STORE]


async def test_loads_do_not_wait_for_the_end_of_stores():
    engine = Engine(PLAIN, 64)
    parts, tier = stack_over_memory(engine, inflight_bytes=8 * 4096)
    names = keys(2)
    async with opened(parts) as stack:
        await only_below(stack, engine, names)
        tier.hold(STORE)
        await store(stack, engine, whole(keys(16, start=500), 20))
        await until(lambda: tier.moving[STORE] == 6)
        assert statuses(await load(stack, engine, whole(names))) == ["loaded"] * 2
        assert tier.moving[STORE] == 6
        tier.let_go()
        assert await stack.drain(10)


@pytest.mark.parametrize("bound_blocks", [1, 3, 8])
async def test_the_bytes_in_flight_stay_within_their_bound(bound_blocks):
    engine = Engine(PLAIN, 256)
    parts, tier = stack_over_memory(engine, rows=64, inflight_bytes=bound_blocks * 4096, slots=256)
    names = keys(64)
    async with opened(parts) as stack:
        await store(stack, engine, whole(names))
        assert await stack.drain(10)
        assert tier.most <= bound_blocks
        for start in range(0, 64, 16):
            await store(stack, engine, whole(keys(16, start=1000 + start), 64))
            assert await stack.drain(10)
        tier.most = 0
        parts_of_it = [whole(names[start : start + 16], start) for start in range(0, 64, 16)]
        results = await asyncio.gather(*(load(stack, engine, part) for part in parts_of_it))
        assert [statuses(result) for result in results] == [["loaded"] * 16] * 4
        assert 0 < tier.most <= bound_blocks


@pytest.mark.parametrize("kind", [LOAD, STORE])
async def test_a_tier_that_raises_fails_its_blocks_and_says_so_in_the_log(kind, caplog):
    engine = Engine(PLAIN, 64)
    parts, tier = stack_over_memory(engine)
    names = keys(8)
    async with opened(parts) as stack:
        await only_below(stack, engine, names)
        tier.raises[kind] = RuntimeError("the third party's bug")
        if kind is LOAD:
            assert statuses(await load(stack, engine, whole(names))) == ["missing"] * 8
        else:
            assert statuses(await store(stack, engine, whole(keys(8, start=300)))) == ["stored"] * 8
            assert await stack.drain(10)
        assert stack.stats().tiers["memory"].failed == 8
        assert "the third party's bug" in caplog.text
        assert f"raised in a {kind} job" in caplog.text
        tier.raises.clear()
        more = keys(4, start=900)
        assert statuses(await store(stack, engine, whole(more))) == ["stored"] * 4
        assert await stack.drain(10)
        assert statuses(await load(stack, engine, whole(more))) == ["loaded"] * 4


async def test_an_answer_that_does_not_fit_its_job_fails_the_job(caplog):
    engine = Engine(PLAIN, 64)
    parts, tier = stack_over_memory(engine)
    names = keys(8)
    async with opened(parts) as stack:
        await only_below(stack, engine, names)
        whole_load = tier.load

        async def short_answer(job):
            result = await whole_load(job)
            return type(result)(result.job_id, tuple(group[:-1] for group in result.outcomes))

        tier.load = short_answer
        assert statuses(await load(stack, engine, whole(names))) == ["missing"] * 8
        assert "does not have one outcome for each block" in caplog.text
        assert stack.stats().tiers["memory"].failed == 8


async def test_one_bad_block_takes_no_good_one_with_it():
    engine = Engine(PLAIN, 64)
    parts, tier = stack_over_memory(engine)
    names = keys(9)
    async with opened(parts) as stack:
        await only_below(stack, engine, names)
        bad = {names[0], names[4]}
        tier.spoil = lambda kind, key: failed(errno.EIO) if key in bad and kind is LOAD else None
        assert statuses(await load(stack, engine, whole(names))) == [
            "missing" if name in bad else "loaded" for name in names
        ]


async def test_repeated_errors_open_the_breaker_and_a_success_closes_it():
    engine = Engine(PLAIN, 64)
    parts, tier = stack_over_memory(engine)
    async with opened(parts) as stack:
        tier.spoil = lambda kind, key: failed(errno.EIO)
        for i in range(6):
            assert statuses(await store(stack, engine, whole(keys(1, start=i)))) == ["stored"]
            assert await stack.drain(10)
        stats = stack.stats().tiers["memory"]
        assert "open" in stats.breaker
        assert stats.failed == 5
        assert stats.dropped == {"tier_down": 1}
        assert len(tier.begun) == 5, "a tier that is down is left alone"


async def test_closing_over_a_hung_tier_ends_and_says_what_was_lost(caplog):
    engine = Engine(PLAIN, 64)
    parts, tier = stack_over_memory(engine, settings={"close_timeout_seconds": 0.3, "tier_close_seconds": 0.2})
    async with asyncio.timeout(10):
        async with opened(parts) as stack:
            tier.hold(STORE)
            tier.close_gate.clear()
            await store(stack, engine, whole(keys(12)))
            assert tier.moving[STORE] == 8
        assert stack.close_report.dropped_blocks == 12
        assert stack.close_report.unfinished_jobs == 1
        assert "event=closed dropped_blocks=12 unfinished_jobs=1 seconds=" in caplog.text
        assert "tier memory did not close within 0.2 s" in caplog.text
        tier.let_go()
        await until(lambda: tier.moving[STORE] == 0)


async def test_closing_over_a_tier_that_drops_what_is_under_way_counts_it(caplog):
    engine = Engine(PLAIN, 64)
    parts, tier = stack_over_memory(engine, settings={"close_timeout_seconds": 0.1})

    async def give_up() -> None:
        tier.spoil = lambda kind, key: failed(errno.EIO)
        tier.let_go()
        await asyncio.sleep(0)

    tier.close = give_up
    async with opened(parts) as stack:
        tier.hold(STORE)
        await store(stack, engine, whole(keys(12)))
    assert stack.close_report.dropped_blocks == 12
    assert stack.close_report.unfinished_jobs == 0


async def test_what_ends_well_while_tiers_close_is_not_counted_as_lost():
    engine = Engine(PLAIN, 64)
    parts, tier = stack_over_memory(engine, settings={"close_timeout_seconds": 0.1})

    async def finish() -> None:
        tier.let_go()
        await until(lambda: not tier.moving[STORE])

    tier.close = finish
    async with opened(parts) as stack:
        tier.hold(STORE)
        await store(stack, engine, whole(keys(12)))
    assert stack.close_report.dropped_blocks == 4
    assert len(tier.kept) == 8


async def test_a_tier_that_cannot_close_keeps_no_other_from_closing(caplog):
    engine = Engine(PLAIN, 64)
    config = stack_file(PLAIN, 8, {"type": "memory"}, {"type": "memory", "name": "second"}, backends=backends())
    parts = parts_of(config, engine, backends())
    first, second = parts.tiers[-2:]

    async def break_down() -> None:
        raise RuntimeError("cannot close")

    second.close = break_down
    async with opened(parts) as stack:
        await store(stack, engine, whole(keys(4)))
    assert first.closes == 1
    assert "tier second could not be closed" in caplog.text
