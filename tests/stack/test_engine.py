"""The stack for a synchronous engine: decisions on its thread, I/O elsewhere, no waiting but where it is said."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from support_driver import ServedStack, drain, presence
from support_stack import PLAIN, Engine, fs, keys, parts_of, run_jobs, stack_file, statuses, whole
from support_stack_tiers import LOAD, STORE, backends

from kvtier.errors import ConfigError, RootError, UsageError
from kvtier.stack import CloseReport
from kvtier.tier.contract import LookupResult
from kvtier.types.jobs import JobResult, TransferJob
from kvtier.types.keys import RequestId


def engine_stack(engine: Engine, rows: int, *lowers: dict[str, object], **settings: float):
    """(a stack that is not open, its lower tiers)."""
    parts = parts_of(stack_file(PLAIN, rows, *lowers, backends=backends()), engine, backends(), **settings)
    return ServedStack(parts), parts.tiers[2:]


def store(stack: ServedStack, engine: Engine, one) -> list[str]:
    engine.compute(one)
    job = stack.job(STORE, [one])
    stack.submit(job)
    return statuses(run_jobs(stack, job.job_id)[job.job_id])


def load(stack: ServedStack, engine: Engine, one, request: str | None = None) -> list[str]:
    job = stack.job(LOAD, [one])
    stack.submit(job, RequestId(request) if request else None)
    result = run_jobs(stack, job.job_id)[job.job_id]
    assert not engine.wrong(one, result.outcomes[0])
    return statuses(result)


def serve(stack: ServedStack, reservation: Any) -> None:
    """Step until a reservation is served: the first step sends what it needs."""
    stack.step()
    while not reservation.served:
        assert stack.wait(20.0)
        stack.step()


def test_store_demote_restart_and_load_from_a_plain_thread(tmp_path):
    engine, names = Engine(PLAIN, 64), keys(40)
    stack, _ = engine_stack(engine, 16, fs(tmp_path / "r"))
    with stack:
        for start in range(0, 40, 8):
            assert store(stack, engine, whole(names[start : start + 8], start)) == ["stored"] * 8
            drain(stack)
        engine.wipe()
        assert load(stack, engine, whole(names)) == ["loaded"] * 40
        stack.check_integrity()
    assert stack.close_report == CloseReport(0, 0)
    stack, _ = engine_stack(engine, 16, fs(tmp_path / "r"))
    with stack:
        assert stack.locate(names) == ["fs"] * 40
        assert presence(stack, names) == [LookupResult.HIT_PENDING] * 40
        engine.wipe()
        assert load(stack, engine, whole(names)) == ["loaded"] * 40


def test_reserve_step_submit_as_a_scheduler_does_it(tmp_path):
    engine, names = Engine(PLAIN, 64), keys(12)
    stack, _ = engine_stack(engine, 16, fs(tmp_path / "r"))
    with stack:
        for start in (0, 100, 200):
            for first in (0, 8):
                store(stack, engine, whole(keys(8, start=start + first)))
                drain(stack)
        request = stack.request(RequestId("a request"))
        assert request.reservation is None
        reservation = request.reserve([*names, *keys(1, start=999)])
        assert not reservation.served
        serve(stack, reservation)
        assert reservation.hits() == [True] * 12 + [False]
        assert request.reservation is reservation
        assert stack.locate(names) == ["cpu"] * 12
        engine.wipe()
        assert load(stack, engine, whole(names), request) == ["loaded"] * 12
        assert request.reservation is None, "a load ends its request's leases"
        stack.check_integrity()


def test_an_aborted_request_gives_its_leases_back(tmp_path):
    engine = Engine(PLAIN, 64)
    stack, _ = engine_stack(engine, 8, fs(tmp_path / "r"))
    with stack:
        for start in range(0, 24, 8):
            store(stack, engine, whole(keys(8, start=start)))
            drain(stack)
        first, second = stack.request(RequestId("first")), stack.request(RequestId("second"))
        one = first.reserve(keys(8))
        serve(stack, one)
        other = second.reserve(keys(8, start=8))
        stack.step()
        assert not other.served, "the rows are leased"
        first.end()
        serve(stack, other)
        assert other.hits() == [True] * 8
        second.end()
        with pytest.raises(UsageError, match="second"):
            second.reserve(keys(8))


class Frozen:
    """A stack whose loop is stopped dead inside a tier's call; `thaw` ends that, and so does a watchdog."""

    def __init__(self, tier) -> None:
        self.entered, self.ice = threading.Event(), threading.Event()
        self.forgotten = False
        store = tier.store

        async def freeze(job):
            self.entered.set()
            self.ice.wait()  # a third party's blocking call: the whole loop stands still
            return await store(job)

        tier.store = freeze
        self._watchdog = threading.Timer(20.0, self._give_up)
        self._watchdog.start()

    def _give_up(self) -> None:
        self.forgotten = True
        self.ice.set()

    def thaw(self) -> None:
        assert not self.forgotten, "a call waited for the loop"
        self._watchdog.cancel()
        self.ice.set()


def test_no_call_of_an_engine_step_waits_for_a_stack_process_that_stands_still():
    engine, names = Engine(PLAIN, 64), keys(4)
    stack, (tier,) = engine_stack(engine, 16, {"type": "memory"})
    with stack:
        frozen = Frozen(tier)
        assert store(stack, engine, whole(names)) == ["stored"] * 4
        assert frozen.entered.wait(20.0)
        request = stack.request(RequestId("r"))
        assert stack.lookup(names) == [LookupResult.RETRY] * 4
        request.touch(names)
        assert not request.reserve(names).served
        loading = stack.job(LOAD, [whole(names, 8)])
        stack.submit(loading, request)
        engine.compute(whole(keys(4, start=50), 20))
        storing = stack.job(STORE, [whole(keys(4, start=50), 20)])
        stack.submit(storing)
        assert stack.step() == []
        stack.cancel(storing.job_id)
        request.end()
        for _ in range(100):
            assert stack.lookup(names) == [LookupResult.RETRY] * 4
            assert not [result for result in stack.step() if result.job_id == loading.job_id]
        assert stack.has_pending_work
        assert stack.geometry.row_bytes == 4096
        frozen.thaw()
        assert statuses(run_jobs(stack, loading.job_id)[loading.job_id]) == ["loaded"] * 4
        assert not engine.wrong(whole(names, 8))
        assert stack.locate(names) == ["cpu"] * 4
        stack.check_integrity()


def test_a_busy_engine_thread_holds_up_nothing_but_itself(tmp_path):
    engine, names = Engine(PLAIN, 128), keys(40)
    stack, _ = engine_stack(engine, 64, fs(tmp_path / "r"))
    with stack:
        done: list[JobResult] = []
        for start in range(0, 40, 4):
            engine.compute(whole(names[start : start + 4], start))
            stack.submit(stack.job(STORE, [whole(names[start : start + 4], start)]))
            done += stack.step()
            busy_until = time.perf_counter() + 0.005
            while time.perf_counter() < busy_until:
                sum(range(200))
        while len(done) < 10:
            assert stack.wait(20.0)
            done += stack.step()
        assert [statuses(result) for result in done] == [["stored"] * 4] * 10
        job = stack.job(LOAD, [whole(names, 60)])
        stack.submit(job)
        loaded = []
        steps = 0
        while not loaded:
            loaded = stack.step()
            sum(range(2000))
            steps += 1
            assert steps < 1_000_000
        assert statuses(loaded[0]) == ["loaded"] * 40
        assert not engine.wrong(whole(names, 60))


def test_deadlines_pass_as_the_engine_steps():
    engine = Engine(PLAIN, 64)
    stack, (tier,) = engine_stack(engine, 32, {"type": "memory"})
    with stack:
        for start in range(0, 48, 8):
            store(stack, engine, whole(keys(8, start=start)))
            drain(stack)
        stack.served.run(tier.hold, LOAD)
        job = stack.job(LOAD, [whole(keys(8))], timeout_seconds=0.5)
        stack.submit(job)
        results = {}
        until = time.monotonic() + 10
        while job.job_id not in results:
            assert time.monotonic() < until
            results |= {result.job_id: result for result in stack.step()}
            stack.wait(0.02)
        assert statuses(results[job.job_id]) == ["late"] * 8
        stack.served.run(tier.let_go)


def test_cancelled_jobs_still_have_results(tmp_path):
    engine = Engine(PLAIN, 64)
    stack, _ = engine_stack(engine, 8, fs(tmp_path / "r"))
    with stack:
        for start in range(0, 24, 4):
            store(stack, engine, whole(keys(4, start=start)))
            drain(stack)
        jobs, results = set(), {}
        for _ in range(20):
            job = stack.job(LOAD, [whole(keys(24))])
            stack.submit(job)
            results |= {result.job_id: result for result in stack.step()}
            stack.cancel(job.job_id)
            jobs.add(job.job_id)
        results |= run_jobs(stack, *(jobs - set(results)))
        assert set(results) == jobs
        for result in results.values():
            assert set(statuses(result)) <= {"loaded", "cancelled"}
        drain(stack)
        stack.check_integrity()
        assert load(stack, engine, whole(keys(24))) == ["loaded"] * 24


def test_a_shared_tier_answers_between_steps():
    engine, other = Engine(PLAIN, 64), Engine(PLAIN, 64)
    first, (one,) = engine_stack(engine, 16, {"type": "shared"})
    with first:
        store(first, engine, whole(keys(8)))
        drain(first)
    second, (two,) = engine_stack(other, 16, {"type": "shared"})
    two.kept = one.kept
    with second:
        found = second.lookup(keys(10))
        while LookupResult.RETRY in found:
            second.step()
            assert second.wait(20.0)
            second.step()
            found = second.lookup(keys(10))
        assert found == [LookupResult.HIT_PENDING] * 8 + [LookupResult.MISS] * 2
        assert load(second, other, whole(keys(8))) == ["loaded"] * 8


def test_a_reset_is_durable_when_it_returns(tmp_path):
    engine = Engine(PLAIN, 64)
    stack, _ = engine_stack(engine, 16, fs(tmp_path / "r"))
    with stack:
        store(stack, engine, whole(keys(8)))
        drain(stack)
        stack.reset()
        assert presence(stack, keys(8)) == [LookupResult.MISS] * 8
        store(stack, engine, whole(keys(4, start=50)))
    stack, _ = engine_stack(engine, 16, fs(tmp_path / "r"))
    with stack:
        assert stack.locate(keys(8)) == [None] * 8
        assert stack.locate(keys(4, start=50)) == ["fs"] * 4


def test_closing_says_what_it_cost():
    engine = Engine(PLAIN, 64)
    stack, (tier,) = engine_stack(engine, 16, {"type": "memory"}, close_timeout_seconds=0.2)
    with stack:
        stack.served.run(tier.hold, STORE)
        assert store(stack, engine, whole(keys(12))) == ["stored"] * 12
    assert stack.close_report == CloseReport(12, 1)
    assert stack.close() is stack.close_report
    assert not any(thread.name == "kvtier-worker" for thread in threading.enumerate())


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_tier_that_would_end_its_thread_ends_only_its_job(error):
    engine = Engine(PLAIN, 64)
    stack, (tier,) = engine_stack(engine, 16, {"type": "memory"}, close_timeout_seconds=0.2)

    async def leave(job: TransferJob) -> JobResult:
        raise error

    tier.store = leave
    with stack:
        one = whole(keys(12))
        assert store(stack, engine, one) == ["stored"] * 12
        drain(stack)
        assert load(stack, engine, one) == ["loaded"] * 12
        assert stack.stats().tiers["memory"].failed >= 12
    assert stack.close_report.unfinished_jobs == 0
    assert not any(thread.name == "kvtier-worker" for thread in threading.enumerate())


def test_what_ends_well_while_closing_is_not_lost():
    engine = Engine(PLAIN, 64)
    stack, (tier,) = engine_stack(engine, 16, {"type": "memory"}, close_timeout_seconds=0.05)

    async def finish() -> None:
        tier.let_go()

    tier.close = finish
    with stack:
        stack.served.run(tier.hold, STORE)
        store(stack, engine, whole(keys(12)))
    kept = len(tier.kept)
    assert stack.close_report.dropped_blocks == 12 - kept


def test_jobs_under_way_end_before_close_returns(tmp_path):
    engine = Engine(PLAIN, 128)
    stack, _ = engine_stack(engine, 64, fs(tmp_path / "r"))
    with stack:
        for start in range(0, 64, 16):
            store(stack, engine, whole(keys(16, start=start)))
        for i in range(3):
            stack.submit(stack.job(LOAD, [whole(keys(40), 40 * i)]))
        stack.step()
        report = stack.close()
        after = engine.snapshot()
        assert report.unfinished_jobs == 0
    assert all((a == b).all() for a, b in zip(after, engine.snapshot(), strict=True))


def test_opening_errors_are_raised_here_and_leave_no_thread(tmp_path):
    engine = Engine(PLAIN, 16)
    threads = set(threading.enumerate())
    stack, _ = engine_stack(engine, 8, fs(tmp_path / "no" / "such" / "r"))
    with pytest.raises((RootError, ConfigError), match="no/such"):
        stack.open()
    assert "kvtier-worker" not in {thread.name for thread in set(threading.enumerate()) - threads}
    stack.close()


def test_a_closed_engine_stack_answers_with_a_usage_error(tmp_path):
    engine = Engine(PLAIN, 16)
    stack, _ = engine_stack(engine, 8, fs(tmp_path / "r"))
    with pytest.raises(UsageError, match="not open"):
        stack.step()
    with stack:
        job = stack.job(LOAD, [whole(keys(2))])
        with pytest.raises(UsageError, match="opened once"):
            stack.open()
        request = stack.request(RequestId("r"))
    for called, name, *more in (
        (stack, "job", LOAD, [whole(keys(2))]),
        (stack, "submit", job),
        (stack, "cancel", job.job_id),
        (stack, "step"),
        (stack, "lookup", keys(1)),
        (stack, "locate", keys(1)),
        (stack, "request", RequestId("r"), keys(1)),
        (request, "extend", keys(1)),
        (request, "reserve", keys(1)),
        (request, "release"),
        (request, "touch", keys(1)),
        (request, "worth_loading", keys(1)),
        (request, "end"),
        (stack, "reset"),
        (stack, "take_events"),
        (stack.engine, "announce", keys(1)),
        (stack.engine, "storable", keys(1)),
    ):
        with pytest.raises(UsageError, match="closed"):
            getattr(called, name)(*more)
    with pytest.raises(UsageError, match="closed"):
        _ = request.reservation
    with pytest.raises(UsageError):
        _ = stack.has_pending_work
    assert stack.stats().tiers["cpu"].stored == 0
