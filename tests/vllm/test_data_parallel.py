"""Data-parallel engines of a dense model: vLLM makes each an engine by itself, and all share one stack file."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import SEED, engine, prompts, stack

pytestmark = pytest.mark.engine


def stored_bytes(folder: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*"))


def test_two_engines_of_a_dense_model_serve_within_one_capacity_and_hit_after_a_restart(models, plain, tmp_path):
    asked, expected = prompts(SEED)[:8], plain["llama"].tokens[:8]
    roots = tmp_path / "roots"
    roots.mkdir(mode=0o700)
    given = stack(roots / "root", 60, capacity="10MiB", region_bytes="1MiB")
    one_node = {"VLLM_CPU_SIM_MULTI_NUMA": "0"}  # named at all, vLLM 0.33 gives both ranks the host's memory node
    config = {"data_parallel_size": 2, "max_model_len": 2048, "environment": one_node}
    cached = []
    for _ in range(2):
        with engine(models["llama"], tmp_path, given, **config) as vllm:
            for rank in range(2):
                found = vllm.generate(asked, rank=rank)
                assert found.tokens == expected
                cached.append(sum(found.cached))
        assert {folder.name for folder in roots.iterdir()} == {"root"}
        assert 6 << 20 < stored_bytes(roots) <= 10 << 20
    assert cached[2] > cached[0]
    assert cached[3] >= cached[1], "the second engine finds what the first has stored"
