"""Write policies, several lower tiers, several disks, and tiers that other engines write to as well."""

from __future__ import annotations

import asyncio
import errno
import shutil

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
from support_stack_tiers import LOAD, STORE, SharedTier, backends

from kvtier.tier.contract import LookupResult
from kvtier.types.jobs import failed


def stack_with(engine: Engine, rows: int, *lowers: dict[str, object], **settings: float):
    """(parts, the lower tiers) of a stack."""
    parts = parts_of(stack_file(PLAIN, rows, *lowers, backends=backends()), engine, backends(), **settings)
    return parts, parts.tiers[2:]


async def test_on_evict_writes_nothing_before_it_must():
    engine = Engine(PLAIN, 64)
    parts, (tier,) = stack_with(engine, 8, {"type": "memory", "write_policy": "on_evict"})
    async with opened(parts) as stack:
        await store(stack, engine, whole(keys(8)))
        assert await stack.drain(10)
        assert tier.begun == []
        await store(stack, engine, whole(keys(2, start=100)))
        assert 2 <= len(tier.kept) <= 4, "about as many as had to go"


async def test_on_evict_keeps_the_upper_copy_until_the_lower_tier_has_it():
    engine = Engine(PLAIN, 64)
    parts, (tier,) = stack_with(engine, 8, {"type": "memory", "write_policy": "on_evict"})
    names = keys(8)
    async with opened(parts) as stack:
        await store(stack, engine, whole(names))
        tier.hold(STORE)
        pushing = asyncio.create_task(store(stack, engine, whole(keys(2, start=100), 20)))
        await until(lambda: tier.moving[STORE] > 0)
        assert stack.locate(names) == ["cpu"] * 8
        assert statuses(await load(stack, engine, whole(names, 30))) == ["loaded"] * 8
        assert not pushing.done()
        tier.let_go()
        assert statuses(await pushing) == ["stored"] * 2
        places = stack.locate(names)
        assert None not in places
        assert places.count("memory") >= 2
        engine.wipe()
        assert statuses(await load(stack, engine, whole(names, 30))) == ["loaded"] * 8


async def test_on_evict_loses_nothing_through_a_small_cpu_tier(tmp_path):
    engine = Engine(PLAIN, 100)
    names = keys(100)
    config = stack_file(PLAIN, 8, fs(tmp_path / "r", write_policy="on_evict"))
    async with running(config, engine) as stack:
        for start in range(0, 100, 5):
            result = await store(stack, engine, whole(names[start : start + 5], start))
            assert statuses(result) == ["stored"] * 5
        assert stack.stats().tiers["fs"].dropped == {}
        engine.wipe()
        assert statuses(await load(stack, engine, whole(names))) == ["loaded"] * 100
    assert stack.close_report.dropped_blocks == 0
    async with running(config, engine) as stack:
        engine.wipe()
        assert statuses(await load(stack, engine, whole(names))) == ["loaded"] * 100


async def test_on_evict_over_a_failing_disk_goes_on_without_it():
    engine = Engine(PLAIN, 64)
    parts, (tier,) = stack_with(engine, 8, {"type": "memory", "write_policy": "on_evict"})
    async with opened(parts) as stack:
        tier.spoil = lambda kind, key: failed(errno.EIO)
        async with asyncio.timeout(20):
            for i in range(12):
                batch = keys(4, start=4 * i)
                assert statuses(await store(stack, engine, whole(batch))) == ["stored"] * 4
                assert statuses(await load(stack, engine, whole(batch, 20))) == ["loaded"] * 4
        stats = stack.stats().tiers["memory"]
        assert "open" in stats.breaker
        assert stats.failed >= 5
        assert stats.dropped["tier_down"] > 0
        assert stats.failed + sum(stats.dropped.values()) >= 48 - 8, "each block that went without is counted"
        assert stats.stored == 0
        assert held(stack)["memory"]["ready"] == 0


async def test_two_disks_as_two_tiers_each_have_their_own_copy(tmp_path):
    engine = Engine(PLAIN, 64)
    names = keys(30)
    config = stack_file(PLAIN, 8, fs(tmp_path / "a", name="fast"), fs(tmp_path / "b", name="large"))
    async with running(config, engine) as stack:
        for start in range(0, 30, 6):
            await store(stack, engine, whole(names[start : start + 6], start))
            assert await stack.drain(10)
        stats = stack.stats().tiers
        assert list(stats) == ["cpu", "fast", "large"]
        assert (stats["fast"].stored, stats["large"].stored) == (30, 30)
        assert set(stack.locate(names)) == {"cpu", "fast"}
    shutil.rmtree(tmp_path / "a")
    async with running(config, engine) as stack:
        assert stack.locate(names) == ["large"] * 30
        engine.wipe()
        assert statuses(await load(stack, engine, whole(names))) == ["loaded"] * 30
        assert await stack.drain(10)
        stats = stack.stats().tiers
        assert stats["large"].hits == 30
        gave_way = stats["fast"].dropped.get("backlog", 0)
        assert stats["fast"].stored + gave_way == 30, "what is promoted reaches the tier between as well"
        assert stats["fast"].stored >= 8


async def test_on_evict_above_write_through(tmp_path):
    engine = Engine(PLAIN, 64)
    names = keys(60)
    first = fs(tmp_path / "a", name="first", write_policy="on_evict")
    config = stack_file(PLAIN, 8, first, fs(tmp_path / "b", name="second"))
    async with running(config, engine) as stack:
        for start in range(0, 60, 4):
            assert statuses(await store(stack, engine, whole(names[start : start + 4], start))) == ["stored"] * 4
            assert await stack.drain(10)
            stack.check_integrity()
        stats = stack.stats().tiers
        assert stats["second"].stored == 60
        assert 52 <= stats["first"].stored <= 60
        for _ in range(3):
            engine.wipe()
            assert statuses(await load(stack, engine, whole(names))) == ["loaded"] * 60
            stack.check_integrity()
    assert stack.close_report.dropped_blocks == 0
    first_stats = stack.stats().tiers["first"]
    assert first_stats.stored + first_stats.dropped.get("backlog", 0) >= 60


async def test_a_small_first_disk_in_front_of_a_large_second_one(tmp_path):
    engine = Engine(PLAIN, 160)
    names = keys(150)
    small = fs(tmp_path / "a", name="small", capacity=512 << 10)
    config = stack_file(PLAIN, 8, small, fs(tmp_path / "b", name="large"))
    async with running(config, engine) as stack:
        for start in range(0, 150, 5):
            await store(stack, engine, whole(names[start : start + 5], start))
            assert await stack.drain(10)
        engine.wipe()
        assert statuses(await load(stack, engine, whole(names))) == ["loaded"] * 150
        assert await stack.drain(10)
        stats = stack.stats().tiers
        assert stats["small"].evictions > 0
        assert stats["large"].hits > 0


async def test_several_roots_share_the_blocks_and_one_that_is_missing_takes_only_its_own(tmp_path, caplog):
    engine = Engine(PLAIN, 64)
    names = keys(40)
    roots = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    lower = fs(*roots, capacity=6 << 20, region_bytes=64 << 10)
    config = stack_file(PLAIN, 64, lower)
    async with running(config, engine) as stack:
        await store(stack, engine, whole(names))
        assert await stack.drain(10)
    async with running(config, engine) as stack:
        engine.wipe()
        assert statuses(await load(stack, engine, whole(names))) == ["loaded"] * 40
    shutil.move(tmp_path / "b", tmp_path / "gone")
    async with running(stack_file(PLAIN, 64, lower | {"create": "false"}), engine) as stack:
        assert f"{tmp_path / 'b'}: is not there" in caplog.text
        engine.wipe()
        result = statuses(await load(stack, engine, whole(names)))
        assert result.count("loaded") >= 20
        assert result.count("missing") >= 10
        assert set(result) == {"loaded", "missing"}


# -- a tier that other engines write to ------------------------------------------------------------------------------


async def test_a_shared_tier_is_asked_and_what_another_engine_stored_is_loaded():
    one, other = Engine(PLAIN, 64), Engine(PLAIN, 64)
    names = keys(20)
    parts, (first,) = stack_with(one, 32, {"type": "shared"})
    async with opened(parts) as stack:
        await store(stack, one, whole(names))
        assert await stack.drain(10)
    parts, (second,) = stack_with(other, 8, {"type": "shared"})
    assert isinstance(second, SharedTier)
    second.kept = first.kept
    async with opened(parts) as stack:
        assert stack.locate(names) == [None] * 20, "nothing is known yet"
        assert list(await stack.lookup(names + keys(3, start=500))) == ["hit_pending"] * 20 + ["miss"] * 3
        assert len(second.asked) == 1, "all in one question"
        assert stack.locate(names) == ["shared"] * 20
        assert statuses(await load(stack, other, whole(names))) == ["loaded"] * 20
        assert stack.stats().tiers["shared"].hits == 20
        assert list(await stack.lookup(keys(3, start=500))) == ["miss"] * 3
        assert len(second.asked) == 1, "what was answered is not asked again"


async def test_a_shared_tier_that_does_not_answer_in_time_is_a_miss():
    engine = Engine(PLAIN, 64)
    parts, (tier,) = stack_with(engine, 8, {"type": "shared"}, lookup_timeout_seconds=0.1)
    async with opened(parts) as stack:
        tier.answers.clear()
        async with asyncio.timeout(20):
            assert list(await stack.lookup(keys(4))) == ["miss"] * 4
            assert statuses(await load(stack, engine, whole(keys(4)))) == ["missing"] * 4
        tier.answers.set()


async def test_a_shared_tier_may_take_as_long_as_the_stack_file_allows():
    engine = Engine(PLAIN, 64)
    parts, (tier,) = stack_with(engine, 8, {"type": "shared"}, lookup_timeout_seconds=30.0)
    tier.answer_with = lambda key: LookupResult.HIT
    async with opened(parts) as stack:
        tier.answers.clear()
        first = asyncio.create_task(stack.lookup(keys(4)))
        await asyncio.sleep(1.2)
        second = asyncio.create_task(stack.lookup(keys(4)))
        await asyncio.sleep(0.01)
        assert not first.done(), "the deadline is the one of the stack, not a constant"
        assert not second.done()
        tier.answers.set()
        assert list(await first) == list(await second) == ["hit_pending"] * 4


@pytest.mark.parametrize("fault", ["retry", "raise", "short"])
async def test_answers_that_are_none_become_misses(fault, caplog):
    engine = Engine(PLAIN, 64)
    parts, (tier,) = stack_with(engine, 8, {"type": "shared"}, lookup_timeout_seconds=0.2)

    async def broken(names):
        if fault == "raise":
            raise RuntimeError("the third party's bug")
        return [LookupResult.RETRY] * (len(names) - (fault == "short"))

    tier.lookup = broken
    async with opened(parts) as stack:
        async with asyncio.timeout(20):
            assert list(await stack.lookup(keys(4))) == ["miss"] * 4
        if fault == "raise":
            assert "could not answer a lookup" in caplog.text
        if fault == "short":
            assert "answered 3 of 4 keys" in caplog.text


async def test_what_a_shared_tier_lost_meanwhile_is_missing_and_then_known_to_be():
    engine = Engine(PLAIN, 64)
    parts, (tier,) = stack_with(engine, 4, {"type": "shared"})
    names = keys(4)
    async with opened(parts) as stack:
        await store(stack, engine, whole(names))
        assert await stack.drain(10)
        await store(stack, engine, whole(keys(4, start=100)))
        assert await stack.drain(10)
        assert stack.locate(names) == ["shared"] * 4
        tier.kept.clear()
        assert statuses(await load(stack, engine, whole(names))) == ["missing"] * 4
        assert stack.stats().tiers["shared"].missing == 4
        assert stack.locate(names) == [None] * 4


async def test_a_disk_above_a_shared_tier_answers_first(tmp_path):
    engine = Engine(PLAIN, 64)
    parts, (_, remote) = stack_with(engine, 8, fs(tmp_path / "r"), {"type": "shared"})
    names = keys(20)
    async with opened(parts) as stack:
        for start in range(0, 20, 4):
            await store(stack, engine, whole(names[start : start + 4]))
            assert await stack.drain(10)
        assert list(await stack.lookup(names[:10])) == ["hit_pending"] * 10
        assert remote.asked == []
        remote.begun.clear()
        engine.wipe()
        assert statuses(await load(stack, engine, whole(names))) == ["loaded"] * 20
        assert LOAD not in remote.begun
        assert stack.stats().tiers["shared"].stored == 20


# -- blocks that are in rows already ---------------------------------------------------------------------------------


async def one_leases_what_another_waits_for(stack, engine, first, second):
    """Store both lists of keys, lease the first to one request, and return both requests; the second one waits."""
    for names in (first, second):
        await store(stack, engine, whole(names))
        assert await stack.drain(10)
    one, other = stack.request("first"), stack.request("second")
    leased = one.reserve(first)
    await until(lambda: leased.served)
    waiting = other.reserve(second)
    await until(lambda: waiting.oldest_since is not None)
    return one, other


async def test_a_load_of_leased_rows_does_not_wait_for_one_who_waits_for_the_leases():
    """Reserved, served, loaded without naming the request, as `LoadStore.load` has it: nobody may block that."""
    engine = Engine(PLAIN, 64)
    parts, _ = stack_with(engine, 8, {"type": "memory"}, lease_seconds=60.0, reservation_seconds=60.0)
    first, second = keys(6), keys(8, start=100)
    async with opened(parts) as stack:
        one, other = await one_leases_what_another_waits_for(stack, engine, first, second)
        waiting = other.reservation
        assert not waiting.served
        async with asyncio.timeout(20):
            assert statuses(await load(stack, engine, whole(first, 20))) == ["loaded"] * 6
        one.end()
        await until(lambda: waiting.served)
        assert waiting.hits() == [True] * 8
        other.end()


async def test_hits_in_rows_are_loaded_while_others_wait_for_rows():
    engine = Engine(PLAIN, 64)
    parts, _ = stack_with(engine, 8, {"type": "memory"}, lease_seconds=60.0, reservation_seconds=60.0)
    below, here = keys(8, start=100), keys(8)
    async with opened(parts) as stack:
        for names in (below, here):
            await store(stack, engine, whole(names))
            assert await stack.drain(10)
        request = stack.request("holds every row")
        assert request.reserve(here).served
        waiting = asyncio.create_task(load(stack, engine, whole(below)))
        await asyncio.sleep(0)
        async with asyncio.timeout(20):
            assert statuses(await load(stack, engine, whole(here, 20))) == ["loaded"] * 8
        assert not waiting.done()
        request.end()
        assert statuses(await waiting) == ["loaded"] * 8


async def test_a_load_that_names_its_request_takes_over_the_leases():
    engine = Engine(PLAIN, 64)
    parts, _ = stack_with(engine, 8, {"type": "memory"}, lease_seconds=60.0, reservation_seconds=60.0)
    first, second = keys(6), keys(8, start=100)
    async with opened(parts) as stack:
        one, other = await one_leases_what_another_waits_for(stack, engine, first, second)
        waiting = other.reservation
        async with asyncio.timeout(20):
            result = await stack.run(stack.job(LOAD, [whole(first, 20)]), one)
        assert statuses(result) == ["loaded"] * 6
        assert not engine.wrong(whole(first, 20))
        await until(lambda: waiting.served)
        assert waiting.hits() == [True] * 8
        other.end()
