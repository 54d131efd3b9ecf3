"""Opening, ending and everything in between: nothing is left behind, nothing owed is lost silently."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import asynccontextmanager, suppress
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
    statuses,
    store,
    until,
    whole,
)
from support_stack_tiers import LOAD, STORE, backends

from faults.machine.belongings import belongings, new_since
from kvtier.control.plane.control_plane import ControlPlane
from kvtier.errors import (
    ConfigError,
    GeometryError,
    IntegrityError,
    KVTierError,
    ResourceError,
    RootBusyError,
    RootError,
    SharedMemoryError,
    UsageError,
)
from kvtier.stack import CloseReport, TierStack


async def expect_nothing_left(since: Counter[str]) -> None:
    """What is ending has a moment to end; each look costs a collection, so there are not many."""
    with suppress(TimeoutError):
        async with asyncio.timeout(10):
            while new_since(since):  # noqa: ASYNC110 - what is waited for is a plain value
                await asyncio.sleep(0.05)
    assert not new_since(since)


@asynccontextmanager
async def as_it_was():
    """Whatever happens inside leaves no file, thread or mapping of shared memory behind."""
    before = belongings()
    yield
    await expect_nothing_left(before)


@pytest.fixture
async def nothing_left():
    """`as_it_was` around a whole test."""
    async with as_it_was():
        yield


@pytest.mark.parametrize("io_engine", ["threads", pytest.param("auto")])
async def test_a_clean_end_leaves_nothing_behind(tmp_path, io_engine):
    engine = Engine(PLAIN, 32)
    config = stack_file(PLAIN, 16, fs(tmp_path / "a", tmp_path / "b", io_engine=io_engine, direct="auto"))

    async def live(turn: int) -> CloseReport | None:
        async with running(config, engine) as stack:
            await store(stack, engine, whole(keys(8, start=8 * turn)))
            assert statuses(await load(stack, engine, whole(keys(8, start=8 * turn), 8))) == ["loaded"] * 8
        return stack.close_report

    async with as_it_was():
        for turn in range(3):
            assert await live(turn) == CloseReport(0, 0)


async def test_the_body_of_async_with_may_raise(tmp_path, nothing_left):
    engine = Engine(PLAIN, 32)

    async def use() -> None:
        async with running(stack_file(PLAIN, 16, fs(tmp_path / "r")), engine) as stack:
            await store(stack, engine, whole(keys(8)))
            raise ValueError("ours")

    with pytest.raises(ValueError, match="ours"):
        await use()
    async with running(stack_file(PLAIN, 16, fs(tmp_path / "r")), engine) as stack:
        assert stack.locate(keys(8)) == ["fs"] * 8, "what was stored was drained all the same"


async def test_closing_again_and_at_once_is_one_close(tmp_path, nothing_left):
    engine = Engine(PLAIN, 32)
    stack = TierStack(parts_of(stack_file(PLAIN, 16, fs(tmp_path / "r")), engine))
    await stack.close()
    await stack.open()
    await store(stack, engine, whole(keys(8)))
    await asyncio.gather(*(stack.close() for _ in range(3)))
    report = stack.close_report
    assert report is not None, "whoever calls close waits until it is done"
    await stack.close()
    assert stack.close_report is report


async def test_a_cancelled_close_closes_every_tier_before_it_raises(nothing_left):
    engine = Engine(PLAIN, 32)
    parts = parts_of(stack_file(PLAIN, 16, {"type": "memory"}, backends=backends()), engine, backends())
    tier = parts.tiers[-1]
    stack = TierStack(parts)
    await stack.open()
    tier.hold(STORE)
    await store(stack, engine, whole(keys(12)))
    closing = asyncio.create_task(stack.close())
    await asyncio.sleep(0)  # the close begins
    await until(lambda: tier.moving[STORE] == 4)
    assert not closing.done()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert tier.closes == 1
    assert stack.close_report.dropped_blocks == 12
    assert stack.close_report.unfinished_jobs == 1
    tier.let_go()
    await until(lambda: tier.moving[STORE] == 0)


async def test_a_stack_that_is_not_open_answers_with_a_usage_error(tmp_path, nothing_left):
    engine = Engine(PLAIN, 32)
    parts = parts_of(stack_file(PLAIN, 16, fs(tmp_path / "r")), engine)
    async with opened(parts) as other:
        job = other.job(LOAD, [whole(keys(2))])

    async def everything_refuses(stack: TierStack) -> None:
        for call in (stack.run(job), stack.lookup(keys(1)), stack.drain(1), stack.reset()):
            with pytest.raises(UsageError, match="the stack is"):
                await call
        for name, *more in (
            ("job", LOAD, [whole(keys(2))]),
            ("locate", keys(1)),
            ("request", "request", keys(1)),
            ("take_events",),
        ):
            with pytest.raises(UsageError, match="the stack is"):
                getattr(stack, name)(*more)
        with pytest.raises(UsageError, match="the stack is"):
            stack.engine.announce(keys(1))

    await everything_refuses(TierStack(parts))
    await everything_refuses(other)
    assert other.stats().tiers["cpu"].stored == 0, "figures stay readable"
    with pytest.raises(UsageError, match="opened once"):
        await other.open()
    with pytest.raises(UsageError, match="never opened"):
        TierStack(parts).stats()


@pytest.mark.parametrize("pause", [1, 3, 5, 20, 60])
async def test_closing_during_loads_and_stores_ends_them_all(tmp_path, seed, pause, nothing_left):
    rng = random.Random(seed)
    engine = Engine(PLAIN, 256)
    names = keys(40)
    async with running(stack_file(PLAIN, 64, fs(tmp_path / "r")), engine) as stack:
        await store(stack, engine, whole(names))
    parts = parts_of(stack_file(PLAIN, 8, fs(tmp_path / "r")), engine)
    fresh = [keys(20, start=1000 + 20 * i) for i in range(3)]
    for i, batch in enumerate(fresh):
        engine.compute(whole(batch, 160 + 20 * i))
    async with opened(parts) as stack:
        loads = [asyncio.create_task(load(stack, engine, whole(rng.sample(names, 40), 40 * i))) for i in range(3)]
        stores = [
            asyncio.create_task(stack.run(stack.job(STORE, [whole(batch, 160 + 20 * i)])))
            for i, batch in enumerate(fresh)
        ]
        for _ in range(pause):
            await asyncio.sleep(0)
        await stack.close()
    for task in loads:
        assert set(statuses(await task)) <= {"loaded", "cancelled"}
    said = {}
    for batch, task in zip(fresh, stores, strict=True):
        said.update(zip(batch, statuses(await task), strict=True))
    assert set(said.values()) <= {"stored", "dropped:closing"}
    dropped = sum(stack.stats().tiers["fs"].dropped.values())
    async with running(stack_file(PLAIN, 8, fs(tmp_path / "r")), engine) as stack:
        on_disk = [name for name, place in zip(said, stack.locate(list(said)), strict=True) if place]
        assert {said[name] for name in on_disk} <= {"stored"}
        assert len(on_disk) == list(said.values()).count("stored") - dropped
        engine.wipe()
        assert statuses(await load(stack, engine, whole(names))) == ["loaded"] * 40


@pytest.mark.parametrize("write_policy", ["write_through", "on_evict"])
async def test_closing_puts_on_disk_whatever_the_cpu_tier_holds(tmp_path, write_policy):
    engine, names = Engine(PLAIN, 64), keys(60)
    config = stack_file(PLAIN, 64, fs(tmp_path / "r", write_policy=write_policy))
    async with running(config, engine) as stack:
        assert statuses(await store(stack, engine, whole(names))) == ["stored"] * 60
    assert stack.close_report.dropped_blocks == 0
    assert stack.stats().tiers["fs"].stored == 60
    engine.wipe()
    async with running(config, engine) as stack:
        assert statuses(await load(stack, engine, whole(names))) == ["loaded"] * 60


async def test_what_could_not_be_drained_is_in_the_report_block_for_block(tmp_path, caplog):
    engine, names = Engine(PLAIN, 128), keys(100)
    async with running(stack_file(PLAIN, 128, fs(tmp_path / "r")), engine, close_timeout_seconds=0.0) as stack:
        assert statuses(await store(stack, engine, whole(names))) == ["stored"] * 100
    lost = stack.close_report.dropped_blocks
    async with running(stack_file(PLAIN, 128, fs(tmp_path / "r")), engine) as stack:
        found = [place for place in stack.locate(names) if place]
        assert len(found) == 100 - lost
        assert 0 < lost <= 100
        assert f"event=closed dropped_blocks={lost} unfinished_jobs=0" in caplog.text


def bad_stacks(tmp_path):
    """(what is wrong, how the parts come about, the error) of stacks that cannot be opened."""
    plain, hybrid = Engine(PLAIN, 32), Engine(HYBRID, 32)
    file = tmp_path / "file"
    file.write_text("not a folder")

    def stack(*lowers, rows=16, engine=plain, **more):
        return parts_of(stack_file(engine.layout, rows, *lowers, **more), engine)

    few = hybrid.kv_caches[:2]
    return [
        ("a folder in a folder that is not there", lambda: stack(fs(tmp_path / "no" / "r")), RootError),
        ("a folder that must not be made", lambda: stack(fs(tmp_path / "r", create="false")), RootError),
        ("a file for a folder", lambda: stack(fs(file)), RootError),
        ("a disk too small", lambda: stack(fs(tmp_path / "r", capacity=8192)), GeometryError),
        ("the second of two disks", lambda: stack(fs(tmp_path / "a", name="a"), fs(file, name="b")), RootError),
        ("more memory than there is", lambda: stack(fs(tmp_path / "r"), rows=1 << 34), SharedMemoryError),
        ("a tensor that is missing", lambda: replace(stack(engine=hybrid), kv_caches=few), GeometryError),
        ("tensors of another layout", lambda: replace(stack(engine=hybrid), kv_caches=plain.kv_caches), GeometryError),
        ("another device", lambda: stack(gpu={"device": "cuda"}), ConfigError),
        ("no tiers", lambda: replace(stack(), tiers=[]), ConfigError),
        ("tiers upside down", lambda: replace(stack(), tiers=stack().tiers[::-1]), ConfigError),
    ]


async def test_an_error_at_opening_leaves_nothing_behind(tmp_path, nothing_left):
    for what, make, expected in bad_stacks(tmp_path):
        print(what)
        with pytest.raises(expected):
            await TierStack(make()).open()


async def test_a_root_in_use_names_its_owner_and_stays_whole(tmp_path, nothing_left):
    engine = Engine(PLAIN, 32)
    config = stack_file(PLAIN, 16, fs(tmp_path / "r"))
    async with running(config, engine) as stack:
        await store(stack, engine, whole(keys(8)))
        with pytest.raises(RootBusyError, match=str(os.getpid())):
            await TierStack(parts_of(config, engine)).open()
        assert await stack.drain(10)
    async with running(config, engine) as stack:
        assert stack.locate(keys(8)) == ["fs"] * 8


async def seconds_to_open(make) -> float:
    begun = time.monotonic()
    async with TierStack(make()):
        return time.monotonic() - begun


async def cancel_openings(make, count: int, rng: random.Random) -> None:
    """Cancel the opening of stacks at moments all over it, however long it takes here; what is left open is closed."""
    cancelled, opening_seconds = 0, min([await seconds_to_open(make) for _ in range(3)])
    for _ in range(count):
        stack = TierStack(make())
        opening = asyncio.create_task(stack.open())
        await asyncio.sleep(rng.random() * 1.5 * opening_seconds)
        opening.cancel()
        try:
            await opening
        except asyncio.CancelledError:
            cancelled += 1
        await stack.close()
    assert cancelled


async def test_opening_can_be_cancelled_at_any_time(seed, nothing_left):
    engine = Engine(PLAIN, 32)
    config = stack_file(PLAIN, 16, {"type": "memory"}, backends=backends())
    await cancel_openings(lambda: parts_of(config, engine, backends()), 40, random.Random(seed))


async def test_opening_disks_can_be_cancelled_at_any_time(tmp_path, seed, nothing_left):
    engine = Engine(PLAIN, 32)
    config = stack_file(PLAIN, 16, fs(tmp_path / "r"))
    await cancel_openings(lambda: parts_of(config, engine), 60, random.Random(seed))
    async with running(config, engine) as stack:
        assert statuses(await store(stack, engine, whole(keys(4)))) == ["stored"] * 4


async def test_an_error_while_draining_closes_every_tier_and_ends_the_jobs_that_wait(nothing_left, monkeypatch):
    engine = Engine(PLAIN, 32)
    parts = parts_of(stack_file(PLAIN, 16, {"type": "memory"}, backends=backends()), engine, backends())
    stack = TierStack(parts)
    await stack.open()
    waiting = asyncio.create_task(store(stack, engine, whole(keys(4))))
    await asyncio.sleep(0)

    def defect(plane: ControlPlane, now: float) -> None:
        raise IntegrityError("an invariant does not hold")

    monkeypatch.setattr(ControlPlane, "close", defect)
    await stack.close()
    assert stack.close_report is not None
    assert stack.stats().errors == 1
    await asyncio.wait_for(waiting, 10)


async def test_a_system_without_threads_is_a_resource_error(monkeypatch, nothing_left):
    start = threading.Thread.start

    def start_unless(name: str) -> Callable[[threading.Thread], None]:
        def start_or_refuse(thread: threading.Thread) -> None:
            if thread.name.startswith(name):
                raise RuntimeError("can't start new thread")
            start(thread)

        return start_or_refuse

    for name in ("kvtier-cpu", "kvtier-gpu-setup", "kvtier-copy-1"):
        monkeypatch.setattr(threading.Thread, "start", start_unless(name))
        with pytest.raises(ResourceError, match="thread"):
            await TierStack(parts_of(stack_file(PLAIN, 16), Engine(PLAIN, 32))).open()


async def test_many_lives_cost_nothing(tmp_path, nothing_left):
    engine = Engine(PLAIN, 32)
    config = stack_file(PLAIN, 8, fs(tmp_path / "r", capacity=1 << 20))
    async with running(config, engine):
        pass
    before = belongings()
    for life in range(10):
        async with running(config, engine) as stack:
            await store(stack, engine, whole(keys(4, start=4 * life)))
    await expect_nothing_left(before)


async def test_a_reservation_that_lapses_costs_no_turns_of_the_loop(nothing_left):
    engine = Engine(PLAIN, 32)
    parts = parts_of(
        stack_file(PLAIN, 16, {"type": "memory"}, backends=backends()), engine, backends(), lease_seconds=0.05
    )
    async with opened(parts) as stack:
        stack.request("nothing of this is here").reserve(keys(4))
        alarms = 0
        original = stack._on_timer

        def counted(plane: ControlPlane) -> None:
            nonlocal alarms
            alarms += 1
            original(plane)

        stack._on_timer = counted
        stack.request("nor of this").reserve(keys(4, start=10))
        await asyncio.sleep(0.3)
        assert alarms < 20


async def test_ending_a_request_lets_a_waiting_load_go_on(nothing_left):
    engine = Engine(PLAIN, 64)
    parts = parts_of(stack_file(PLAIN, 8, {"type": "memory"}, backends=backends()), engine, backends())
    async with opened(parts) as stack:
        for start in range(0, 16, 8):
            await store(stack, engine, whole(keys(8, start=start)))
            assert await stack.drain(10)
        request = stack.request("first")
        assert request.reserve(keys(8, start=8)).hits() == [True] * 8
        waiting = asyncio.create_task(load(stack, engine, whole(keys(8))))
        await asyncio.sleep(0)
        request.end()
        async with asyncio.timeout(20):
            assert statuses(await waiting) == ["loaded"] * 8
        assert held(stack)["cpu"]["filling"] == 0


async def test_errors_are_all_of_one_tree():
    for error in (ConfigError, GeometryError, RootBusyError, RootError, SharedMemoryError, UsageError):
        assert issubclass(error, KVTierError)
