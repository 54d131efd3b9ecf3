"""kvtier beside what else an engine does: another connector, preemption, asynchronous scheduling, drafts of n-grams."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from engines import BLOCK, SEED, Engine, engine, prompts, stack, total

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]
TOKENS = 8
LONG = 40
"""Output tokens of requests that are preempted: enough for one more block than their prompts have."""
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


def beside(root: Path, theirs: Path, *, first: bool) -> dict[str, Any]:
    """kvtier and vLLM's example connector, which keeps whole prompts in files, in the order of being asked."""
    ours = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "KVTierSpec",
            "spec_module_path": "kvtier.engines.vllm",
            "stack": stack(root, 600),
        },
    }
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(theirs)},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [ours, other] if first else [other, ours]},
    }


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


@pytest.fixture(scope="module")
def own_prompts() -> list[list[int]]:
    """Prompts of almost four blocks that have no block in common."""
    return [prompt[: 4 * BLOCK - 20] for prompt in prompts(SEED, count=8, prefixes=8)]


@pytest.fixture(scope="module")
def own_plain(models, own_prompts, tmp_path_factory) -> list[list[int]]:
    """What vLLM says to them without kvtier, where no request is preempted."""
    with engine(models["llama"], tmp_path_factory.mktemp("plain")) as vllm:
        return vllm.generate(own_prompts, tokens=LONG).tokens


@pytest.mark.parametrize("way", ["asynchronous", "drafts beside another connector"])
def test_preempted_requests_load_what_they_had_and_give_the_same_tokens(
    models, own_prompts, own_plain, root, tmp_path, way
):
    """There are GPU blocks for the prompts of four requests, and not for their outputs as well.

    No prompt shares a block with another, so what is loaded in the first round was loaded by requests that go on.
    """
    more = WAYS.get(way) or WAYS["drafts"] | {"kv_transfer_config": beside(root, tmp_path / "theirs", first=True)}
    few = {"num_gpu_blocks_override": 17, "max_model_len": 8 * BLOCK, **more}
    with engine(models["llama"], tmp_path, stack(root, 600) if way in WAYS else None, **few) as vllm:
        first = vllm.generate(own_prompts, tokens=LONG)
        told = vllm.metrics()
        vllm.reset()
        again = vllm.generate(own_prompts, tokens=LONG)
    preempted, loaded = total(told, "vllm:num_preemptions_total"), total(told, "kvtier_loaded_blocks_total")
    print(way, preempted, loaded, first.cached, again.cached)
    assert preempted > 0
    assert loaded > 0
    assert first.tokens == again.tokens == own_plain
    assert sum(again.cached) > 0


def test_beside_another_connector_that_is_asked_later_the_tokens_are_the_same(models, long_plain, root, tmp_path):
    """The other connector is given all blocks as well."""
    theirs = tmp_path / "theirs"
    with engine(models["llama"], tmp_path, kv_transfer_config=beside(root, theirs, first=True)) as vllm:
        answers = through(vllm)
        loaded = total(vllm.metrics(), "kvtier_loaded_blocks_total")
    print([sum(answer.cached) for answer in answers], loaded, len(list(theirs.iterdir())))
    assert all(answer.tokens == long_plain for answer in answers)
    assert list(theirs.iterdir())
    assert loaded > 0
    assert sum(answers[1].cached) > sum(answers[0].cached)


def test_what_a_connector_that_is_asked_first_does_not_have_kvtier_has(models, long_plain, root, tmp_path):
    """Half of the other connector's prompts are gone in the second round.

    Every prompt is computed in one step, because the example connector stores one that is not as if it ended with
    its first step, and a load of it ends vLLM, with and without kvtier.
    """
    theirs, whole = tmp_path / "theirs", {"max_num_batched_tokens": sum(map(len, prompts(SEED)))}
    config = beside(root, theirs, first=False)
    with engine(models["llama"], tmp_path, kv_transfer_config=config, **whole) as vllm:
        computed = vllm.generate(prompts(SEED), tokens=TOKENS)
        stored = sorted(theirs.iterdir())
        for folder in stored[::2]:
            shutil.rmtree(folder)
        vllm.reset()
        again = vllm.generate(prompts(SEED), tokens=TOKENS)
        loaded = total(vllm.metrics(), "kvtier_loaded_blocks_total")
        said = vllm.log.read_text(errors="replace").count("External Cache Hit!")
    print(sum(computed.cached), sum(again.cached), loaded, len(stored), said)
    assert computed.tokens == again.tokens == long_plain
    assert loaded > 0
    assert said >= len(stored) // 2
    assert sum(again.cached) > 0.95 * sum(len(prompt) // BLOCK * BLOCK for prompt in prompts(SEED))
