"""The real vLLM with its stack in a private process: hits from rows and from the disk, and an end of that process."""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from engines import BLOCK, VOCABULARY, Engine, engine, stack
from test_identity import wait_for_the_disk

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]  # each step of an engine has a deadline of its own
PROMPTS, BLOCKS = 6, 5
WHOLE = [BLOCKS * BLOCK] * PROMPTS


def asked() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(3, VOCABULARY) for _ in range(BLOCKS * BLOCK + 40)] for _ in range(PROMPTS)]


@contextmanager
def served(models: dict[str, Path], folder: Path, root: Path, runtime: str) -> Iterator[Engine]:
    tiers = stack(root, 100, io_engine="threads") | {"runtime_dir": runtime}
    with engine(models["llama"], folder, tiers, connector={"driver": "process"}) as vllm:
        yield vllm


def stack_process(runtime: str) -> int:
    """The process that listens below this folder."""
    (path,) = Path(runtime).rglob("*.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(str(path))
        pid: int = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return pid


def ends(pid: int) -> bool:
    """True once a process has ended."""
    until = time.monotonic() + 60.0
    while time.monotonic() < until:
        if not Path(f"/proc/{pid}").exists():
            return True
        time.sleep(0.1)
    return False


def test_prompts_come_back_from_rows_and_from_the_disk(models, root, tmp_path, short_folder):
    with engine(models["llama"], tmp_path) as vllm:
        plain = vllm.generate(asked())
    with served(models, tmp_path, root, short_folder) as vllm:
        assert vllm.generate(asked()).tokens == plain.tokens
        wait_for_the_disk(vllm, BLOCKS * PROMPTS)
        vllm.reset()
        again = vllm.generate(asked())
        assert (again.tokens, again.cached) == (plain.tokens, WHOLE)
        pid = stack_process(short_folder)
    with served(models, tmp_path, root, short_folder) as vllm:  # at the process that serves on
        warm = vllm.generate(asked())
        assert (warm.tokens, warm.cached) == (plain.tokens, WHOLE)
        assert stack_process(short_folder) == pid
    assert ends(pid), "a private process ends after its last engine"
    with served(models, tmp_path, root, short_folder) as vllm:
        restored = vllm.generate(asked())
        assert (restored.tokens, restored.cached) == (plain.tokens, WHOLE)


def test_a_killed_stack_process_costs_hits_and_nothing_else(models, root, tmp_path, short_folder):
    with engine(models["llama"], tmp_path) as vllm:
        plain = vllm.generate(asked())
    with served(models, tmp_path, root, short_folder) as vllm:
        assert vllm.generate(asked()).tokens == plain.tokens
        vllm.reset()
        assert vllm.generate(asked()).cached == WHOLE
        os.kill(stack_process(short_folder), signal.SIGKILL)
        for _ in range(3):
            vllm.reset()
            answer = vllm.generate(asked())
            assert (answer.tokens, answer.cached) == (plain.tokens, [0] * PROMPTS)
