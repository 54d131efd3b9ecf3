"""The real vLLM 0.33 loads hits from the CPU tier within the step, up to `sync_load_budget_bytes`."""

from __future__ import annotations

from collections import Counter

import pytest
from conftest import HAS_VLLM
from engines import BLOCK, KINDS, SEED, block_bytes, engine, prompts, stack

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]
if HAS_VLLM:
    from kvtier.engines.vllm.compat import expedites_loads

    pytestmark.append(pytest.mark.skipif(not expedites_loads(), reason="vLLM 0.32 waits for no load within a step"))


@pytest.mark.parametrize(("kind", "budget_blocks"), [("llama", 0), ("llama", 30), ("gemma3", 10_000)])
def test_hits_up_to_the_budget_are_loaded_within_the_step(models, plain, root, tmp_path, kind, budget_blocks):
    """30 blocks are the hits of two or three prompts, of which each step begins several."""
    noted = tmp_path / "loads"
    budget = {"connector": {"sync_load_budget_bytes": budget_blocks * block_bytes(kind)}, "loads_noted": str(noted)}
    asked = prompts(SEED)
    with engine(models[kind], tmp_path, stack(root, 600, kind), **KINDS[kind], **budget) as vllm:
        cold = vllm.generate(asked)
        vllm.reset()
        noted.write_text("")
        together = vllm.generate(asked)
        loads = Counter(noted.read_text().split())
        vllm.reset()
        noted.write_text("")
        one_by_one = [vllm.generate([prompt]) for prompt in asked]
        alone = Counter(noted.read_text().split())
    print(kind, budget_blocks, loads, alone)
    assert cold.tokens == together.tokens == plain[kind].tokens
    assert [answer.tokens[0] for answer in one_by_one] == plain[kind].tokens
    assert sum(together.cached) > 0.95 * sum(len(prompt) // BLOCK * BLOCK for prompt in asked)
    if not budget_blocks:
        assert not loads["within"] + alone["within"]
        assert min(loads["between"], loads["waiting"], alone["waiting"]) > 0
    elif budget_blocks == 30:
        assert min(loads["within"], loads["between"]) > 0
        assert alone["within"] == len(asked)
        assert not alone["waiting"] + alone["between"], "a prompt's hits alone are always within the budget"
    else:
        assert min(loads["within"], alone["within"]) > 0
        assert not any(each[word] for each in (loads, alone) for word in ("between", "waiting"))
