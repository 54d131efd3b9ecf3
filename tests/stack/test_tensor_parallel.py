"""Tensor parallelism with real processes: two workers and a coordinator on one named region and one disk."""

from __future__ import annotations

import os
import secrets
import signal
import socket
from dataclasses import replace

import pytest
from support_stack import PLAIN, Engine, fs, keys, stack_file, statuses
from support_stack_worker import LAYOUT, Process, parts_of, start_worker, transfers

from kvtier.config import stack_parts
from kvtier.errors import ConfigError, ResourceError, UsageError
from kvtier.stack import StackParts, TierStack
from kvtier.types.geometry import Geometry
from kvtier.types.jobs import JobKind
from kvtier.types.namespace import Namespace
from kvtier_cpu.region.rendezvous import Names

BLOCKS = [(0, 0, 20, 0), (1, 0, 12, 40)]


def text(root, rows: int = 8, gpu: str = "") -> str:
    size = rows * Geometry(LAYOUT, 4096).row_bytes
    return f"""
tiers:
  {gpu}
  - {{type: cpu, cpu_bytes_to_use: {size}, huge_pages: false, shared: named}}
  - {{type: fs, roots: [{root}], capacity: 4MiB, min_free_bytes: 0}}
"""


def assert_no_name_is_left(*engine_ids: str) -> None:
    """Nothing of these engines' regions is left in shared memory."""
    for engine_id in engine_ids:
        names = Names.of("/dev/shm", engine_id)
        assert not os.path.exists(names.rows)
        assert not os.path.exists(names.control)


class Session:
    """Two workers and a coordinator, all started at once."""

    def __init__(self, stack: str) -> None:
        self.engine_id = f"test-{secrets.token_hex(8)}"
        started = [start_worker(number, stack, self.engine_id) for number in range(2)]
        self.workers = [process for process, _ in started]
        socks = [sock for _, sock in started]
        self.coordinator = Process({"role": "coordinator", "stack": stack, "engine_id": self.engine_id}, socks)
        for sock in socks:
            sock.close()
        self.opened = self.coordinator.answer()

    def on_workers(self, do: str, **request: object) -> list:
        for worker in self.workers:
            worker.ask(do, **request)
        return [worker.answer() for worker in self.workers]

    def kill(self) -> None:
        for process in (self.coordinator, *self.workers):
            if process.process.poll() is None:
                process.kill()
            process.shut()


def test_two_workers_store_demote_stop_start_promote_and_load(tmp_path):
    stack = text(tmp_path / "r")
    first = Session(stack)
    try:
        first.on_workers("compute", blocks=BLOCKS)
        for start in range(0, 20, 4):
            blocks = [(0, start, 4, 2 * start)] + ([(1, start, 4, 40 + 2 * start)] if start < 12 else [])
            assert set(first.coordinator.call("store", blocks=blocks)) == {"stored"}
            assert first.coordinator.call("drain")
        first.on_workers("wipe")
        assert set(first.coordinator.call("load", blocks=BLOCKS)) == {"loaded"}
        assert first.on_workers("wrong", blocks=BLOCKS) == [{"wrong": [], "beside": False}] * 2
        first.coordinator.process.stdin.close()
        assert first.coordinator.answer() == {"dropped": 0, "unfinished": 0}
        assert [process.wait() for process in (first.coordinator, *first.workers)] == [0, 0, 0]
    finally:
        first.kill()

    second = Session(stack)
    try:
        assert second.coordinator.call("locate", blocks=BLOCKS) == ["fs"] * 32
        assert set(second.coordinator.call("load", blocks=BLOCKS)) == {"loaded"}
        assert second.on_workers("wrong", blocks=BLOCKS) == [{"wrong": [], "beside": False}] * 2
        second.coordinator.process.send_signal(signal.SIGKILL)
        assert [worker.wait() for worker in second.workers] == [0, 0], "workers end when the coordinator is gone"
    finally:
        second.kill()
    assert_no_name_is_left(first.engine_id, second.engine_id)


async def test_a_killed_worker_turns_loads_and_stores_into_failures(tmp_path):
    engine_id = f"test-{secrets.token_hex(8)}"
    stack_text = text(tmp_path / "r", 64, "- {type: gpu}  # the workers have it")
    started = [start_worker(number, stack_text, engine_id) for number in range(2)]
    workers = [process for process, _ in started]
    try:
        async with TierStack(parts_of(stack_text, engine_id, [sock for _, sock in started])) as stack:
            for worker in workers:
                worker.call("compute", blocks=BLOCKS)
            stored = await stack.run(stack.job(JobKind.STORE, transfers(BLOCKS)))
            assert statuses(stored) == ["stored"] * 32
            workers[1].kill()
            loaded = await stack.run(stack.job(JobKind.LOAD, transfers(BLOCKS)))
            assert statuses(loaded) == ["failed"] * 32
            fresh = await stack.run(stack.job(JobKind.STORE, transfers([(0, 500, 20, 0)])))
            assert statuses(fresh) == ["failed"] * 20
            assert stack.locate(keys(20, 0, 500)) == [None] * 20, "what one worker did not write is never found"
            assert await stack.drain(30), "what both had stored still goes to disk"
            stack.check_integrity()
            assert stack.stats().tiers["fs"].stored == 32
        assert stack.close_report.unfinished_jobs == 0
        assert workers[0].wait() == 0
    finally:
        for worker in workers:
            if worker.process.poll() is None:
                worker.kill()
            worker.shut()
    assert_no_name_is_left(engine_id)


async def test_an_error_at_opening_hangs_up_on_the_workers(tmp_path):
    pairs = [socket.socketpair() for _ in range(2)]
    engine_id = f"test-{secrets.token_hex(8)}"
    parts = parts_of(text(tmp_path / "no" / "such" / "r"), engine_id, [ours for ours, _ in pairs])
    for _, theirs in pairs[1:]:
        theirs.close()
    pairs[0][1].close()
    with pytest.raises(ResourceError, match="worker 0 did not answer"):
        await TierStack(parts).open()
    assert all(ours.fileno() == -1 for ours, _ in pairs)
    assert_no_name_is_left(engine_id)


async def test_the_workers_must_be_as_many_as_the_layout_says(tmp_path):
    one, other = socket.socketpair()
    other.settimeout(10)
    with other:
        with pytest.raises(UsageError, match="2 workers, but 1"):
            await TierStack(parts_of(text(tmp_path / "r"), "test-x", [one])).open()
        assert other.recv(1) == b"", "the link is hung up"

    engine = Engine(PLAIN, 4)
    parts = StackParts([], Namespace(LAYOUT))
    with pytest.raises(ConfigError, match="needs a CPU tier"):
        await TierStack(parts).open()

    config = stack_file(LAYOUT, 4, fs(tmp_path / "r"))
    alone = stack_parts(config, Namespace(LAYOUT), Engine(LAYOUT, 4).kv_caches)
    with pytest.raises(UsageError, match="2 workers, but 1"):
        await TierStack(alone).open()
    plain = stack_parts(stack_file(PLAIN, 4, fs(tmp_path / "r")), Namespace(PLAIN), engine.kv_caches)
    with pytest.raises(UsageError, match="not both"):
        await TierStack(replace(plain, workers=plain.tiers[:1])).open()
    with pytest.raises(UsageError, match="kv_caches"):
        await TierStack(replace(plain, kv_caches=None)).open()
