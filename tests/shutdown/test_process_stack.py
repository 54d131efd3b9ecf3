"""A stack in a process of its own: a forked child can neither use nor harm it, and its end costs hits alone."""

from __future__ import annotations

import gc
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from support_service import peer_pid, stack_process, stack_text, until
from support_shutdown import run_in_child
from support_stack import run_jobs, statuses

import kvtier
from kvtier.errors import ResourceError, UsageError

LAYOUT = kvtier.KVLayout.of_pages(4096, block_size=16)
KEYS = kvtier.block_keys([bytes([number]) * 16 for number in range(4)])
MISS = kvtier.LookupResult.MISS
USES = {
    "lookup": lambda stack: stack.lookup(KEYS),
    "locate": lambda stack: stack.locate(KEYS),
    "job": lambda stack: stack.job(kvtier.JobKind.LOAD, []),
    "request": lambda stack: stack.request("request", KEYS),
    "take_events": lambda stack: stack.take_events(),
    "announce": lambda stack: stack.engine.announce(KEYS),
    "stats": lambda stack: stack.stats(),
    "check_integrity": lambda stack: stack.check_integrity(),
    "geometry": lambda stack: stack.geometry,
    "open": lambda stack: stack.open(),
    "reset": lambda stack: stack.reset(),
    "step": lambda stack: stack.step(),
    "wait": lambda stack: stack.wait(60.0),
    "cancel": lambda stack: stack.cancel(1),
    "has_pending_work": lambda stack: stack.has_pending_work,
}


@pytest.fixture
def pages() -> torch.Tensor:
    """Four blocks with bytes of their own, and four of zeros."""
    found = torch.zeros((8, 4096), dtype=torch.uint8)
    found[:4] = torch.arange(4, dtype=torch.uint8).reshape(-1, 1) + 1
    return found


def opened(folder: str, root: Path, pages: torch.Tensor) -> kvtier.ProcessStack:
    disk = f"{{type: fs, roots: [{root}], capacity: 16MiB, min_free_bytes: 0}}"
    tiers = f"[{{type: cpu, cpu_bytes_to_use: 1MiB}}, {disk}]"
    config = kvtier.parse_stack(f"{{runtime_dir: {folder}, tiers: {tiers}}}")
    stack = kvtier.open_engine_stack(config, LAYOUT, [pages], model="m")
    assert isinstance(stack, kvtier.ProcessStack)
    return stack


def store(stack: kvtier.ProcessStack) -> list[str]:
    return statuses(run_jobs(stack, job := stack.submit_store(KEYS, gpu_blocks=range(4)))[job])


def load(stack: kvtier.ProcessStack, pages: torch.Tensor) -> list[str]:
    pages[4:] = 0
    found = statuses(run_jobs(stack, job := stack.submit_load(KEYS, gpu_blocks=range(4, 8)))[job])
    assert found != ["loaded"] * 4 or torch.equal(pages[:4], pages[4:])
    return found


def test_a_child_can_neither_use_nor_harm_its_parents_stack(short_folder, tmp_path, pages):
    with opened(short_folder, tmp_path, pages) as stack:
        assert store(stack) == ["stored"] * 4

        def child() -> None:
            for use in USES.values():
                with pytest.raises(UsageError, match=f"belongs to process {os.getppid()}"):
                    use(stack)
            assert stack.close() == kvtier.CloseReport(0, 0)

        for _ in range(3):
            assert run_in_child(child) == 0
            assert load(stack, pages) == ["loaded"] * 4
        stack.check_integrity()
    assert stack.close_report == kvtier.CloseReport(0, 0)


def test_a_stack_process_that_is_killed_costs_hits_and_nothing_else(short_folder, tmp_path, pages):
    with opened(short_folder, tmp_path, pages) as stack:
        assert store(stack) == ["stored"] * 4
        (path,) = Path(short_folder).rglob("*.sock")
        os.kill(peer_pid(str(path)), signal.SIGKILL)
        for _ in range(3):
            assert set(load(stack, pages)) <= {"missing", "loaded"}
            assert set(store(stack)) <= {"dropped:tier_down", "stored", "present"}
        stack.check_integrity()
    with opened(short_folder, tmp_path, pages) as stack:
        assert set(store(stack)) <= {"stored", "present"}
        assert load(stack, pages) == ["loaded"] * 4


def test_lives_leave_neither_threads_nor_descriptors(short_folder, tmp_path, pages):
    def life() -> None:
        with opened(short_folder, tmp_path, pages) as stack:
            store(stack)

    life()
    gc.collect()
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        life()
    gc.collect()
    until(lambda: set(threading.enumerate()) <= threads, "the threads end")
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_a_stack_that_is_not_closed_says_so(short_folder, tmp_path, pages):
    stack = opened(short_folder, tmp_path, pages)
    stack.open()
    client = stack._client
    with pytest.warns(ResourceWarning, match="unclosed <.*ProcessStack"):
        del stack
    client.close()


def test_engines_at_a_service_find_each_others_blocks(tmp_path: Path, pages: torch.Tensor) -> None:
    stack, path = tmp_path / "stack.yaml", str(tmp_path / "socket")
    stack.write_text(stack_text(256))
    namespace = kvtier.Namespace(LAYOUT, model="m")
    with (
        pytest.raises(ResourceError, match="no stack process answers"),
        kvtier.connect_engine_stack(path, namespace, [pages]),
    ):
        pass
    with stack_process(stack, path):
        with kvtier.connect_engine_stack(path, namespace, [pages], engine_id="one") as one:
            assert store(one) == ["stored"] * 4
        theirs = torch.zeros_like(pages)
        with kvtier.connect_engine_stack(path, namespace, [theirs]) as two:
            job = two.submit_load(KEYS, gpu_blocks=range(4))
            assert statuses(run_jobs(two, job)[job]) == ["loaded"] * 4
        assert torch.equal(theirs[:4], pages[:4])
