"""Hints in the real vLLM: what a session retains survives a flood, and comes up before the session's next turn."""

from __future__ import annotations

from typing import Any

import pytest
from engines import BLOCK, SEED, Engine, block_bytes, engine, prompts, stack, total, wait_for_figure

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]
ROWS = 48
RETAINED = ("retain", {"seconds": 300.0, "session": "agent"})
FLOOD = prompts(SEED + 1, count=32, prefixes=32)
"""As many prefixes as prompts: none has a block of another."""


def whole(prompt: list[int]) -> int:
    """The tokens of a prompt that can be cached."""
    return len(prompt) // BLOCK * BLOCK


def figure(vllm: Engine, name: str, label: str = "") -> float:
    return total(vllm.metrics(), name, label)


def flood(vllm: Engine) -> None:
    """At least four times the rows, and twice the disk."""
    assert sum(whole(prompt) // BLOCK for prompt in FLOOD) >= 4 * ROWS
    for prompt in FLOOD:
        vllm.generate([prompt], tokens=1)
    vllm.reset()


def small_stack(root: Any, *, disk: bool) -> dict[str, Any]:
    described = stack(root, ROWS, capacity="16MiB", region_bytes="2MiB")
    return described if disk else described | {"tiers": described["tiers"][:1]}


@pytest.mark.parametrize("disk", [True, False])
@pytest.mark.parametrize("http", [True, False])
def test_what_a_session_retains_survives_a_flood_and_quotas_hold(models, root, tmp_path, disk, http):
    agent, other, third = prompts(SEED, count=3, prefixes=3)
    with engine(models["llama"], tmp_path, small_stack(root, disk=disk)) as vllm:
        computed = vllm.generate([other]).tokens + vllm.generate([agent], hints=[RETAINED], http=http).tokens
        vllm.generate([third], hints=[("retain", {"seconds": 300.0, "session": "third"})], http=http)
        flood(vllm)
        quota = {"cpu": ROWS // 4 * block_bytes("llama"), "fs": 8 << 20}
        kept = {tier: figure(vllm, "kvtier_retained_bytes", f"tier={tier}") for tier in quota}
        refused = figure(vllm, "kvtier_refused_hint_blocks_total", "over_quota")
        later = [vllm.generate([prompt], tokens=8) for prompt in (other, agent)]
    print(f"disk {disk}, http {http}: retained {kept}, refused {refused}, cached {[each.cached for each in later]}")
    assert [each.tokens[0] for each in later] == computed
    assert later[0].cached == [0], "without a hint nothing is left of a prompt"
    assert later[1].cached == [whole(agent)]
    assert sum(kept.values()) > 0
    assert all(kept[tier] <= quota[tier] for tier in quota)
    assert refused > 0 or disk, "the rows have room for a part of the third prompt"


def test_a_session_is_in_rows_again_before_its_next_turn(models, root, tmp_path):
    agent, tiny = prompts(SEED, count=1)[0], [5, 6, 7]
    with engine(models["llama"], tmp_path, stack(root, ROWS)) as vllm:
        computed = vllm.generate([agent], hints=[RETAINED]).tokens
        flood(vllm)
        before = figure(vllm, "kvtier_hit_blocks_total", "tier=fs")
        vllm.generate([tiny], tokens=1, hints=[("prefetch", {"session": "agent"})], http=True)
        prefetched = wait_for_figure(vllm, "kvtier_prefetched_blocks_total", whole(agent) // BLOCK)
        turn = vllm.generate([agent], hints=[("release", {"session": "agent"})])
        hits = figure(vllm, "kvtier_hit_blocks_total", "tier=fs") - before
        kept = figure(vllm, "kvtier_retained_bytes")
    print(f"prefetched {prefetched}, cached {turn.cached}, hits on disk {hits}, retained {kept}")
    assert turn.tokens == computed
    assert turn.cached == [whole(agent)]
    assert hits == 0
    assert kept == 0
