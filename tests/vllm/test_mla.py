"""Latent attention (MLA): all workers hold the same latents, so a row keeps one copy, which the first of them stores.

On a CPU without AMX vLLM's attention does not continue after a prefix for such models: there nothing is a hit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import SEED, block_bytes, engine, make_model, prompts, stack, total

pytestmark = pytest.mark.engine
HAS_AMX = torch.cpu._is_amx_tile_supported()
ONE_BY_ONE = {"dtype": "bfloat16", "max_num_seqs": 1}
"""In bfloat16 a token depends on what else is in the batch, and on how much of its prompt was cached."""


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory) -> Path:
    """A small model with latent attention."""
    return make_model("deepseek", tmp_path_factory.mktemp("models") / "deepseek")


@pytest.mark.skipif(HAS_AMX, reason="the backend for a CPU with AMX continues after a prefix")
def test_where_the_attention_does_not_continue_after_a_prefix_nothing_is_a_hit(deepseek, root, tmp_path):
    asked = prompts(SEED, count=8)
    config = {"dtype": "float32", "max_num_seqs": 1}
    with engine(deepseek, tmp_path, **config) as vllm:
        plain = vllm.generate(asked)
    with engine(deepseek, tmp_path, stack(root, 150, "deepseek"), **config) as vllm:
        for _ in range(2):
            found = vllm.generate(asked)
            assert (found.tokens, found.cached) == (plain.tokens, [0] * len(asked))
        assert vllm.log.read_text(errors="replace").count("kvtier neither loads nor stores blocks") == 1


@pytest.mark.long
@pytest.mark.skipif(HAS_AMX, reason="the backend for a CPU with AMX continues after a prefix")
def test_where_the_attention_is_not_asked_outputs_are_wrong(deepseek, root, tmp_path):
    asked = prompts(SEED, count=8)
    config = {"dtype": "float32", "max_num_seqs": 1}
    with engine(deepseek, tmp_path, **config) as vllm:
        plain = vllm.generate(asked)
    off = "without_the_question_for_continuation"
    with engine(deepseek, tmp_path, stack(root, 150, "deepseek"), without=off, **config) as vllm:
        found = vllm.generate(asked)
    wrong = sum(one != other for one, other in zip(found.tokens, plain.tokens, strict=True))
    assert sum(found.cached) > 0
    assert wrong > 0


@pytest.mark.long
@pytest.mark.skipif(not HAS_AMX, reason="vLLM has no prefix caching for MLA on a CPU without AMX")
def test_one_copy_for_two_workers_gives_what_vllms_own_cache_gives(deepseek, root, tmp_path):
    asked = prompts(SEED, count=8)
    config = {"tensor_parallel_size": 2, **ONE_BY_ONE}
    with engine(deepseek, tmp_path, stack(root, 150, "deepseek"), **config) as vllm:
        cold = vllm.generate(asked)
        cached = vllm.generate(asked)
        vllm.reset()
        from_cpu = vllm.generate(asked)
        told = vllm.metrics()
    with engine(deepseek, tmp_path, stack(root, 150, "deepseek"), **config) as vllm:
        from_disk = vllm.generate(asked)
    assert len({tuple(tokens) for tokens in cached.tokens}) == len(asked), "the model must tell prompts apart"
    assert (from_cpu.tokens, from_cpu.cached) == (cached.tokens, cached.cached)
    assert (from_disk.tokens, from_disk.cached) == (cached.tokens, cached.cached)
    assert sum(cached.cached) > 2 * sum(cold.cached)
    blocks, kept = (total(told, f"kvtier_{name}_total", "tier=cpu") for name in ("stored_blocks", "store_bytes"))
    assert blocks > 20
    assert kept == blocks * block_bytes("deepseek"), "one copy, not one for each worker"
