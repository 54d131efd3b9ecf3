"""Windows of a multiple of the block and one token: a prompt beyond the window comes back."""

from __future__ import annotations

import pytest
from engines import SEED, engine, make_model, prompts
from test_shared_prefixes import HYBRID, one_by_one, sharing, two_tiers

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]


def test_a_prompt_beyond_a_window_of_one_token_more_than_its_blocks_is_restored(root, tmp_path):
    model = make_model("cohere2", tmp_path / "cohere2")
    alone, shared = prompts(SEED, count=3, prefixes=3), sharing(4)
    with engine(model, tmp_path, **HYBRID) as vllm:
        expected = one_by_one(vllm, [*alone, *shared])[0]
    with engine(model, tmp_path, two_tiers(root), vllms_connector=False, **HYBRID) as vllm:
        cold, _ = one_by_one(vllm, alone)
        tokens, cached = one_by_one(vllm, [*alone, *shared])
    with engine(model, tmp_path, two_tiers(root), vllms_connector=False, **HYBRID) as vllm:
        again, restarted = one_by_one(vllm, alone)
    whole = [(len(prompt) - 1) // 128 * 128 for prompt in alone]
    assert min(whole) >= 8 * 128, "longer than the window"
    assert (cold, tokens, again) == (expected[:3], expected, expected[:3])
    assert (cached, restarted) == ([*whole, 0, 0, 640, 640], whole)
