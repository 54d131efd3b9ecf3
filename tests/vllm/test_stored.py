"""What vLLM hands over to be stored: prompts by default, outputs where asked for, nothing of a request that says so."""

from __future__ import annotations

import random

import pytest
from engines import BLOCK, SEED, VOCABULARY, Engine, engine, stack

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]
THINKING, ANSWER = 300, 100
"""Tokens of an output: what a chat template takes away in the next turn, and what it keeps."""


def new_tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCABULARY) for _ in range(count)]


def cached(vllm: Engine, prompt: list[int]) -> int:
    """Tokens of a prompt that come back once the GPU's cache is empty. The request itself stores nothing."""
    vllm.reset()
    return vllm.generate([prompt], 1, store=0).cached[0]


def turns(vllm: Engine) -> tuple[int, int]:
    """Cached tokens of the second turn of a chat: with the whole output in its prompt, and without the thinking."""
    prompt, question = new_tokens(SEED, 5 * BLOCK), new_tokens(SEED + 1, 50)
    output = vllm.generate([prompt], THINKING + ANSWER).tokens[0]
    return cached(vllm, prompt + output + question), cached(vllm, prompt + output[THINKING:] + question)


def test_by_default_prompts_are_stored_and_outputs_are_not(models, root, tmp_path):
    with engine(models["llama"], tmp_path, stack(root, 300)) as vllm:
        assert turns(vllm) == (5 * BLOCK, 5 * BLOCK)


def test_with_outputs_a_turn_that_repeats_them_continues_after_them(models, root, tmp_path):
    """The last token of an output has no KV yet. A turn without the thinking finds the prompt, as by default."""
    with engine(models["llama"], tmp_path, stack(root, 300), connector={"offload_prompt_only": False}) as vllm:
        stored = (5 * BLOCK + THINKING + ANSWER - 1) // BLOCK * BLOCK
        assert turns(vllm) == (stored, 5 * BLOCK)


def test_a_request_that_stores_nothing_still_loads(models, root, tmp_path):
    asked, other = new_tokens(SEED + 2, 700), new_tokens(SEED + 3, 700)
    with engine(models["llama"], tmp_path, stack(root, 300)) as vllm:
        vllm.generate([asked], store=0)
        assert cached(vllm, asked) == 0
        vllm.generate([other])
        assert cached(vllm, other) == 5 * BLOCK
        vllm.reset()
        vllm.generate([asked], store=3 * BLOCK)
        assert cached(vllm, asked) == 3 * BLOCK
