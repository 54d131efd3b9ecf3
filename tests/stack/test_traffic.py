"""Transfers are counted with what happened: how long they took and waited, their bytes, their deadlines."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

from support_stack import PAGE, PLAIN, Engine, fs, keys, load, running, stack_file, store, until, whole

from kvtier.stack.dispatcher import IN_FLIGHT, QUEUED, Dispatcher, QueuedJob, TierQueue, Traffic, TransferStats
from kvtier.types.jobs import JobKind, TransferJob
from kvtier.types.keys import JobId

MIB = 1 << 20


def queue(traffic: Traffic, number: int, size: int, now: float) -> QueuedJob:
    queued = QueuedJob(TransferJob(JobId(number), JobKind.LOAD, ()), size, now)
    traffic.queued_bytes += queued.size
    return queued


def begin(traffic: Traffic, queued: QueuedJob, now: float) -> None:
    traffic.begin(queued.job.job_id, queued.size, now, queued.since)


def end(traffic: Traffic, queued: QueuedJob, now: float) -> None:
    traffic.end(queued.job.job_id, queued.size, now)


def figures_at(now: float, traffic: Traffic, waiting: Sequence[QueuedJob] = ()) -> TransferStats:
    of_tier = TierQueue(None, 0, deque(waiting), traffic={JobKind.LOAD: traffic})  # type: ignore[arg-type]
    return of_tier.figures(JobKind.LOAD, now)


def test_a_job_counts_from_its_queue_to_its_end() -> None:
    traffic = Traffic()
    first, second = queue(traffic, 1, 10 * MIB, 100.0), queue(traffic, 2, MIB, 100.5)
    figures = figures_at(101.0, traffic, [first, second])
    assert (figures.queued_bytes, figures.in_flight_bytes) == (11 * MIB, 0)
    assert figures.largest_queued_bytes == 10 * MIB
    assert figures_at(101.0, traffic).largest_queued_bytes == 0
    begin(traffic, first, 101.0)
    figures = figures_at(101.0, traffic)
    assert (figures.queued_bytes, figures.in_flight_bytes) == (MIB, 10 * MIB)
    assert (figures.waited_seconds.count, figures.waited_seconds.sum) == (1, 1.0)
    assert figures.took_seconds.count == 0
    begin(traffic, second, 102.5)
    end(traffic, first, 104.0)
    end(traffic, second, 105.0)
    figures = figures_at(105.0, traffic)
    assert (figures.queued_bytes, figures.in_flight_bytes) == (0, 0)
    assert (figures.waited_seconds.count, figures.waited_seconds.sum) == (2, 3.0)
    assert (figures.took_seconds.count, figures.took_seconds.sum) == (2, 5.5)
    assert traffic.seconds(200.0) == 4.0


def test_a_missed_deadline_counts_where_the_job_was() -> None:
    traffic = Traffic()
    first, second = queue(traffic, 1, MIB, 1.0), queue(traffic, 2, MIB, 1.0)
    begin(traffic, first, 1.0)
    traffic.on_late(JobId(1))
    traffic.on_late(JobId(7))  # of another kind
    traffic.unqueue(second, late=True)
    figures = figures_at(2.0, traffic)
    assert figures.deadlines_missed == {QUEUED: 1, IN_FLIGHT: 1}
    assert (figures.queued_bytes, figures.in_flight_bytes) == (0, MIB)
    assert figures.waited_seconds.count == 1


def test_a_job_that_hangs_is_the_oldest_in_flight_until_it_ends() -> None:
    traffic = Traffic()
    jobs = []
    for number, at in ((1, 10.0), (2, 12.0)):
        jobs.append(queue(traffic, number, MIB, at - 1.0))
        assert figures_at(at, traffic).oldest_seconds == (0.0 if number == 1 else 2.0)
        begin(traffic, jobs[-1], at)
    traffic.on_late(JobId(1))
    assert figures_at(50.0, traffic).oldest_seconds == 40.0
    end(traffic, jobs[0], 60.0)
    assert figures_at(60.0, traffic).oldest_seconds == 48.0
    end(traffic, jobs[1], 61.0)
    assert figures_at(70.0, traffic).oldest_seconds == 0.0


def test_a_transfer_without_a_queue_waits_for_nothing() -> None:
    traffic = Traffic()
    traffic.begin("a copy", MIB, 10.0)
    figures = figures_at(12.0, traffic)
    assert (figures.queued_bytes, figures.in_flight_bytes, figures.oldest_seconds) == (0, MIB, 2.0)
    traffic.end("a copy", MIB, 13.0)
    figures = figures_at(13.0, traffic)
    assert (figures.took_seconds.sum, figures.waited_seconds.count, figures.in_flight_bytes) == (3.0, 0, 0)


async def test_transfers_of_a_stack_are_all_counted(tmp_path: Path, monkeypatch) -> None:
    begun: dict[tuple[str, JobKind], int] = {}
    begin = Dispatcher._begin

    def counting(self, queue, queued, now) -> None:
        place = (queue.tier.options.label, queued.job.kind)
        begun[place] = begun.get(place, 0) + 1
        begin(self, queue, queued, now)

    monkeypatch.setattr(Dispatcher, "_begin", counting)
    engine = Engine(PLAIN, 64)
    first, second = whole(keys(8)), whole(keys(8, tag="other"), 8)
    async with running(stack_file(PLAIN, 8, fs(tmp_path / "root")), engine) as stack:
        for one in (first, second):
            assert (await store(stack, engine, one)).ok
            await stack.drain(30)
        assert (await load(stack, engine, first)).ok  # from disk
        await until(lambda: not any(one.running for one in stack._assembled.dispatcher.queues))
        tiers = stack.stats().tiers
    assert begun["fs", JobKind.LOAD] > 0
    for (name, kind), count in begun.items():
        found = tiers[name].transfers[kind]
        assert found.took_seconds.count == found.waited_seconds.count == count
        assert found.took_seconds.sum > 0
        assert (found.in_flight_bytes, found.queued_bytes) == (0, 0)
        assert found.deadlines_missed == {QUEUED: 0, IN_FLIGHT: 0}
    assert tiers["fs"].load_bytes == 8 * PAGE


async def test_lookups_and_misses_of_each_tier(tmp_path: Path) -> None:
    engine = Engine(PLAIN, 64)
    async with running(stack_file(PLAIN, 8, fs(tmp_path / "root")), engine) as stack:
        old, new = keys(8), keys(4, tag="new")
        assert (await store(stack, engine, whole(old))).ok
        await stack.drain(30)
        assert (await store(stack, engine, whole(new))).ok  # four of the old ones are on disk alone
        await stack.drain(30)
        await stack.lookup([*old, *new, *keys(3, tag="unknown")])
        await stack.lookup(new)
        tiers = stack.stats().tiers
    assert (tiers["cpu"].looked_up, tiers["cpu"].missed) == (15 + 4, 4 + 3)
    assert (tiers["fs"].looked_up, tiers["fs"].missed) == (7, 3)
