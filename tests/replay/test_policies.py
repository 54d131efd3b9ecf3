"""What LRU and ARC hit in a replay through the whole stack, to the block."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support_replay import run

UNHURRIED = {"load_timeout_seconds": 600, "store_timeout_seconds": 600}
WORKLOAD = ("--workload", "chat", "--requests", "120", "--block-bytes", "4KiB")
SIZES = ("--cpu-blocks", "120", "--fs-blocks", "400")


@pytest.mark.parametrize(
    ("policy", "hit_tokens", "stored", "block_hits"),
    [
        ("lru", {"gpu": 67_248, "cpu": 640, "fs": 21_088}, 3_842, 5_561),
        ("arc", {"gpu": 67_248, "cpu": 2_176, "fs": 18_416}, 3_812, 5_051),
    ],
)
def test_policies_that_do_not_follow_requests_hit_what_they_always_did(
    tmp_path: Path, policy: str, hit_tokens: dict[str, int], stored: int, block_hits: int
) -> None:
    """The same on any machine: nothing is late, and no transfer is under way when the loop decides."""
    figures, stack = tmp_path / "figures.json", tmp_path / "stack.yaml"
    cpu = {"type": "cpu", "cpu_bytes_to_use": "2GiB"}
    fs = {"type": "fs", "roots": [str(tmp_path / "disk")], "capacity": "8GiB", "job_timeout_seconds": 600}
    stack.write_text(json.dumps(UNHURRIED | {"tiers": [{"type": "gpu"}, cpu, fs]}))
    result = run(str(stack), *WORKLOAD, *SIZES, "--policy", policy, "--json", str(figures))
    assert result.exit_code == 0, result.output
    found = json.loads(figures.read_text())
    assert (found["hit_tokens"], found["blocks"]["stored"], found["block_hits"]) == (hit_tokens, stored, block_hits)
