"""What decides K and V and is not in the folder of the weights, changed in place between two lives of the real vLLM:
nothing is found then, so every output is what the changed model computes. What is the same is found."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from engines import BLOCK, VOCABULARY, Answer, engine, make_model, stack
from support_changed_models import AUDIO, edit, install, own_code, split, train_again, ultravox
from test_identity import asked, wait_for_the_disk

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

PROMPTS = asked(3, blocks=5)


def life(model: Path, root: Path, prompts: Sequence[Any] = PROMPTS, store: bool = False, **config: Any) -> Answer:
    """What an engine answers that finds what lives before it have stored, without the operator's name for it. One that
    is to `store` ends when all is on the disk."""
    environment = {"XDG_CACHE_HOME": str(root.parent / "cache"), "HF_HOME": str(root.parent / "hf")}
    if site := config.get("site"):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (site, os.environ.get("PYTHONPATH"))))
    tiers = {**stack(root, 100, io_engine="threads"), "namespace": ""}
    with engine(model, root.parent, tiers, environment, **config) as vllm:
        question = "listen" if "limit_mm_per_prompt" in config else "generate"
        answer = Answer(**vllm.ask(do=question, prompts=prompts, tokens=8))
        if store:
            wait_for_the_disk(vllm, len(prompts) * 5)
        return answer


def test_weights_of_a_second_place_and_a_plug_in(root, tmp_path):
    model, second, site = make_model("llama", tmp_path / "model"), tmp_path / "second", tmp_path / "site"
    split(model, second)
    install(site, factor=1)
    before = life(model, root, store=True, site=str(site))
    for path in (model, second):
        (path / "model.safetensors").chmod(0o640)
    same = life(model, root, site=str(site))
    assert (same.tokens, same.cached) == (before.tokens, [5 * BLOCK] * 3)
    train_again(second)
    trained = life(model, root, site=str(site))
    assert (before.cached, trained.cached) == ([0] * 3, [0] * 3)
    install(site, factor=3)
    upgraded = life(model, root, site=str(site))
    assert upgraded.cached == [0] * 3
    assert not set(map(tuple, upgraded.tokens)) & set(map(tuple, trained.tokens)), "a change is to be seen"
    assert not set(map(tuple, trained.tokens)) & set(map(tuple, before.tokens)), "a change is to be seen"


def test_code_that_comes_with_the_model(root, tmp_path):
    model, trust = make_model("llama", tmp_path / "model"), {"trust_remote_code": True, "model_impl": "transformers"}
    own_code(model, factor=1)
    before = life(model, root, store=True, **trust)
    own_code(model, factor=3)
    corrected = life(model, root, **trust)
    assert (before.cached, corrected.cached) == ([0] * 3, [0] * 3)
    assert not set(map(tuple, corrected.tokens)) & set(map(tuple, before.tokens)), "a change is to be seen"


def test_the_processor_of_a_model_that_hears(root, tmp_path):
    model, hears = tmp_path / "model", {"trust_remote_code": True, "limit_mm_per_prompt": {"audio": 1}}
    ultravox(make_model("llama", tmp_path / "text"), model)
    rng = random.Random(5)
    spoken = [
        [seed, " ".join([AUDIO, *(f"w{rng.randrange(3, VOCABULARY - 20)}" for _ in range(480))])] for seed in (1, 2, 3)
    ]
    before = life(model, root, spoken, store=True, **hears)
    edit(model / "preprocessor_config.json", padding_value=0.5)
    corrected = life(model, root, spoken, **hears)
    assert (before.cached, corrected.cached) == ([0] * 3, [0] * 3)
    assert not set(map(tuple, corrected.tokens)) & set(map(tuple, before.tokens)), "a change is to be seen"
