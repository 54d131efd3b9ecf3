"""A prefix that requests share is restored for models with windows and recurrent states, from the third request on."""

from __future__ import annotations

import random

import pytest
from engines import KINDS, SEED, VOCABULARY, Engine, engine, stack

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]


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


def test_a_shared_prefix_is_restored_from_the_third_request_on(models, root, tmp_path):
    asked, ours = sharing(5), {"vllms_connector": False, **KINDS["gemma3"]}
    with engine(models["gemma3"], tmp_path, **KINDS["gemma3"]) as vllm:
        expected, _ = one_by_one(vllm, asked)
    with engine(models["gemma3"], tmp_path, stack(root, 300, "gemma3"), **ours) as vllm:
        tokens, cached = one_by_one(vllm, asked[:4])
        assert "shared prefixes: the second request" in vllm.log.read_text(errors="replace")
    with engine(models["gemma3"], tmp_path, stack(root, 300, "gemma3"), **ours) as vllm:
        again, restarted = one_by_one(vllm, asked[4:])
    assert (tokens, again) == (expected[:4], expected[4:])
    assert (cached, restarted) == ([0, 0, 640, 640], [640])


def test_turned_off_it_stores_what_vllm_stores(models, root, tmp_path):
    off = {"vllms_connector": False, "connector": {"shared_prefixes": False}, **KINDS["gemma3"]}
    with engine(models["gemma3"], tmp_path, stack(root, 300, "gemma3"), **off) as vllm:
        _, cached = one_by_one(vllm, sharing(4))
    assert cached == [0, 0, 0, 0]
