"""The real vLLM with its stack in a private process: hits from rows and from the disk, and an end of that process."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from engines import ANSWER_SECONDS, BLOCK, VOCABULARY, Engine, engine, stack, stack_process, total

from kvtier.client.private import LINGER_SECONDS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]  # each step of an engine has a deadline of its own
PROMPTS, BLOCKS = 6, 5
WHOLE = [BLOCKS * BLOCK] * PROMPTS


def asked() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(3, VOCABULARY) for _ in range(BLOCKS * BLOCK + 40)] for _ in range(PROMPTS)]


@contextmanager
def served(models: dict[str, Path], folder: Path, root: Path, runtime: str) -> Iterator[Engine]:
    tiers = stack(root, 100, io_engine="threads") | {"runtime_dir": runtime}
    with engine(models["llama"], folder, tiers) as vllm:
        yield vllm


def ends(pid: int) -> bool:
    """True once a process has ended."""
    until = time.monotonic() + 60.0
    while time.monotonic() < until:
        if not Path(f"/proc/{pid}").exists():
            return True
        time.sleep(0.1)
    return False


def wait_for_the_disk(vllm: Engine) -> None:
    """Until every block is on disk. An engine without requests takes no step, and its figures stay as they are."""
    until = time.monotonic() + ANSWER_SECONDS
    while total(vllm.metrics(), "kvtier_slots", "state=ready,tier=fs") < BLOCKS * PROMPTS:
        assert time.monotonic() < until, vllm.metrics()
        vllm.generate([asked()[0][:8]], tokens=1)


def test_prompts_come_back_from_rows_and_from_the_disk(models, root, tmp_path, short_folder):
    with engine(models["llama"], tmp_path) as vllm:
        plain = vllm.generate(asked())
    with served(models, tmp_path, root, short_folder) as vllm:
        assert vllm.generate(asked()).tokens == plain.tokens
        wait_for_the_disk(vllm)
        vllm.reset()
        rows = vllm.generate(asked())
        assert (rows.tokens, rows.cached) == (plain.tokens, WHOLE)
        pid = stack_process(short_folder)
        left = time.monotonic()
    assert ends(pid), "a private process ends with its last engine"
    assert time.monotonic() < left + LINGER_SECONDS
    with served(models, tmp_path, root, short_folder) as vllm:
        restored = vllm.generate(asked())
        assert (restored.tokens, restored.cached) == (plain.tokens, WHOLE)
        pid = stack_process(short_folder)
        killed = time.monotonic()
        vllm.kill()
    with served(models, tmp_path, root, short_folder) as vllm:  # at the process that serves on, if it comes in time
        in_time = time.monotonic() < killed + LINGER_SECONDS
        warm = vllm.generate(asked())
        assert (warm.tokens, warm.cached) == (plain.tokens, WHOLE)
        if in_time:
            assert stack_process(short_folder) == pid
        pid = stack_process(short_folder)
        vllm.kill()
    assert ends(pid), "a private process ends after its last engine"


def test_what_was_stored_is_on_the_disk_once_an_engine_has_ended(models, root, tmp_path, short_folder):
    """Also what only the CPU tier had, as where a container ends with the engine."""
    with engine(models["llama"], tmp_path) as vllm:
        plain = vllm.generate(asked()).tokens
    tiers = stack(root, 100, io_engine="threads", write_policy="on_evict") | {"runtime_dir": short_folder}
    for cached in ([0] * PROMPTS, WHOLE):
        with engine(models["llama"], tmp_path, tiers) as vllm:
            answer = vllm.generate(asked())
            assert (answer.tokens, answer.cached) == (plain, cached)
            pid = stack_process(short_folder)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        assert ends(pid)


def again(vllm: Engine, right: list[list[int]]) -> list[int]:
    """The cached tokens of each prompt, none of which the GPU has. The tokens must be right."""
    vllm.reset()
    answer = vllm.generate(asked())
    assert answer.tokens == right
    return answer.cached


def test_a_killed_stack_process_costs_hits_until_the_next_one_serves(models, root, tmp_path, short_folder):
    with engine(models["llama"], tmp_path) as vllm:
        plain = vllm.generate(asked()).tokens
    with served(models, tmp_path, root, short_folder) as vllm:
        assert vllm.generate(asked()).tokens == plain
        wait_for_the_disk(vllm)
        assert again(vllm, plain) == WHOLE
        for kill in range(3):
            killed = stack_process(short_folder)
            vllm.reset()
            vllm.questions.send({"do": "generate", "prompts": asked(), "tokens": 8})
            time.sleep(0.1 * kill)  # before, amid or after its loads
            os.kill(killed, signal.SIGKILL)
            assert vllm.hear(ANSWER_SECONDS)["tokens"] == plain
            until = time.monotonic() + 120.0
            while not any(again(vllm, plain)):
                assert time.monotonic() < until, "no hit comes from the next process"
            assert stack_process(short_folder) != killed
            assert again(vllm, plain) == WHOLE
            assert total(vllm.metrics(), "kvtier_restarts_total") == kill + 1


@pytest.mark.parametrize("lacks", ["a folder", "a root"])
def test_an_engine_that_requires_no_stack_process_starts_without_one(lacks, models, root, tmp_path, short_folder):
    if lacks == "a folder":
        (Path(short_folder) / f"kvtier-{os.geteuid()}").mkdir(mode=0o750)  # others may enter it
    else:
        root.chmod(0o777)  # others may write there
    with engine(models["llama"], tmp_path) as vllm:
        plain = vllm.generate(asked()).tokens
    tiers = stack(root, 100, io_engine="threads") | {"runtime_dir": short_folder}
    given = {"required": False}
    with engine(models["llama"], tmp_path, tiers, connector=given) as vllm:
        for _ in range(2):
            assert again(vllm, plain) == [0] * PROMPTS
        assert "the engine goes on without a stack" in vllm.log.read_text()
