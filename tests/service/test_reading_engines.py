"""Engines that only read: they find and load what others store, and their processes cannot write a row."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import support_service
import torch
from support_service import BLOCKS, NAMESPACE, PAGE, TestEngine, block_keys, content, stack_process, stack_text
from support_sessions import PoolWorld, names, pool_world

from faults.machine import warm
from kvtier.client.connection import Identity
from kvtier.client.worker import reads_only
from kvtier.engines.process_stack import ProcessStack, connect_engine_stack
from kvtier.errors import UsageError
from kvtier.service import wire
from kvtier.service.wire import Breach
from kvtier.types.geometry import KVLayout
from kvtier.types.namespace import Namespace

SCRIBBLER = (
    f"import sys; sys.path[:0] = [{str(Path(support_service.__file__).parent)!r}]"
    + """
import ctypes
import torch
from support_service import BLOCKS, NAMESPACE, PAGE
from kvtier.engines.process_stack import connect_engine_stack

cache = torch.zeros((BLOCKS, PAGE), dtype=torch.uint8)
with connect_engine_stack(sys.argv[1], NAMESPACE, [cache], reads_only=sys.argv[2] == "reads") as stack:
    rows = stack._client._worker._connection._link._rows
    print("writes", flush=True)
    ctypes.memset(rows.view.ctypes.data, 0x5A, rows.view.nbytes)
    print("has written", flush=True)
"""
)


def reader(path: str) -> tuple[ProcessStack, torch.Tensor]:
    cache = torch.zeros((BLOCKS, PAGE), dtype=torch.uint8)
    return connect_engine_stack(path, NAMESPACE, [cache], engine_id="reader", reads_only=True), cache


def mappings(name: str) -> list[str]:
    """The rights of the mappings of a memfd in this process, as /proc has them."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[1] for line in lines if re.search(rf"memfd:{name}\b", line)]


def load(stack: ProcessStack, count: int) -> list[str]:
    keys = block_keys(count)
    job = stack.submit_load(keys, gpu_blocks=range(count))
    for _ in range(2000):
        for result in stack.step():
            if result.job_id == job:
                return [outcome.status.value for outcome in result.outcomes[0]]
        stack.wait(0.01)
    raise AssertionError("a load did not end")


@pytest.fixture
def service(tmp_path) -> Iterator[str]:
    (tmp_path / "stack.yaml").write_text(stack_text())
    path = str(tmp_path / "socket")
    with stack_process(tmp_path / "stack.yaml", path):
        yield path


def test_it_loads_what_others_store_out_of_rows_that_it_cannot_write(service):
    with TestEngine(service) as writer:
        assert writer.store(range(16)) == ["stored"] * 16
        assert mappings("kvtier-rows") == ["rw-s"]
        stack, cache = reader(service)
        with stack:
            assert sorted(mappings("kvtier-rows")) == ["r--s", "rw-s"]
            assert load(stack, 16) == ["loaded"] * 16
            assert torch.equal(cache[:16], content(range(16)))
            with pytest.raises(UsageError, match="only reads"):
                stack.submit_store(block_keys(2, 40), gpu_blocks=range(2))
        assert writer.load(range(16)) == ["hit"] * 16


def test_a_defect_of_it_that_writes_rows_ends_its_process_alone(service):
    with TestEngine(service) as writer:
        assert writer.store(range(8)) == ["stored"] * 8
        done = scribble(service, "reads")
        assert (done.stdout, done.returncode) == ("writes\n", -signal.SIGSEGV), done.stderr
        assert writer.load(range(8)) == ["hit"] * 8
        assert "has written" in scribble(service, "stores").stdout  # so the defect is one


def scribble(path: str, kind: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIBBLER, path, kind]
    return warm.run(command, capture_output=True, text=True, timeout=120, check=False)


async def test_it_is_lent_no_rows_and_a_fill_ends_its_connection():
    async with pool_world() as world:
        reading = await reading_engine(world)
        reading.send(wire.Want(8, 4))
        await world.turn()
        assert not reading.lent()
        other = await world.engine(rows=4)
        place = other.lent()[0]
        with pytest.raises(Breach, match="cannot write"):
            reading.send(wire.Fill(1, wire.Keys.of(names(1)), wire.Places.of([place[0]], [place[1]])))
        assert await other.store(1, 2) == [(2, "stored", "", 0)]


async def reading_engine(world: PoolWorld):
    return await world.engine(reads_only=True)


def test_a_worker_without_a_slice_of_its_own_may_read_only_in_an_engine_that_stores():
    layout = replace(KVLayout.of_pages(PAGE, world_size=2), replicated=True)
    assert [reads_only(identity(layout), worker, [torch.zeros(1)]) for worker in range(2)] == [False, True]
    assert reads_only(identity(layout, reads_only=True), 0, [torch.zeros(1)])
    assert not reads_only(identity(layout), 1, [torch.zeros(1), torch.zeros(1, device="meta")])


def identity(layout: KVLayout, reads_only: bool = False) -> Identity:
    return Identity("", Namespace(layout), "", "", None, reads_only)
