"""What LRU and ARC hit in a replay through the whole stack, to the block."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support_replay import run

WORKLOAD = ("--workload", "chat", "--requests", "120", "--block-bytes", "4KiB")
SIZES = ("--cpu-blocks", "120", "--fs-blocks", "400")


@pytest.mark.parametrize(
    ("policy", "hit_tokens", "stored", "block_hits"),
    [
        ("lru", {"gpu": 67_248, "cpu": 320, "fs": 21_136}, 3_859, 5_544),
        ("arc", {"gpu": 67_248, "cpu": 848, "fs": 20_576}, 3_721, 5_150),
    ],
)
def test_policies_that_do_not_follow_requests_hit_what_they_always_did(
    tmp_path: Path, policy: str, hit_tokens: dict[str, int], stored: int, block_hits: int
) -> None:
    figures = tmp_path / "figures.json"
    result = run(*WORKLOAD, *SIZES, "--policy", policy, "--json", str(figures))
    assert result.exit_code == 0, result.output
    found = json.loads(figures.read_text())
    assert (found["hit_tokens"], found["blocks"]["stored"], found["block_hits"]) == (hit_tokens, stored, block_hits)
