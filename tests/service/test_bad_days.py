"""A stack process that is frozen, slow to open or overrun, and stuck copies: right bytes or a miss, in time."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support_counts import fully
from support_served import served as served_here
from support_service import BLOCKS, NAMESPACE, TestEngine, block_keys, content, stack_process, stack_text, until

from kvtier.client import connection, engine, worker
from kvtier.engines.process_stack import ProcessStack, connect_engine_stack
from kvtier.errors import ResourceError
from kvtier.service import wire
from kvtier.service.channel import is_listening
from kvtier.service.pool import Pool
from kvtier.tier.contract import LookupResult
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.hints import HintRefusal, Retain
from kvtier.types.jobs import GPUGroup, JobKind, TransferJob
from kvtier.types.keys import GroupIndex, RequestId
from kvtier.types.requests import RequestInfo

pytestmark = pytest.mark.usefixtures("warm_starts")
SLOW_OPENING = """
import time
from kvtier_cpu.region import opening
resident = opening.make_resident
def make_resident(*given):
    time.sleep(3)
    return resident(*given)
opening.make_resident = make_resident
"""


@pytest.fixture
def served(folder: str, tmp_path: Path) -> Iterator[tuple[str, int]]:
    """(the socket, the number) of a stack process, which goes on at the end if it was frozen."""
    (tmp_path / "stack.yaml").write_text(stack_text(rows=256))
    with stack_process(tmp_path / "stack.yaml", f"{folder}/s") as process:
        yield f"{folder}/s", process.pid
        os.kill(process.pid, signal.SIGCONT)


def group(first: int, count: int) -> list[GPUGroup]:
    return [GPUGroup(GroupIndex(0), block_keys(count, first), GPURuns.whole(list(range(count))))]


def statuses(stack: ProcessStack, job: TransferJob) -> list[str]:
    """The status of each block of a job that was submitted, once it has ended."""
    ended = list[str]()

    def is_ended() -> bool:
        for result in stack.step():
            assert result.job_id == job.job_id
            ended.extend(outcome.status.value for outcome in result.outcomes[0])
        return bool(ended)

    until(is_ended, "the job has ended")
    return ended


class StuckCopies:
    """Holds the next copies of an engine's worker in their thread."""

    def __init__(self, stuck: TestEngine) -> None:
        copier = stuck.client._worker._gpu._open.engine  # type: ignore[attr-defined]
        self.begun, self.ended, self._goes_on = threading.Event(), threading.Event(), threading.Event()
        self._copy = copier._copy
        copier._copy, copier._compiled = self._stick, None

    def _stick(self, *given: object) -> None:
        self.begun.set()
        self._goes_on.wait(120)
        self._copy(*given)
        self.ended.set()

    def let_go(self) -> None:
        self._goes_on.set()
        assert self.ended.wait(30)


# -- frozen ------------------------------------------------------------------------------------------------------


def test_a_frozen_process_ends_lookups_and_stores(served: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "SILENCE_SECONDS", 0.3)
    cache = content(range(BLOCKS))
    with connect_engine_stack(served[0], NAMESPACE, [cache]) as stack:
        request = stack.request(RequestId("keeps rows lent"))
        until(lambda: stack.step() is not None and stack.engine.storable(())[1] >= 8, "rows are lent")
        os.kill(served[1], signal.SIGSTOP)
        job = stack.job(JobKind.STORE, group(0, 8), 2.0)
        stack.submit(job)
        assert statuses(stack, job) == ["dropped"] * 8
        assert stack.lookup(block_keys(8)) == [LookupResult.MISS] * 8
        os.kill(served[1], signal.SIGCONT)
        until(lambda: stack.step() is not None and stack._client is not None and stack._client.core.serves, "it serves")
        request.end()


def test_a_process_that_only_takes_long_is_waited_for(served: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "SILENCE_SECONDS", 0.6)
    with TestEngine(served[0]) as one:
        stuck = StuckCopies(one)
        one.step_until(lambda: len(one.client.core._lent) >= 4)
        store = one.begin(JobKind.STORE, range(4))
        one.step()
        assert stuck.begun.wait(30)
        end = time.monotonic() + 4.5
        while time.monotonic() < end:
            one.step()
            one.client.wait(0.05)
        assert one.client.core.connected
        stuck.let_go()
        assert one.finish(store) == ["stored"] * 4


def test_what_a_frozen_process_is_asked_for_is_bounded(served: tuple[str, int]) -> None:
    with TestEngine(served[0]) as one:
        os.kill(served[1], signal.SIGSTOP)
        client, found = one.client, set[LookupResult]()
        for number in range(600):
            request = client.request(f"r{number}", block_keys(1000, number * 1000))
            client.turn()
            found.update(client.core.lookup(request, block_keys(1, number * 1000)))
            request.end()
        assert found == {LookupResult.RETRY, LookupResult.MISS}
        asked = [item for item in client.core.out if isinstance(item, wire.Ask)]
        assert len(asked) < 300
        os.kill(served[1], signal.SIGCONT)


def test_late_answers_are_kept_nowhere(served: tuple[str, int]) -> None:
    with connect_engine_stack(served[0], NAMESPACE, [content(range(BLOCKS))]) as stack:
        os.kill(served[1], signal.SIGSTOP)
        stack.stats()
        os.kill(served[1], signal.SIGCONT)
        assert stack.stats().tiers  # its answer comes behind the late one
        stack.step()
        assert stack._client is not None
        assert not stack._client.core.answers


def test_answers_to_lookups_are_forgotten_although_another_goes_on(
    served: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last lookup of each step is answered within the next one; an answer holds until the second step after it."""
    with connect_engine_stack(served[0], NAMESPACE, [content(range(BLOCKS))]) as stack:
        assert stack._client is not None
        monkeypatch.setattr(stack._client, "_may_wait", False)
        most = 0
        for number in range(100):
            stack.step()
            stack._client._may_wait = False
            stack.lookup(block_keys(32, 1000 + number * 32))
            stack.wait(1.0)  # for the answer to the lookup before
            most = max(most, len(stack._client._looks.states))
        assert most <= 32 * 20


# -- slow to open, overrun ---------------------------------------------------------------------------------------


def test_rows_may_take_longer_than_an_answer(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CONNECT_SECONDS", 1.0)
    (tmp_path / "stack.yaml").write_text(stack_text())
    with stack_process(tmp_path / "stack.yaml", f"{folder}/s", SLOW_OPENING), TestEngine(f"{folder}/s") as one:
        assert one.store(range(4)) == ["stored"] * 4


def test_an_engine_waits_behind_many_that_connect(served: tuple[str, int]) -> None:
    path, pid = served
    os.kill(pid, signal.SIGSTOP)
    others = []
    try:
        while True:
            others.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            others[-1].settimeout(0.1)
            others[-1].connect(path)
    except BlockingIOError:
        pass  # its queue is full
    assert is_listening(path)
    threading.Timer(1.0, os.kill, (pid, signal.SIGCONT)).start()
    with TestEngine(path) as one:
        assert one.store(range(4)) == ["stored"] * 4
    for each in others:
        each.close()


def test_a_worker_without_a_descriptor_for_a_moment_connects_again(folder: str, tmp_path: Path) -> None:
    (tmp_path / "stack.yaml").write_text(stack_text())
    path, limits = f"{folder}/s", resource.getrlimit(resource.RLIMIT_NOFILE)
    with stack_process(tmp_path / "stack.yaml", path) as process:
        one = TestEngine(path)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            process.kill()
            one.step_until(lambda: not one.client.core.connected, "the end is seen")
            time.sleep(1.0)  # tries of the worker, which fail
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        process.communicate()
    with stack_process(tmp_path / "stack.yaml", path), one:
        one.step_until(lambda: one.client.core.serves, "it is served again")
        assert one.store(range(4)) == ["stored"] * 4


# -- copies that are in flight -----------------------------------------------------------------------------------


def test_a_store_gives_its_blocks_back_once_nothing_reads_them(folder: str, tmp_path: Path) -> None:
    """Its process ends while it is copied. What the blocks hold afterwards is stored nowhere."""
    (tmp_path / "stack.yaml").write_text(stack_text(root=tmp_path / "root", close_timeout_seconds=3))
    path = f"{folder}/s"
    with stack_process(tmp_path / "stack.yaml", path) as process:
        with TestEngine(path) as one:
            one.step_until(lambda: len(one.client.core._lent) >= 8)
            stuck = StuckCopies(one)
            one.cache[:8] = content(range(100, 108))
            store = one.begin(JobKind.STORE, range(100, 108))
            one.step()
            assert stuck.begun.wait(30)
            os.kill(process.pid, signal.SIGTERM)
            one.step_until(lambda: not one.client.core.connected, "the end is seen")
            one.step()
            assert store not in one._ended
            one.cache[:8] = content(range(8))
            stuck.let_go()
            assert one.finish(store) == ["dropped"] * 8
        process.wait(60)
    with stack_process(tmp_path / "stack.yaml", path), TestEngine(path) as other:
        assert other.load(range(100, 108)) == ["missing"] * 8


@fully
def test_rows_of_a_copy_that_is_stuck_stay_held_when_its_worker_closes(
    served: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "END_SECONDS", 0.1)
    with TestEngine(served[0], "other") as other:
        one = TestEngine(served[0], "one")
        until(lambda: other.step() or one.step() or len(one.client.core._lent) >= 4, "rows are lent")
        stuck = StuckCopies(one)
        one.cache[:4] = 222
        one.begin(JobKind.STORE, range(900, 904))
        one.step()
        assert stuck.begun.wait(30)
        one.client.close()
        for first in range(0, 512, 16):  # every row that can be had, and again
            assert other.store(range(first, first + 16)) == ["stored"] * 16
        stuck.let_go()
        found = [
            status for first in range(256, 512, 16) for status in other.load(range(first, first + 16), f"r{first}")
        ]
        assert found.count("hit") > 64  # `load` compares the bytes


def test_requests_of_one_id_end_one_by_one(served: tuple[str, int]) -> None:
    """The end of one takes no lease of the other."""
    cache = content(range(BLOCKS))
    with TestEngine(served[0], "other") as other, connect_engine_stack(served[0], NAMESPACE, [cache]) as stack:
        store = stack.job(JobKind.STORE, group(0, 8))
        stack.submit(store)
        assert statuses(stack, store) == ["stored"] * 8
        one, two = stack.request(RequestId("x")), stack.request(RequestId("x"))
        for request, keys in ((one, block_keys(4, 0)), (two, block_keys(4, 4))):
            reservation = request.reserve(keys)
            until(lambda found=reservation: stack.step() is not None and found.served, "it is reserved")  # type: ignore[misc]
            assert all(reservation.hits())
        one.end()
        stack.step()
        for first in range(1000, 1512, 16):
            other.store(range(first, first + 16))
        cache[:4] = 0
        load = stack.job(JobKind.LOAD, group(4, 4))
        stack.submit(load, two)
        assert statuses(stack, load) == ["loaded"] * 4
        assert torch.equal(cache[:4], content(range(4, 8)))
        two.end()


LONG, NO_UTF8 = "t" * 70_000, "\ud800"


@pytest.mark.parametrize(
    "text", ["t" * 600, LONG, NO_UTF8, "\U0001f600" * 1024], ids=["600", "70000", "surrogate", "wide"]
)
def test_a_text_of_a_client_ends_no_connection(folder: str, tmp_path: Path, text: str) -> None:
    """Session and tenant come from HTTP requests, whose texts have no bound."""
    (tmp_path / "stack.yaml").write_text(stack_text(64, curves="true"))
    with (
        stack_process(tmp_path / "stack.yaml", f"{folder}/s"),
        connect_engine_stack(f"{folder}/s", NAMESPACE, [content(range(BLOCKS))]) as stack,
    ):
        until(lambda: stack.step() is not None and stack.engine.follows_requests, "it has joined")
        assert stack._client is not None
        life = stack._client.life
        request = stack.request(RequestId(text), block_keys(1), info=RequestInfo(text, text, 1 - (1 << 53)))
        assert not stack.hint(Retain(block_keys(1), 10.0, text)).refused.get(HintRefusal.STOPPED)
        stack._client.core.request("of an adapter", info=RequestInfo(priority=1 << 70)).extend(block_keys(1))
        stack.lookup(block_keys(4))
        request.end()
        assert stack.locate(block_keys(4)) == [None] * 4
        assert stack._client.life == life


def test_an_item_that_no_message_holds_ends_the_connection_and_no_step(served: tuple[str, int]) -> None:
    with connect_engine_stack(served[0], NAMESPACE, [content(range(BLOCKS))]) as stack:
        assert stack._client is not None
        for text in (LONG, NO_UTF8):
            life = stack._client.life
            stack._client.core.say(wire.HoldBack(text))
            until(lambda life=life: stack.step() is not None and stack._client.life != life, "another one")  # type: ignore[misc]
            until(lambda: stack.step() is not None and stack._client.core.serves, "it is served again")


@pytest.mark.parametrize("blocks", [([0, 1], [0, 0]), ([0, 0], [1, 2]), ([0], [1000])], ids=["block", "key", "outside"])
def test_a_load_that_the_tier_refuses_ends(
    served: tuple[str, int], blocks: tuple[list[int], list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    keys = [block_keys(2)[at] for at in blocks[0]]
    with connect_engine_stack(served[0], NAMESPACE, [content(range(BLOCKS))]) as stack:
        store = stack.job(JobKind.STORE, group(0, 2))
        stack.submit(store)
        assert statuses(stack, store) == ["stored"] * 2
        load = stack.job(JobKind.LOAD, [GPUGroup(GroupIndex(0), tuple(keys), GPURuns.whole(blocks[1]))])
        stack.submit(load)
        assert statuses(stack, load) == ["failed"] * len(keys)
        assert "copies between GPU blocks and rows raised" in caplog.text
        assert stack.close().unfinished_jobs == 0


@pytest.mark.parametrize("has_job", [False, True], ids=["idle", "with_a_job"])
def test_a_reset_ends_at_its_timeout(tmp_path: Path, has_job: bool) -> None:
    goes_on = threading.Event()

    def take_long(pool: Pool) -> None:
        begin = pool._begin_reset

        async def later(durable: asyncio.Future[None]) -> None:
            await durable
            await asyncio.to_thread(goes_on.wait, 60.0)

        pool._begin_reset = lambda: asyncio.ensure_future(later(begin()))  # type: ignore[method-assign]

    with (
        served_here(tmp_path) as service,
        connect_engine_stack(service.path, NAMESPACE, [content(range(BLOCKS))]) as stack,
    ):
        service.run(lambda: take_long(service.server.pool))
        if has_job:
            stack.submit(stack.job(JobKind.STORE, group(0, 2)))
        try:
            with pytest.raises(ResourceError, match="not made durable within"):
                stack.reset(0.5)
        finally:
            goes_on.set()
        until(lambda: stack.step() is not None and stack._client.core.serves, "the reset is durable")  # type: ignore[union-attr]
