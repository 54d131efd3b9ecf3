"""A prefix that requests share is restored for models with windows and recurrent states, from the third request on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from engines import SEED, VOCABULARY, Engine, engine, make_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

HYBRID = {"disable_hybrid_kv_cache_manager": False}
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": HYBRID,
    "gpt_oss": {**HYBRID, "dtype": "bfloat16"},
    "qwen3_next": {**HYBRID, "dtype": "bfloat16", "enable_prefix_caching": True},
    "mistral": HYBRID,
}
"""How vLLM runs each model."""


def sharing(count: int, shared: int = 700, length: int = 1500) -> list[list[int]]:
    rng = random.Random(SEED)
    prefix = [rng.randrange(3, VOCABULARY) for _ in range(shared)]
    return [prefix + [rng.randrange(3, VOCABULARY) for _ in range(length - shared)] for _ in range(count)]


def one_by_one(vllm: Engine, asked: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Each alone, with the GPU's cache emptied in between."""
    answers = []
    for prompt in asked:
        answers.append(vllm.generate([prompt]))
        vllm.reset()
    return [answer.tokens[0] for answer in answers], [answer.cached[0] for answer in answers]


def two_tiers(root: Path) -> dict[str, Any]:
    tiers = [{"type": "cpu", "cpu_bytes_to_use": "64MiB"}, {"type": "fs", "roots": [str(root)], "capacity": "256MiB"}]
    return {"namespace": "shared-prefixes", "tiers": tiers}


@pytest.mark.parametrize("kind", MODELS)
def test_a_shared_prefix_is_restored_from_the_third_request_on(kind, root, tmp_path):
    model, config = make_model(kind, tmp_path / kind), MODELS[kind]
    ours = {"vllms_connector": False, **config}
    with engine(model, tmp_path, **config) as vllm:
        block = vllm.block_size()  # of 128 tokens; with states of 384, of 256 where the CPU has no AVX-512
        shared = max(700, block + 100)
        asked, whole = sharing(5, shared, shared + 800), shared // block * block
        expected, _ = one_by_one(vllm, asked)
    with engine(model, tmp_path, two_tiers(root), **ours) as vllm:
        tokens, cached = one_by_one(vllm, asked[:4])
        assert "shared prefixes: the second request" in vllm.log.read_text(errors="replace")
    with engine(model, tmp_path, two_tiers(root), **ours) as vllm:
        again, restarted = one_by_one(vllm, asked[4:])
    assert len({tuple(each) for each in expected}) == len(asked), "the model must tell prompts apart"
    assert (tokens, again) == (expected[:4], expected[4:])
    assert (cached, restarted) == ([0, 0, whole, whole], [whole])


def test_turned_off_it_stores_what_vllm_stores(models, root, tmp_path):
    off = {"vllms_connector": False, "connector": {"shared_prefixes": False}, **HYBRID}
    with engine(models["gemma3"], tmp_path, two_tiers(root), **off) as vllm:
        _, cached = one_by_one(vllm, sharing(4))
    assert cached == [0, 0, 0, 0]


def test_a_line_at_start_says_what_to_set_where_a_state_has_one_block_for_the_longest_prompt(root, tmp_path):
    model, config = make_model("qwen3_next", tmp_path / "qwen3_next"), MODELS["qwen3_next"]
    with engine(model, tmp_path, **config) as vllm:
        block = vllm.block_size()
    off = {"vllms_connector": False, **config, "enable_prefix_caching": False, "max_model_len": block}
    with engine(model, tmp_path, two_tiers(root), **off) as vllm:
        _, cached = one_by_one(vllm, sharing(1, 100, 200) * 2)
        lines = [line for line in vllm.log.read_text(errors="replace").splitlines() if "nothing comes back" in line]
    assert cached == [0, 0]
    (line,) = lines
    assert f"group 0, 1, 2, 3 has {block} tokens" in line
    assert line.endswith("set enable_prefix_caching: true")
