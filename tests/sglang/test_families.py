"""Families of models over a real SGLang server: all of a prompt comes back from the disk, and outputs are equal."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from families import FAMILIES, SGLANG, VOCABULARY
from family_page import LOGPROB_MAX
from support_sglang import PAGE_TOKENS, Answer, Server, server
from test_serving import backed_up, keys

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(3600)]
LENGTHS = (300, 700, 1100)


def new_tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCABULARY) for _ in range(count)]


def answers(running: Server, asked: list[list[int]]) -> list[Answer]:
    return [running.ask(one, logprobs=True) for one in asked]


def check_restored(computed: list[Answer], found: list[Answer]) -> None:
    """Every whole page came from the disk; tokens and their log-probabilities are those of the computed prompts."""
    whole = [(length - 1) // PAGE_TOKENS * PAGE_TOKENS for length in LENGTHS]
    assert [one.from_storage for one in found] == whole
    for one, other in zip(computed, found, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=LOGPROB_MAX)


@pytest.mark.parametrize("name", SGLANG)
def test_a_family_comes_back_from_the_disk(name: str, tmp_path: Path):
    from family_models import save  # here, because it imports torch and transformers

    save(FAMILIES[name], tmp_path / "model")
    asked = [new_tokens(length, length) for length in LENGTHS]
    changed = [new_tokens(0, length // 2) + one[length // 2 :] for length, one in zip(LENGTHS, asked, strict=True)]
    with server(tmp_path / "model", tmp_path, keys(tmp_path)) as running:
        computed = answers(running, asked)
        assert not any(one.cached for one in computed)
        backed_up(running, sum(length // PAGE_TOKENS * PAGE_TOKENS for length in LENGTHS))
        running.flush()
        check_restored(computed, answers(running, asked))
        assert all(one.tokens != other.tokens for one, other in zip(computed, answers(running, changed), strict=True))
    with server(tmp_path / "model", tmp_path, keys(tmp_path)) as running:
        check_restored(computed, answers(running, asked))
