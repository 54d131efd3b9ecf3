"""An exception in a step loses no job: each ends by its deadline, with right bytes or without, and closing works."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from support_stack import PLAIN, Engine, keys, opened, parts_of, stack_file, statuses, store, until, whole
from support_stack_tiers import LOAD, STORE, backends

from kvtier.control.plane.control_plane import ControlPlane
from kvtier.control.tiers.breaker import BreakerState
from kvtier.errors import IntegrityError
from kvtier.stack import TierStack
from kvtier.stack.dispatcher import Dispatcher, Traffic
from kvtier.stack.lookups import Lookups
from kvtier.tier.contract import LookupResult
from tests.stack.test_deadlines import only_below, stack_over_memory
from tests.stack.test_life import as_it_was

ENDS_SECONDS = 10.0


def once(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, error: BaseException | None = None) -> list[int]:
    """The next call of a method raises, before it does anything; later ones do what they did."""
    usual, raised = getattr(owner, name), []

    def raising(*args: Any) -> Any:
        if raised:
            return usual(*args)
        raised.append(1)
        raise error or ArithmeticError(name)

    monkeypatch.setattr(owner, name, raising)
    return raised


PLANE = ("submit", "pump", "finish", "collect", "next_deadline")
STEPS = [
    *((ControlPlane, name) for name in PLANE),
    *((Dispatcher, name) for name in ("_start", "_begin", "_report")),
    *((Traffic, name) for name in ("begin", "end")),
]


@pytest.mark.parametrize(("owner", "name"), STEPS)
async def test_every_job_ends_when_one_step_raises(owner, name, monkeypatch, caplog):
    engine = Engine(PLAIN, 64)
    parts, _ = stack_over_memory(engine, settings={"load_timeout_seconds": 3.0, "store_timeout_seconds": 3.0})
    async with TierStack(parts) as stack:
        await store(stack, engine, whole(keys(8)))
        groups = [whole(keys(8, start=100 * i), 20 * i) for i in range(3)]
        for one in groups[1:]:
            engine.compute(one)
        raised = once(monkeypatch, owner, name)
        jobs = [stack.job(LOAD if one is groups[0] else STORE, [one]) for one in groups]
        calls = [stack.run(job) for job in jobs]
        async with asyncio.timeout(ENDS_SECONDS):
            results = await asyncio.gather(*calls)
        assert raised
        assert all(len(result.outcomes[0]) == 8 for result in results)
        assert not engine.wrong(groups[0], results[0].outcomes[0])
        assert stack.stats().errors
        assert name in caplog.text
        # and what is asked afterwards ends as well
        async with asyncio.timeout(ENDS_SECONDS):
            again = await stack.run(stack.job(LOAD, [groups[0]]))
            await stack.lookup(keys(8))
            await stack.reset()
        assert not engine.wrong(groups[0], again.outcomes[0])
    assert stack.close_report is not None


async def test_a_job_that_the_control_plane_lost_ends_after_its_deadline(monkeypatch, caplog):
    engine = Engine(PLAIN, 64)
    parts, _ = stack_over_memory(engine)
    async with TierStack(parts) as stack:
        monkeypatch.setattr(ControlPlane, "finish", lambda *args: None)
        engine.compute(whole(keys(4)))
        async with asyncio.timeout(ENDS_SECONDS):
            result = await stack.run(stack.job(STORE, [whole(keys(4))], timeout_seconds=0.2))
        assert statuses(result) != ["stored"] * 4
    assert "did not end by its deadline" in caplog.text or "late" in statuses(result)


async def test_a_load_that_the_control_plane_lost_is_missing_after_its_deadline(monkeypatch):
    engine = Engine(PLAIN, 64)
    parts, _ = stack_over_memory(engine)
    async with TierStack(parts) as stack:
        await store(stack, engine, whole(keys(4)))
        monkeypatch.setattr(ControlPlane, "finish", lambda *args: None)
        async with asyncio.timeout(ENDS_SECONDS):
            result = await stack.run(stack.job(LOAD, [whole(keys(4))], timeout_seconds=0.2))
        assert statuses(result) == ["missing"] * 4
        with pytest.raises(IntegrityError):
            stack.check_integrity()


async def test_a_failed_control_plane_finds_nothing_and_still_resets_its_tiers(monkeypatch):
    engine = Engine(PLAIN, 64)
    parts, tier = stack_over_memory(engine)
    async with TierStack(parts) as stack:
        await store(stack, engine, whole(keys(8)))
        assert await stack.drain(10)
        stack.take_events()
        once(monkeypatch, ControlPlane, "pump")
        reservation = stack.request("a request").reserve(keys(4))
        assert stack.stats().errors == 1
        assert reservation.served
        assert reservation.hits() == [False] * 4
        assert await stack.lookup(keys(8)) == [LookupResult.MISS] * 8
        assert stack.locate(keys(8)) == [None] * 8
        removed = {key for event in stack.take_events() if event.removed for key in event.keys}
        assert removed >= set(keys(8)), "every removal is published"
        stack.engine.announce(keys(8))
        assert stack.take_events() == []
        assert statuses(await stack.load(keys(8), gpu_blocks=range(8))) == ["missing"] * 8
        assert statuses(await stack.store(keys(8), gpu_blocks=range(8))) == ["dropped:tier_down"] * 8
        await stack.reset()
        assert tier.epochs == [1]
        assert await stack.drain(1)


@pytest.mark.parametrize("kind", [LOAD, STORE])
async def test_a_tier_that_raises_before_its_first_await_fails_its_job_alone(kind):
    engine = Engine(PLAIN, 64)
    parts, tier = stack_over_memory(engine)
    async with opened(parts) as stack:
        await only_below(stack, engine, keys(8))
        engine.wipe()
        usual = getattr(tier, kind)

        def raising(job: Any) -> Any:
            raise ArithmeticError("before the first await")

        setattr(tier, kind, raising)
        async with asyncio.timeout(ENDS_SECONDS):
            result = await stack.run(stack.job(LOAD, [whole(keys(8))]))
            await store(stack, engine, whole(keys(8, start=500), 20))
            await stack.drain(5)
        assert statuses(result) == (["missing"] if kind is LOAD else ["loaded"]) * 8
        assert stack.stats().errors
        setattr(tier, kind, usual)


async def test_a_thread_that_does_not_start_fails_its_job_alone(monkeypatch):
    """The tiers' own threads: a store whose thread is refused fails, and the next one works."""
    from kvtier.aio.daemon_pool import DaemonPool

    pool, refused = DaemonPool("test", 1), []
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if not refused:
            refused.append(1)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(OSError, match="no thread"):
        await pool.run(time.monotonic)
    assert await pool.run(time.monotonic) > 0
    assert await pool.close(5) == 0


async def test_closing_that_was_interrupted_is_done_by_the_next_close(monkeypatch):
    async with as_it_was():
        stack = TierStack(stack_over_memory(Engine(PLAIN, 8))[0])
        await stack.open()
        raised = once(monkeypatch, Lookups, "cancel")
        with pytest.raises(ArithmeticError):
            await stack.close()
        assert raised
        await stack.close()
        assert stack.close_report is not None


async def test_lookups_that_are_never_answered_do_not_pile_up(monkeypatch):
    engine = Engine(PLAIN, 64)
    config = stack_file(PLAIN, 16, {"type": "shared"}, backends=backends())
    parts = parts_of(config, engine, backends(), lookup_timeout_seconds=0.01)
    monkeypatch.setattr("kvtier.stack.lookups.LOOKUPS_MAX", 4)
    async with opened(parts) as stack:
        never: Callable[[Any], Any] = lambda names: asyncio.Event().wait()  # noqa: E731
        parts.tiers[-1].lookup = never
        for start in range(20):
            assert await stack.lookup(keys(1, start=start)) == [LookupResult.MISS]
        assert len(stack._lookups.tasks) == 4
        monkeypatch.setattr("kvtier.stack.lookups.LOOKUP_SECONDS_MAX", 0.01)


async def test_a_tier_that_answers_no_lookup_is_not_asked_for_a_while(monkeypatch):
    config = stack_file(PLAIN, 16, {"type": "shared"}, backends=backends())
    parts = parts_of(config, Engine(PLAIN, 64), backends(), lookup_timeout_seconds=0.01)
    monkeypatch.setattr("kvtier.stack.lookups.LOOKUP_SECONDS_MAX", 0.5)
    asked = []

    async def never(names: Any) -> Any:
        asked.append(len(names))
        await asyncio.Event().wait()

    async with opened(parts) as stack:
        parts.tiers[-1].lookup = never
        breaker = stack._assembled.plane.control.lowers[0].lookup_breaker
        for start in range(breaker.threshold):
            assert await stack.lookup(keys(1, start=start)) == [LookupResult.MISS]
        await until(lambda: breaker.state is BreakerState.OPEN)
        assert await stack.lookup(keys(1, start=99)) == [LookupResult.MISS]
        assert len(asked) == breaker.threshold
