"""Layout files: two whole stacks in two processes on one root, evicting at the same time."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
from support_files import block_files, disk_bytes, temporaries
from support_paths import SUPPORT

from faults.machine import warm

PEER = SUPPORT / "support_files_stack.py"
CAPACITY = 3 << 20
FILE_BYTES = 8192


class Peer:
    """A stack in another process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.answer = json.loads
        assert process.stdout.readline() == "open\n"

    def tell(self, line: str) -> None:
        """Ask for something."""
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def hear(self) -> Counter[str]:
        """What came of it."""
        return Counter(json.loads(self.process.stdout.readline()))

    def ask(self, line: str) -> Counter[str]:
        self.tell(line)
        return self.hear()


@contextmanager
def peers(root: Path, count: int, capacity: int = CAPACITY):
    """Some stacks on one root, each in a process of its own; they must end in order."""
    command = [sys.executable, "-W", "error", str(PEER), str(root), str(capacity)]
    processes = [warm.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        yield [Peer(process) for process in processes]
        for process in processes:
            process.stdin.close()
            assert process.wait(timeout=60) == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


def test_each_process_finds_what_the_other_stored_until_one_resets(tmp_path):
    root = tmp_path / "root"
    with peers(root, 2) as (one, other):
        assert one.ask("store 0 32") == {"stored": 32}
        assert other.ask("find 500 8") == {"miss": 8}
        while one.ask("find 0 32") != {"hit": 32}:
            pass
        # Blocks reach the shared tier in the background: ask until they are all there.
        wait_for_files(root, 32)
        assert other.ask("find 0 40") == {"hit": 32, "miss": 8}
        assert other.ask("load 0 32") == {"loaded": 32}
        assert other.ask("store 100 16") == {"stored": 16}
        wait_for_files(root, 48)
        assert one.ask("load 100 16") == {"loaded": 16}
        one.ask("reset")
        assert one.ask("find 0 200") == {"miss": 200}
        assert one.ask("load 0 32") == {"missing": 32}
        assert other.ask("find 200 8") == {"miss": 8}
        assert other.ask("store 200 8") == {"stored": 8}, "in its own memory"
        other.ask("reset")
        assert other.ask("find 0 208") == {"miss": 208}
        wait_for_files(root, 0)  # else a moment with eight of them might be one in the middle of the removal
        assert one.ask("store 300 8") == {"stored": 8}
        wait_for_files(root, 8)
        assert other.ask("load 300 8") == {"loaded": 8}, "both have reset, and share again"
    with peers(root, 1) as (late,):
        assert late.ask("find 0 300") == {"miss": 300}
        assert late.ask("load 300 8") == {"loaded": 8}


def wait_for_files(root: Path, count: int) -> None:
    """Until a root holds some number of blocks; the test's own time limit makes their absence a failure."""
    done = threading.Event()
    for _ in range(3000):
        if len(block_files(root)) == count:
            return
        done.wait(0.005)
    raise AssertionError(f"{len(block_files(root))} blocks, not {count}")


@pytest.mark.parametrize("rounds", [25, pytest.param(5000, marks=pytest.mark.long)])
def test_two_processes_evicting_at_once_keep_the_bound_and_every_byte(tmp_path, seed, rounds):
    root, highest = tmp_path / "root", 0
    ended = threading.Event()

    def sample() -> None:
        nonlocal highest
        while not ended.is_set():
            highest = max(highest, disk_bytes(root))

    sampler = threading.Thread(target=sample)
    with peers(root, 2, capacity=2 << 20) as both:
        sampler.start()
        try:
            for number, each in enumerate(both):
                each.tell(f"churn {seed + number} {rounds}")
            outcomes = [each.hear() for each in both]
        finally:
            ended.set()
            sampler.join()
        assert highest <= 2 << 20, f"{highest - (2 << 20)} bytes over the bound"
        for outcome in outcomes:
            assert outcome["load loaded"] > 0
            assert set(outcome) <= {"load loaded", "load missing", "store stored", "store present"}, outcome
    assert temporaries(root) == []
    assert len(block_files(root)) * FILE_BYTES > (2 << 20) * 0.7
