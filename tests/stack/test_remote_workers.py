"""Workers in other processes copy exactly what they are told, and a worker that is gone is an outcome, never a hang."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support_gpu import MmapRows, context, job, make_worker, naive_copy, naive_whole_rows, runs_of, transfer
from support_gpu_worker import NUM_BLOCKS, TWO_WORKERS
from support_paths import SUPPORT

from faults.machine import warm
from kvtier.errors import ConfigError, KVTierError, ResourceError, UsageError
from kvtier.stack.workers import protocol
from kvtier.stack.workers.remote_worker import RemoteWorker, WorkerLinkOptions, serve_worker
from kvtier.tier.contract import LoadStore, Opened, TierContext
from kvtier.types.arrays import int_array
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import (
    LOADED,
    STORED,
    BlockOutcome,
    BlockStatus,
    DropReason,
    GPUGroup,
    JobKind,
    JobResult,
    TransferJob,
    dropped,
    failed,
)
from kvtier.types.keys import GPU, JobId

WORKER = SUPPORT / "support_gpu_worker.py"
NUM_ROWS = 12
SMALL = job(transfer(0, GPURuns.whole([3, 1, 4, 0], 4), [2]))


def linked(index: int = 0) -> tuple[RemoteWorker, socket.socket]:
    """A link and the far end of its connection."""
    near, far = socket.socketpair()
    return RemoteWorker(WorkerLinkOptions(open_timeout_seconds=20, close_timeout_seconds=5), near), far


class GatedStore(LoadStore):
    """A GPU tier whose jobs begin at once and end when the test says so."""

    medium = GPU
    Options: ClassVar = WorkerLinkOptions

    def __init__(self, refusal: Exception | None = None, expected: int = 1) -> None:
        self.gate, self.begun = asyncio.Event(), asyncio.Event()
        self.jobs: list[TransferJob] = []
        self.ended = 0
        self.refusal = refusal
        self.expected = expected

    async def open(self, context: TierContext) -> Opened:
        return Opened(1)

    async def load(self, work: TransferJob) -> JobResult:
        self.jobs.append(work)
        if len(self.jobs) == self.expected:
            self.begun.set()
        await self.gate.wait()
        self.ended += 1
        if self.refusal is not None:
            raise self.refusal
        return JobResult.uniform(work, LOADED)

    async def store(self, work: TransferJob) -> JobResult:
        return JobResult(work.job_id, ((STORED, dropped(DropReason.PARTIAL), failed(errno.ENOMEM)),), 77, 0.5)

    async def close(self) -> None:
        pass


@contextlib.asynccontextmanager
async def in_process(store: LoadStore) -> AsyncIterator[tuple[RemoteWorker, asyncio.Task[None]]]:
    """A link to a `serve_worker` in this very loop."""
    rows = MmapRows(TWO_WORKERS, NUM_ROWS)
    link, far = linked()
    serving = asyncio.create_task(serve_worker(far, store, context(TWO_WORKERS, [], rows), Opened(5, mode="gated")))
    await link.open(context(TWO_WORKERS, [], rows))
    try:
        yield link, serving
    finally:
        await link.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def runs_for(seed: int) -> tuple[TransferJob, TransferJob, TransferJob]:
    """Store blocks of two groups with head, tail and hole; bring them back to other GPU blocks; store those again."""
    rng = np.random.default_rng(seed)
    ids, other = rng.permutation(NUM_BLOCKS).tolist(), rng.permutation(NUM_BLOCKS).tolist()
    shapes = [(0, 2, 2), (1, 0, 4), (2, 0, 1), (2, 3, 1)], [(0, 0, 4), (1, 1, 3)]
    rows = rng.permutation(NUM_ROWS).tolist()

    def named(pool: Sequence[int], shape: Sequence[tuple[int, int, int]]) -> GPURuns:
        taken, pieces = iter(pool), []
        for block, first, count in shape:
            pieces.append((block, first, [next(taken) for _ in range(count)]))
        return runs_of(pieces)

    first = job(transfer(0, named(ids, shapes[0]), rows[:3], 7), transfer(1, named(ids, shapes[1]), rows[3:5], 8))
    back = job(transfer(0, named(other, shapes[0]), rows[:3]), transfer(1, named(other, shapes[1]), rows[3:5]))
    again = job(transfer(0, named(other, shapes[0]), rows[5:8], 9), transfer(1, named(other, shapes[1]), rows[8:10], 9))
    return first, back, again


@contextlib.contextmanager
def worker_processes(file: int) -> AsyncIterator[list[tuple[RemoteWorker, subprocess.Popen]]]:
    started = []
    for index in range(TWO_WORKERS.world_size):
        link, far = linked(index)
        command = [sys.executable, str(WORKER), str(far.fileno()), str(file), str(index), str(NUM_ROWS)]
        started.append((link, warm.Popen(command, pass_fds=(far.fileno(), file))))
        far.close()
    try:
        yield started
    finally:
        for _, process in started:
            process.kill()
            process.wait()


async def test_two_worker_processes_move_exactly_their_slices_and_one_may_die(tmp_path: Path) -> None:
    with (tmp_path / "rows").open("w+b") as file:
        size = MmapRows(TWO_WORKERS, NUM_ROWS)
        file.truncate(len(size._mapping))
        size.close()
        rows = MmapRows(TWO_WORKERS, NUM_ROWS, file.fileno())
        rows.view[:] = np.random.default_rng(99).integers(0, 256, rows.view.shape, dtype=np.uint8)
        with worker_processes(file.fileno()) as workers:
            links = [link for link, _ in workers]
            opened = await asyncio.gather(
                *(link.open(context(TWO_WORKERS, [], rows, i)) for i, link in enumerate(links))
            )
            assert [one.capacity_bytes for one in opened] == [NUM_BLOCKS * (1000 + 333 + 4096)] * 2
            await check_bytes(links, rows)
            workers[1][1].kill()
            lost = await links[1].load(runs_for(3)[0])
            assert {outcome.status for group in lost.outcomes for outcome in group} == {BlockStatus.FAILED}
            assert {outcome.errno for group in lost.outcomes for outcome in group} <= {errno.ECONNRESET, errno.EPIPE}
            assert (await links[0].load(runs_for(3)[0])).ok
            await asyncio.gather(*(link.close() for link in links))
            assert workers[0][1].wait(timeout=30) == 0
        rows.close()


async def check_bytes(links: Sequence[RemoteWorker], rows: MmapRows) -> None:
    """Three jobs on both workers at once, against the same jobs done page by page here."""
    want = rows.view.copy()
    twins = [make_worker(TWO_WORKERS, NUM_BLOCKS, "strided", np.random.default_rng(i)) for i in range(2)]
    first, back, again = runs_for(1)
    for work, to_gpu in ((first, False), (back, True), (again, False)):
        for index, twin in enumerate(twins):
            naive_copy(TWO_WORKERS, work, index, twin.tensors, want, to_gpu=to_gpu)
        results = await asyncio.gather(*(link.store(work) if to_gpu else link.load(work) for link in links))
        assert all(result.ok and result.job_id == work.job_id and result.bytes_moved > 0 for result in results)
    assert (rows.view == want).all()
    for work, generations in ((first, (7, 8)), (again, (9, 9))):
        for one, generation in zip(work.groups, generations, strict=True):
            whole = naive_whole_rows(TWO_WORKERS, job(one))
            stamped = rows.stamped(one.rows, int_array([generation] * len(one.rows)))
            assert [bool(found) for found in stamped] == [int(row) in whole for row in one.rows]


async def test_a_job_arrives_as_it_was_sent_and_its_result_comes_back_whole() -> None:
    store = GatedStore()
    store.gate.set()
    sent = TransferJob(JobId(41), JobKind.LOAD, SMALL.groups, deadline=12.5, epoch=3)
    async with in_process(store) as (link, _):
        assert (await link.load(sent)).ok
        three = job(transfer(0, GPURuns.whole(range(12), 4), [1, 2, 3]), job_id=9)
        result = await link.store(three)
    got = store.jobs[0]
    assert (got.job_id, got.kind, got.deadline, got.epoch) == (41, JobKind.LOAD, 12.5, 3)
    for mine, theirs in zip(sent.groups, got.groups, strict=True):
        assert mine.group == theirs.group
        assert len(mine.keys) == len(theirs.keys)
        assert mine.rows.tolist() == theirs.rows.tolist()
        assert mine.generations.tolist() == theirs.generations.tolist()
        assert [part.tolist() for part in mine.runs.pages()] == [part.tolist() for part in theirs.runs.pages()]
    assert result.outcomes == ((STORED, dropped(DropReason.PARTIAL), failed(errno.ENOMEM)),)
    assert (result.job_id, result.bytes_moved, result.seconds) == (9, 77, 0.5)


async def test_jobs_run_at_once_on_a_worker() -> None:
    store = GatedStore(expected=5)
    async with in_process(store) as (link, _):
        calls = [asyncio.create_task(link.load(SMALL)) for _ in range(5)]
        await store.begun.wait()
        assert not any(call.done() for call in calls)
        store.gate.set()
        assert all(result.ok for result in await asyncio.gather(*calls))


async def test_a_cancelled_call_ends_only_when_the_worker_has_answered() -> None:
    store = GatedStore()
    async with in_process(store) as (link, _):
        call = asyncio.create_task(link.load(SMALL))
        await store.begun.wait()
        call.cancel()
        await turns()
        call.cancel()
        await turns()
        assert not call.done()
        store.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert store.ended == 1


async def test_what_the_worker_refuses_is_a_usage_error_here_and_a_defect_there_is_an_outcome() -> None:
    async with in_process(store := GatedStore(UsageError("GPU block 99 is outside 0..23"))) as (link, _):
        store.gate.set()
        with pytest.raises(UsageError, match="GPU block 99"):
            await link.load(SMALL)
        store.refusal = ZeroDivisionError()
        assert (await link.load(SMALL)).outcomes == ((failed(errno.EIO),),)


async def test_jobs_under_way_fail_when_the_worker_dies_and_later_ones_at_once() -> None:
    rows = MmapRows(TWO_WORKERS, NUM_ROWS)
    link, far = linked()
    store = GatedStore(expected=3)
    serving = asyncio.create_task(serve_worker(far, store, context(TWO_WORKERS, [], rows), Opened(5)))
    await link.open(context(TWO_WORKERS, [], rows))
    calls = [asyncio.create_task(link.load(SMALL)) for _ in range(3)]
    await store.begun.wait()
    far.shutdown(socket.SHUT_RDWR)
    for result in await asyncio.gather(*calls):
        assert result.outcomes == ((failed(errno.ECONNRESET),),)
    assert (await link.load(SMALL)).outcomes == ((failed(errno.EPIPE),),)
    await link.close()
    store.gate.set()
    await serving


async def test_a_worker_that_loses_its_coordinator_ends_only_after_its_copies() -> None:
    store = GatedStore()
    async with in_process(store) as (link, serving):
        call = asyncio.create_task(link.load(SMALL))
        await store.begun.wait()
        link._writer.transport.abort()
        assert (await call).outcomes == ((failed(errno.ECONNRESET),),)
        serving.cancel()
        await turns()
        assert not serving.done()
        store.gate.set()
        await asyncio.wait((serving,))
        assert store.ended == 1


async def test_closing_waits_for_jobs_under_way_and_a_closed_link_takes_none() -> None:
    store = GatedStore()
    async with in_process(store) as (link, serving):
        call = asyncio.create_task(link.load(SMALL))
        await store.begun.wait()
        closing = asyncio.create_task(link.close())
        await turns()
        assert not closing.done()
        store.gate.set()
        await closing
        assert (await call).ok
        await serving
        with pytest.raises(UsageError):
            await link.load(SMALL)
        await link.close()


@pytest.mark.parametrize("other", ["worker", "rows"])
async def test_a_worker_of_another_place_or_region_is_refused(other: str) -> None:
    rows, fewer = MmapRows(TWO_WORKERS, NUM_ROWS), MmapRows(TWO_WORKERS, NUM_ROWS - 1)
    mine = context(TWO_WORKERS, [], rows)
    theirs = context(TWO_WORKERS, [], rows, 1) if other == "worker" else context(TWO_WORKERS, [], fewer)
    link, far = linked()
    serving = asyncio.create_task(serve_worker(far, GatedStore(), theirs, Opened(5)))
    with pytest.raises(ConfigError, match=other):
        await link.open(mine)
    await serving
    await link.close()


async def test_opening_towards_a_dead_or_silent_worker_is_a_typed_error() -> None:
    mine = context(TWO_WORKERS, [], MmapRows(TWO_WORKERS, NUM_ROWS))
    link, far = linked()
    far.close()
    with pytest.raises(ResourceError):
        await link.open(mine)
    await link.close()
    near, far = socket.socketpair()
    link = RemoteWorker(WorkerLinkOptions(open_timeout_seconds=0.01), near)
    with pytest.raises(ResourceError, match="TimeoutError"):
        await link.open(mine)
    far.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        protocol._HEADER.pack(protocol.MAGIC, protocol.VERSION, 2**32 - 1),
        protocol._HEADER.pack(protocol.MAGIC, protocol.VERSION + 1, 0),
        protocol._HEADER.pack(protocol.MAGIC, protocol.VERSION, 5) + b"short",
        protocol.encode(protocol.WorkerAnswer.of(1, JobResult(JobId(1), ()))),
        protocol.encode(protocol.WorkerWelcome(capacity_bytes=1, mode="again")),
    ],
    ids=["foreign", "too_long", "other_version", "cut_short", "other_shape", "other_type"],
)
async def test_nonsense_from_a_worker_fails_its_jobs_and_late_answers_are_ignored(answer: bytes) -> None:
    rows = MmapRows(TWO_WORKERS, NUM_ROWS)
    link, far = linked()
    reader, writer = await asyncio.open_connection(sock=far)
    writer.write(protocol.encode(protocol.WorkerWelcome(capacity_bytes=1, mode="by hand")))
    await link.open(context(TWO_WORKERS, [], rows))
    call = asyncio.create_task(link.load(SMALL))
    assert (await protocol.read_message(reader, protocol.WorkerHello)).num_rows == NUM_ROWS
    assert (await protocol.read_message(reader, protocol.Call)).method is JobKind.LOAD
    writer.write(protocol.encode(protocol.WorkerAnswer.of(1234, JobResult.uniform(SMALL, LOADED))))
    await turns()
    assert (link.late_answers, call.done()) == (1, False)
    writer.write(answer)
    assert (await call).outcomes == ((failed(errno.EPROTO),),)
    await link.close()
    writer.close()
    await writer.wait_closed()


async def test_a_worker_refuses_nonsense_from_its_coordinator() -> None:
    near, far = socket.socketpair()
    near.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(UsageError):
        await serve_worker(far, GatedStore(), context(TWO_WORKERS, [], MmapRows(TWO_WORKERS, NUM_ROWS)), Opened(5))
    near.close()


statuses = st.builds(
    BlockOutcome, st.sampled_from(BlockStatus), st.sampled_from([None, *DropReason]), st.integers(0, 200)
)


BODY_AT = protocol._HEADER.size


@given(st.lists(st.lists(statuses, max_size=5), max_size=4), st.integers(0, 2**60), st.floats(0, 1e9))
def test_results_survive_the_wire(outcomes: list[list[BlockOutcome]], moved: int, seconds: float) -> None:
    result = JobResult(JobId(-3), tuple(tuple(group) for group in outcomes), moved, seconds)
    groups = tuple(GPUGroup(0, (b"",) * len(group), GPURuns.whole([])) for group in outcomes)
    answer = protocol.decode(protocol.WorkerAnswer, protocol.encode(protocol.WorkerAnswer.of(7, result))[BODY_AT:])
    back = answer.result(TransferJob(JobId(-3), JobKind.LOAD, groups))
    assert (answer.sequence, back.job_id, back.outcomes) == (7, -3, result.outcomes)
    assert (back.bytes_moved, back.seconds) == (moved, seconds)


@given(st.binary(max_size=200), st.integers(0, 400), st.booleans())
def test_a_mangled_frame_is_refused_or_decodes_but_never_crashes(noise: bytes, at: int, cut: bool) -> None:
    call = protocol.encode(protocol.Call.of(1, JobKind.LOAD, SMALL))[BODY_AT:]
    answer = protocol.encode(protocol.WorkerAnswer.of(1, JobResult.uniform(SMALL, LOADED)))[BODY_AT:]

    def mangled(body: bytes) -> bytes:
        return body[:at] + noise + (b"" if cut else body[at + len(noise) :])

    with contextlib.suppress(KVTierError):
        protocol.decode(protocol.Call, mangled(call)).job()
    with contextlib.suppress(KVTierError):
        protocol.decode(protocol.WorkerAnswer, mangled(answer)).result(SMALL)


@given(st.lists(st.binary(max_size=40), min_size=6, max_size=6), st.integers())
def test_arrays_that_contradict_each_other_are_refused(arrays: list[bytes], group: int) -> None:
    call = protocol.Call.of(1, JobKind.LOAD, SMALL).model_copy(update={"groups": [(group, *arrays)]})
    with contextlib.suppress(KVTierError):
        protocol.decode(protocol.Call, protocol.encode(call)[BODY_AT:]).job()


@pytest.mark.parametrize("length", [0, -1, 2**60])
def test_an_answer_for_more_or_fewer_blocks_is_refused_before_its_outcomes_are_made(length: int) -> None:
    answer = protocol.WorkerAnswer.of(1, JobResult.uniform(SMALL, LOADED))
    runs = [[(length, LOADED), (1 - length, LOADED)]]
    body = protocol.encode(answer.model_copy(update={"outcomes": runs}))[BODY_AT:]
    with pytest.raises(UsageError):
        protocol.decode(protocol.WorkerAnswer, body).result(SMALL)


def test_a_job_over_the_bound_is_refused_before_it_is_sent() -> None:
    pages = np.zeros(protocol.MESSAGE_BYTES_MAX // 8, dtype=np.int64)
    runs = GPURuns(int_array([0]), int_array([0]), int_array([len(pages)]), pages)
    with pytest.raises(UsageError, match="at most"):
        protocol.encode(protocol.Call.of(1, JobKind.LOAD, job(transfer(0, runs, [0]))))
