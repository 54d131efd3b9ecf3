"""Engines whose stack process ends under them: misses, then hits again, from rows or from the disk."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
import torch
from support_counts import full_alone, fully
from support_served import memory_for_rows, row_files, served
from support_service import (
    BLOCKS,
    NAMESPACE,
    PAGE,
    TestEngine,
    block_keys,
    content,
    end,
    kill_listener,
    peer_pid,
    stack_process,
    stack_text,
    until,
)

from kvtier.client import private as private_stack
from kvtier.client import worker as worker_module
from kvtier.client.connection import Identity
from kvtier.client.engine import SchedulerClient
from kvtier.client.private import HOUR_SECONDS, PrivateStack, Restarts
from kvtier.client.worker import WorkerClient
from kvtier.engines.process_stack import ProcessStack, open_engine_stack
from kvtier.errors import ResourceError
from kvtier.service import server as server_module
from kvtier.service.channel import is_listening
from kvtier.tier.contract import LookupResult
from kvtier.tier.registry import discover
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import BlockOutcome, BlockStatus, GPUGroup, JobKind, JobResult, TransferJob
from kvtier.types.keys import GroupIndex

pytestmark = pytest.mark.usefixtures("warm_starts")
LINGER_SECONDS = 1.0
STORED = range(24)


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def private(folder: str, tmp_path: Path) -> PrivateStack:
    """A private process, whose disk has the blocks `STORED` and whose rows have none."""
    found = PrivateStack(stack_text(root=tmp_path / "root"), folder, LINGER_SECONDS)
    found.start()
    with TestEngine(found) as engine:
        assert engine.store(STORED) == ["stored"] * len(STORED)
        pid = peer_pid(found.path)
    until(lambda: not Path(f"/proc/{pid}").exists(), "it has written back and ended")
    found.start()
    return found


def step_until_served(engine: TestEngine, life: str = "") -> int:
    """The steps until the engine is served in another session than now, or than one before."""
    life, steps = life or engine.client.life, 0
    end = time.monotonic() + 60.0
    while engine.client.life == life or not engine.client.core.serves:
        assert time.monotonic() < end, "it is not served again"
        engine.step()
        engine.client.wait(0.02)
        steps += 1
    return steps


def test_hits_come_from_the_disk_again_after_the_process_was_killed(private: PrivateStack) -> None:
    with TestEngine(private) as engine:
        clock = Clock()
        private.restarts = Restarts(clock)
        for number in range(4):
            assert engine.load(STORED, f"a{number}") == ["hit"] * len(STORED)
            engine.begin(JobKind.STORE, range(200, 208))
            life = engine.client.life
            kill_listener(private.path)
            engine.step()
            assert set(engine.look(STORED, f"m{number}")) == {LookupResult.MISS}
            assert engine.load(STORED, f"n{number}") == ["missing"] * len(STORED)
            step_until_served(engine, life)
            assert engine.load(STORED, f"b{number}") == ["hit"] * len(STORED)
            engine.step_until(lambda: not engine.client.has_pending_work, "no job is left")
            assert engine.store(range(300, 308)) == ["stored"] * 8
            clock.now += HOUR_SECONDS
        assert private.restarts.count == 4


def test_a_kill_amid_loads_and_stores_gives_right_bytes_or_failures(private: PrivateStack, seed: int) -> None:
    rng = Random(seed)
    with TestEngine(private) as engine:
        for number in range(6):
            private.restarts = Restarts()
            numbers = range(first := rng.randrange(12), first + rng.randrange(1, 13))
            request = engine.reserve(numbers, f"r{number}")
            engine.cache[: len(numbers)] = 255
            engine.begin(JobKind.STORE, range(400, 400 + rng.randrange(1, 9)))
            engine.step()
            load, life = engine.begin(JobKind.LOAD, numbers, request), engine.client.life
            before = rng.random() < 0.5
            if before:
                kill_listener(private.path)
            engine.step()
            if not before:
                kill_listener(private.path)
            found, right = engine.finish(load), content(numbers)
            for at, status in enumerate(found):
                assert status in ("loaded", "missing", "failed")
                assert status != "loaded" or bytes(engine.cache[at].numpy()) == bytes(right[at].numpy())
            step_until_served(engine, life)
            assert engine.load(STORED, f"s{number}") == ["hit"] * len(STORED)


@fully
def test_the_fourth_restart_in_an_hour_waits_for_the_next_one(private: PrivateStack) -> None:
    clock = Clock()
    private.restarts = Restarts(clock)
    with TestEngine(private) as engine:
        for _ in range(3):
            kill_listener(private.path)
            step_until_served(engine)
        kill_listener(private.path)
        engine.step_until(lambda: private.restarts.next_seconds, "it may not be started yet")
        steps(engine, 1.5)
        assert not is_listening(private.path)
        assert (private.restarts.count, private.restarts.next_seconds) == (3, HOUR_SECONDS)
        assert set(engine.look(STORED)) == {LookupResult.MISS}
        clock.now += HOUR_SECONDS
        step_until_served(engine)
        assert private.restarts.count == 4
        assert engine.load(STORED) == ["hit"] * len(STORED)


@fully
def test_a_process_that_cannot_be_started_any_more_costs_hits_and_nothing_else(
    private: PrivateStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with TestEngine(private) as engine:
        monkeypatch.setattr(private_stack, "subprocess", subprocess)  # the usual start, which needs a program
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        with caplog.at_level(logging.WARNING, "kvtier"):
            kill_listener(private.path)
            engine.step_until(lambda: private.restarts.next_seconds, "three tries were in vain")
            for number in range(5):
                assert engine.load(STORED, f"r{number}") == ["missing"] * len(STORED)
        lines = [record.getMessage() for record in caplog.records]
        assert [line.split(":")[0] for line in lines][:2] == [
            "the connection to the stack process has ended, every lookup is a miss",
            "no stack process serves this engine, every lookup is a miss",
        ]
        assert "cannot be started: No such file" in lines[1]
        assert len(lines) <= 3, lines


@pytest.mark.parametrize("who", ["scheduler", pytest.param("worker", marks=full_alone())])
def test_a_broken_connection_to_a_process_that_lives_is_made_again(who: str, private: PrivateStack) -> None:
    with TestEngine(private) as engine:
        assert engine.store(range(50, 58)) == ["stored"] * 8
        pid = peer_pid(private.path)
        link = engine.client._worker._connection._link
        channel = engine.client._channel if who == "scheduler" else link._channel
        channel._sock.shutdown(socket.SHUT_RDWR)
        step_until_served(engine)
        assert (peer_pid(private.path), private.restarts.count) == (pid, 0)
        assert engine.load(range(50, 58)) == ["hit"] * 8
        assert engine.load(STORED, "s") == ["hit"] * len(STORED)


@fully
def test_a_shared_process_that_is_started_again_serves_its_engines_again(tmp_path: Path, folder: str) -> None:
    stack, path = tmp_path / "stack.yaml", f"{folder}/shared.sock"
    stack.write_text(stack_text(root=tmp_path / "root"))
    with stack_process(stack, path) as process:
        one, two = TestEngine(path), TestEngine(path)
        assert one.store(STORED) == ["stored"] * len(STORED)
        end(process)
    with stack_process(stack, path):
        for engine in (one, two):
            step_until_served(engine)
            assert engine.load(STORED) == ["hit"] * len(STORED)
            engine.client.close()


def test_memory_for_one_region_is_enough_to_be_served_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker maps the rows of the process before until its memory is wanted."""
    with served(tmp_path) as found:
        engine = TestEngine(found.path)
        assert engine.store(range(8)) == ["stored"] * 8
        memory_for_rows(monkeypatch, sum(row_files().values()) * 3 // 2)
    with engine, served(tmp_path):
        step_until_served(engine)
        assert engine.look(range(8)) == [LookupResult.MISS] * 8
        assert engine.store(range(8)) == ["stored"] * 8
        assert engine.load(range(8)) == ["hit"] * 8


def test_an_idle_engine_lets_rows_go_for_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no step, so its scheduler cannot say that no load of them comes."""
    with served(tmp_path) as found:
        engine, idle = TestEngine(found.path), TestEngine(found.path)
        assert engine.store(range(8)) == ["stored"] * 8
        memory_for_rows(monkeypatch, sum(row_files().values()) * 3 // 2)
    monkeypatch.setattr(worker_module, "UNUSED_SECONDS", 0.5)
    with engine, idle, served(tmp_path):
        step_until_served(engine)
        assert engine.store(range(8)) == ["stored"] * 8
        assert engine.load(range(8)) == ["hit"] * 8
        step_until_served(idle)
        assert idle.load(range(8)) == ["hit"] * 8


def test_a_disk_that_opens_later_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one whose lock a check of the root has for a moment."""
    monkeypatch.setattr(server_module, "REOPEN_SECONDS", 0.5)
    root = tmp_path / "root"
    text = stack_text(root=root)
    with served(tmp_path, text) as found:
        engine = TestEngine(found.path)
        assert engine.store(range(8)) == ["stored"] * 8
    with engine, served(tmp_path, text):
        with (root / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            engine.step_until(lambda: engine.client.core.fault, "the disk does not open")
            assert "in use" in engine.client.core.fault
            assert engine.load(range(8)) == ["missing"] * 8
        engine.step_until(lambda: engine.client.core.serves, "it is served again")
        assert engine.load(range(8)) == ["hit"] * 8
        with TestEngine(found.path) as other:
            assert other.load(range(8)) == ["hit"] * 8


def test_a_reset_without_a_process_holds_for_the_next_one(private: PrivateStack) -> None:
    with TestEngine(private) as engine:
        assert engine.load(STORED) == ["hit"] * len(STORED)
        kill_listener(private.path)
        engine.step()
        engine.client.core.reset()
        step_until_served(engine)
        assert engine.load(STORED, "s") == ["missing"] * len(STORED)
        assert engine.look(STORED) == [LookupResult.MISS] * len(STORED)


def test_weights_that_were_loaded_without_a_process_are_known_to_the_next_one(private: PrivateStack) -> None:
    with TestEngine(private) as engine:
        kill_listener(private.path)
        engine.step()
        connection = engine.client._worker._connection
        engine.client._worker._thread.run(connection.on_load, 10.0)
        engine.step_until(lambda: engine.client.core.joined, "it has joined")
        engine.step_until(lambda: engine.client.core.loaded_weights, "it is known")  # later where the next one was fast
        assert set(engine.look(STORED)) == {LookupResult.MISS}


@fully
def test_an_engine_that_ends_while_it_has_no_process_leaves_no_thread_behind(
    private: PrivateStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TestEngine(private) as engine:
        monkeypatch.setattr(private_stack, "subprocess", subprocess)  # the usual start, which needs a program
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        kill_listener(private.path)
        engine.step()
        threads = engine.client._reconnection._thread._threads
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive()


class HeldCopies:
    """A worker's copies of one kind, which go on when the test lets them."""

    def __init__(self, engine: TestEngine, kind: JobKind) -> None:
        self._worker = engine.client._worker
        self._carry_out = self._worker._carry_out
        self._kind = kind
        self._goes_on = threading.Event()
        self._worker._carry_out = self._hold  # type: ignore[method-assign]
        self.begun = 0

    async def _hold(self, job: TransferJob) -> JobResult:
        if job.kind is self._kind:
            self.begun += 1
            while not self._goes_on.is_set():  # noqa: ASYNC110 - it is set by another thread
                await asyncio.sleep(0.01)
        return await self._carry_out(job)

    def let_go(self) -> None:
        """Let them go on."""
        self._goes_on.set()


def steps(engine: TestEngine, seconds: float) -> None:
    """Step for a time in which nothing may happen."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        engine.step()
        engine.client.wait(0.05)


def test_a_load_in_flight_ends_well_before_the_next_connection_is_made(private: PrivateStack) -> None:
    with TestEngine(private) as engine:
        life, request = engine.client.life, engine.reserve(STORED, "r")
        held = HeldCopies(engine, JobKind.LOAD)
        engine.cache[: len(STORED)] = 255
        load = engine.begin(JobKind.LOAD, STORED, request)
        engine.step()
        until(lambda: held.begun, "the copy has begun")
        kill_listener(private.path)
        engine.step_until(lambda: is_listening(private.path), "the next process listens")
        steps(engine, 1.0)
        assert (engine.client.life, engine.client.core.connected) == (life, False)
        held.let_go()
        assert engine.finish(load) == ["loaded"] * len(STORED)
        assert bytes(engine.cache[: len(STORED)].numpy()) == bytes(content(STORED).numpy())
        step_until_served(engine)
        assert engine.load(STORED) == ["hit"] * len(STORED)


@pytest.mark.parametrize("how", ["killed", pytest.param("cut", marks=full_alone())])
def test_a_store_in_flight_keeps_the_rows_of_its_session(how: str, private: PrivateStack) -> None:
    with TestEngine(private) as engine:
        life = engine.client.life
        engine.step_until(lambda: len(engine.client.core._lent) >= 8)
        held = HeldCopies(engine, JobKind.STORE)
        store = engine.begin(JobKind.STORE, range(100, 108))
        engine.step()
        until(lambda: held.begun, "the copy has begun")
        rows = engine.client._worker._connection._link
        if how == "killed":
            kill_listener(private.path)
        else:
            engine.client._channel._sock.shutdown(socket.SHUT_RDWR)
        engine.step_until(lambda: engine.client.life != life, "the scheduler has connected again")
        steps(engine, 1.0)
        assert not engine.client.core.joined, "it joins before its worker uses the new rows"
        assert engine.client._worker._connection._link is rows
        assert store not in engine._ended, "its blocks are the engine's while they are read"
        held.let_go()
        assert engine.finish(store) == ["dropped"] * 8
        engine.step_until(lambda: engine.client.core.serves, "it is served again")
        assert engine.load(STORED) == ["hit"] * len(STORED)
        assert engine.load(range(100, 108), "s") == ["missing"] * 8


def test_a_worker_copies_for_no_other_session(private: PrivateStack) -> None:
    with TestEngine(private) as engine:
        engine.step_until(lambda: engine.client.core._lent)
        held = HeldCopies(engine, JobKind.STORE)
        job = engine.client.job(JobKind.STORE, [GPUGroup(GroupIndex(0), block_keys(1), GPURuns.whole([0]))])
        part = engine.client.core.begin_store(job)
        assert part is not None
        reports: list[Sequence[BlockOutcome]] = []
        engine.client._worker.report = lambda job_id, outcomes: reports.append(outcomes)
        engine.client._worker.begin(part, "another.1")
        until(lambda: reports, "it has failed")
        assert [(outcome.status, outcome.errno) for outcome in reports[0]] == [(BlockStatus.FAILED, errno.ESTALE)]
        assert held.begun == 0


def test_a_scheduler_that_requires_no_process_is_served_once_there_is_one(folder: str) -> None:
    private = PrivateStack(stack_text(), folder, LINGER_SECONDS)
    identity = Identity(private.path, NAMESPACE, "", "token", private)
    with pytest.raises(ResourceError, match="no stack process answers"):
        SchedulerClient(identity)
    client = SchedulerClient(identity, required=False)
    request = client.request("r", block_keys(1))
    assert client.lookup(request, block_keys(1)) == [LookupResult.MISS]
    until(lambda: client.turn() is None and is_listening(private.path), "it was started")
    gpu = discover().get("gpu")
    worker = WorkerClient(identity, [torch.zeros((BLOCKS, PAGE), dtype=torch.uint8)], gpu(gpu.Options(type="gpu")))
    until(lambda: client.turn() is None and client.core.serves, "it is served")
    worker.close()
    client.close()


def test_a_programs_stack_is_served_again(tmp_path: Path, folder: str) -> None:
    (tmp_path / "stack.yaml").write_text(stack_text(root=tmp_path / "root", runtime_dir=folder))
    cache = content(range(BLOCKS))
    with open_engine_stack(tmp_path / "stack.yaml", NAMESPACE.layout, [cache], model="test") as stack:
        assert isinstance(stack, ProcessStack)

        def run(kind: JobKind) -> list[str]:
            job = stack.job(kind, [GPUGroup(GroupIndex(0), block_keys(8), GPURuns.whole(list(range(8))))])
            stack.submit(job)
            end = time.monotonic() + 60.0
            while time.monotonic() < end:
                for result in stack.step():
                    return [outcome.status.value for group in result.outcomes for outcome in group]
                stack.wait(0.05)
            raise AssertionError("a job did not end")

        assert run(JobKind.STORE) == ["stored"] * 8
        until(lambda: stack.step() is not None and stack.take_events(), "events come")
        (path,) = map(str, Path(folder).glob("*/*.sock"))
        for _ in range(2):
            kill_listener(path)
            assert run(JobKind.LOAD) in (["missing"] * 8, ["loaded"] * 8)
            until(lambda: run(JobKind.STORE) == ["stored"] * 8, "blocks are stored again")
            until(lambda: stack.step() is not None and stack.take_events(), "events come from the next process too")
            cache[:8] = 0
            assert run(JobKind.LOAD) == ["loaded"] * 8
            assert bytes(cache[:8].numpy()) == bytes(content(range(8)).numpy())
            cache[:8] = content(range(8))


@fully
def test_an_engine_that_ends_starts_no_process(private: PrivateStack, tmp_path: Path, folder: str) -> None:
    with TestEngine(private) as engine:
        pid, threads = peer_pid(private.path), list(engine.client._reconnection._thread._threads)
    until(lambda: not Path(f"/proc/{pid}").exists(), "its process ends")
    (tmp_path / "stack.yaml").write_text(stack_text(root=tmp_path / "root", runtime_dir=folder))
    with open_engine_stack(tmp_path / "stack.yaml", NAMESPACE.layout, [engine.cache], model="test") as stack:
        (path,) = map(str, Path(folder).glob("*/*.sock"))
        assert isinstance(stack, ProcessStack)
        threads += stack._client._reconnection._thread._threads
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive()
    assert private.restarts.count == 0
    assert not is_listening(private.path)
    assert not is_listening(path)


def test_no_lookup_after_a_load_of_weights_has_begun_finds_what_was_stored_before(private: PrivateStack) -> None:
    """The load waits for the stack process, which may read the engine's next lookup before the worker's word of it."""
    for life in range(4):
        with TestEngine(private, f"e{life}") as engine:
            worker = engine.client._worker
            assert set(engine.store(STORED)) <= {"stored", "present"}
            worker._thread.run(worker._connection.on_load, 10.0)
            assert set(engine.look(STORED)) == {LookupResult.MISS}
            engine.step()
            assert engine.client.core.loaded_weights, "its own answer has come by then"
            engine.client.core.reset()


@fully
def test_a_load_of_weights_that_a_frozen_process_does_not_note_ends_the_copies_of_its_rows(
    private: PrivateStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "NOTE_SECONDS", 0.5)
    with TestEngine(private) as engine:
        worker, pid, life = engine.client._worker, peer_pid(private.path), engine.client.life
        rows = worker._connection._link
        os.kill(pid, signal.SIGSTOP)
        try:
            worker._thread.run(worker._connection.on_load, 10.0)
            assert rows.leaving
            assert rows.ended.is_set()
        finally:
            os.kill(pid, signal.SIGCONT)
        engine.step_until(lambda: engine.client.life != life and engine.client.core.loaded_weights, "it is known")
        assert set(engine.look(STORED)) == {LookupResult.MISS}
