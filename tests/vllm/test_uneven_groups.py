"""A hybrid model whose KV cache groups have different numbers of layers: the disk keeps what they fill, and no more."""

from __future__ import annotations

import pytest
from engines import BLOCK, SEED, engine, make_model, prompts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

LAYER_PAGE = 2 * 2 * 128 * 4 * BLOCK
"""K and V, 2 heads of 128 values of 4 bytes, 128 tokens."""
HYBRID = {"disable_hybrid_kv_cache_manager": False, "max_num_batched_tokens": 2048}


def test_a_hybrid_model_stores_at_most_2_percent_more_than_its_payload(root, tmp_path):
    model, asked = make_model("uneven_gemma3", tmp_path / "model"), prompts(SEED, count=12)
    tiers = [
        {"type": "cpu", "cpu_bytes_to_use": 600 * 2 * LAYER_PAGE},
        {"type": "fs", "roots": [str(root)], "capacity": "1GiB", "region_bytes": "16MiB"},
    ]
    stack = {"namespace": "uneven", "tiers": tiers}
    with engine(model, tmp_path, **HYBRID) as vllm:
        plain = vllm.generate(asked)
    assert len({tuple(tokens) for tokens in plain.tokens}) == len(asked), "the model must tell prompts apart"
    with engine(model, tmp_path, stack, **HYBRID) as vllm:
        cold = vllm.generate(asked)
        vllm.reset()
        from_cpu = vllm.generate(asked)
        figures = vllm.metrics()
    with engine(model, tmp_path, stack, **HYBRID) as vllm:
        from_disk = vllm.generate(asked)
    assert cold.tokens == from_cpu.tokens == from_disk.tokens == plain.tokens
    assert sum(from_disk.cached) >= sum(from_cpu.cached) > 0.95 * sum(len(prompt) // BLOCK * BLOCK for prompt in asked)

    stored = figures["kvtier_stored_blocks_total{engine=0,model_name=" + f"{model},tier=fs}}"]
    written = figures["kvtier_written_bytes_total{engine=0,model_name=" + f"{model},tier=fs}}"]
    (payload,) = [value for name, value in figures.items() if "offload_store_bytes" in name and "created" not in name]
    print(f"{stored:.0f} blocks, {payload:.0f} bytes, {written / payload:.4f} of them written")
    assert payload % LAYER_PAGE == 0
    assert stored * LAYER_PAGE < payload < 2 * stored * LAYER_PAGE, "groups of one layer and of two"
    assert payload < written <= 1.02 * payload
