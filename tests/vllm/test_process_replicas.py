"""Engines of several ranks at one stack process: tensor-parallel workers, and replicas that share rows and disk."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from engines import ANSWER_SECONDS, BLOCK, VOCABULARY, Answer, Engine, engine, stack, total
from test_stack_process import stack_process

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]
BLOCKS = 3
ONE_NODE = {"VLLM_CPU_SIM_MULTI_NUMA": "0"}  # named at all, vLLM 0.33 gives both ranks the host's memory node


def asked(count: int) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, VOCABULARY) for _ in range(BLOCKS * BLOCK + 40)] for _ in range(count)]


def cpu_only(rows: int, runtime: str, root: Path) -> dict[str, object]:
    """A stack without a disk: what one replica stores the other has from rows alone."""
    described = stack(root, rows)
    return described | {"tiers": described["tiers"][:1], "runtime_dir": runtime}


def store(vllm: Engine, prompts: list[list[int]]) -> Answer:
    """Answers to prompts, once every whole block of them is in a row."""
    answers = vllm.generate(prompts)
    until = time.monotonic() + ANSWER_SECONDS
    while total(vllm.metrics(), "kvtier_slots", "state=ready,tier=cpu") < BLOCKS * len(prompts):
        assert time.monotonic() < until, vllm.metrics()
        vllm.generate([prompts[0][:8]])  # vLLM submits stores in the step after
    return answers


@pytest.mark.long
def test_200_prompts_of_a_replica_that_was_closed_are_hits_of_another(models, root, tmp_path, short_folder):
    replicas(200, models["llama"], tmp_path, cpu_only(2048, short_folder, root))


def test_prompts_of_a_replica_that_was_closed_are_hits_of_another(models, root, tmp_path, short_folder):
    replicas(20, models["llama"], tmp_path, cpu_only(100, short_folder, root))


def replicas(count: int, model: Path, folder: Path, given: dict[str, object]) -> None:
    """Two engines of one stack file: the second loads what the first has stored. There is no disk."""
    prompts, config = asked(count), {"max_model_len": 2048}
    with engine(model, folder, given, **config) as other:
        with engine(model, folder, given, **config) as first:
            stored = store(first, prompts)
        found = other.generate(prompts)
    assert sum(stored.cached) == 0
    assert found.tokens == stored.tokens
    assert found.cached == [BLOCKS * BLOCK] * count


def test_data_parallel_ranks_of_a_launch_share_one_process(models, root, tmp_path, short_folder):
    prompts, given = asked(20), cpu_only(100, short_folder, root)
    config = {"data_parallel_size": 2, "max_model_len": 2048, "environment": ONE_NODE}
    with engine(models["llama"], tmp_path, given, **config) as vllm:
        first = vllm.generate(prompts, rank=0)
        assert len(list(Path(short_folder).rglob("*.sock"))) == 1
        until = time.monotonic() + 3.0
        while time.monotonic() < until:  # stores wait a second for rows, and are submitted in the step after
            vllm.generate([prompts[0][:8]], rank=0)
        second = vllm.generate(prompts, rank=1)
    assert sum(first.cached) == 0
    assert (second.tokens, second.cached) == (first.tokens, [BLOCKS * BLOCK] * len(prompts))


def test_tensor_parallel_workers_copy_their_slices_from_one_process(models, root, tmp_path, short_folder):
    prompts = asked(6)
    config = {"tensor_parallel_size": 2}
    with engine(models["llama"], tmp_path, **config) as vllm:
        plain = vllm.generate(prompts).tokens
    given = cpu_only(200, short_folder, root)
    with engine(models["llama"], tmp_path, given, **config) as vllm:
        assert vllm.generate(prompts).tokens == plain
        assert stack_process(short_folder)
        vllm.reset()
        again = vllm.generate(prompts)
    assert (again.tokens, again.cached) == (plain, [BLOCKS * BLOCK] * len(prompts))
