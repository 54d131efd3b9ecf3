"""kvtier beside what else an engine does: another connector, asynchronous scheduling, drafts of n-grams."""

from __future__ import annotations

from typing import Any

import pytest
from engines import BLOCK, SEED, Engine, engine, prompts, stack, total

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]
TOKENS = 8
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
WAYS: dict[str, dict[str, Any]] = {
    "asynchronous": {"async_scheduling": True},
    "synchronous": {"async_scheduling": False},
    "drafts": {"speculative_config": DRAFTS},
}


def through(vllm: Engine) -> list[Any]:
    """Computed, and from the CPU tier."""
    computed = vllm.generate(prompts(SEED), tokens=TOKENS)
    vllm.reset()
    return [computed, vllm.generate(prompts(SEED), tokens=TOKENS)]


@pytest.fixture(scope="module")
def long_plain(models, tmp_path_factory) -> list[list[int]]:
    """What vLLM says without kvtier, and without anything else."""
    with engine(models["llama"], tmp_path_factory.mktemp("plain")) as vllm:
        return vllm.generate(prompts(SEED), tokens=TOKENS).tokens


@pytest.mark.parametrize("way", WAYS)
def test_each_way_of_scheduling_gives_the_same_tokens(models, long_plain, root, tmp_path, way):
    with engine(models["llama"], tmp_path, stack(root, 600), **WAYS[way]) as vllm:
        answers = through(vllm)
    print(way, [sum(answer.cached) for answer in answers])
    assert all(answer.tokens == long_plain for answer in answers)
    assert sum(answers[1].cached) > 0.95 * sum(len(prompt) // BLOCK * BLOCK for prompt in prompts(SEED))


def test_beside_another_connector_the_tokens_are_the_same(models, long_plain, root, tmp_path):
    """vLLM's example connector, which keeps prompts in files, is asked after kvtier and is given all blocks as well."""
    ours = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "KVTierSpec",
            "spec_module_path": "kvtier.integrations.vllm",
            "stack": stack(root, 600),
        },
    }
    theirs = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "theirs")},
    }
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [ours, theirs]},
    }
    with engine(models["llama"], tmp_path, kv_transfer_config=both) as vllm:
        answers = through(vllm)
        loaded = total(vllm.metrics(), "kvtier_loaded_blocks_total")
    print([sum(answer.cached) for answer in answers], loaded, len(list((tmp_path / "theirs").iterdir())))
    assert all(answer.tokens == long_plain for answer in answers)
    assert list((tmp_path / "theirs").iterdir())
    assert loaded > 0
    assert sum(answers[1].cached) > sum(answers[0].cached)
