"""Memory and disk within what was configured, at every moment, as another process sees it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from support_paths import SUPPORT
from support_stack import HYBRID, PLAIN, Engine, fs, keys, load, running, stack_file, store, whole

from kvtier.types.geometry import Geometry

SAMPLER = SUPPORT / "support_stack_sampler.py"


@contextmanager
def watched(*folders: Path):
    """What another process sees of this one meanwhile; filled when the block ends."""
    seen: dict[str, object] = {}
    command = [sys.executable, str(SAMPLER), str(os.getpid()), *map(str, folders)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            assert process.stdout.readline() == "watching\n"
            yield seen
        finally:
            process.stdin.close()
            seen |= json.loads(process.stdout.readline())


@pytest.mark.parametrize("direct", ["auto", "off"])
async def test_a_workload_with_eviction_stays_within_both_bounds(tmp_path, seed, direct):
    rng = random.Random(seed)
    engine, root = Engine(PLAIN, 64), tmp_path / "r"
    capacity, rows = 1 << 20, 16
    universe = keys(400)
    with watched(root) as seen:
        for _ in range(2):
            async with running(stack_file(PLAIN, rows, fs(root, capacity=capacity, direct=direct)), engine) as stack:
                for _ in range(60):
                    await store(stack, engine, whole(rng.sample(universe, 12)))
                    await load(stack, engine, whole(rng.sample(universe, 20), 20))
                    if rng.random() < 0.5:
                        await stack.drain(10)
                stats = stack.stats().tiers
            assert stats["cpu"].peak_bytes <= stats["cpu"].capacity_bytes == rows * 4096
            assert stats["fs"].peak_bytes <= stats["fs"].capacity_bytes <= capacity
        assert stats["cpu"].evictions > 100
        assert stats["fs"].evictions > 50
    assert seen["samples"] >= 5
    assert 0 < seen["allocated"] <= seen["size"] <= rows * 4096
    assert 0.5 * capacity < seen["folders"][str(root)] <= capacity


async def test_regions_of_changing_sizes_on_two_disks_stay_within_their_shares(tmp_path, seed):
    rng = random.Random(seed)
    engine = Engine(HYBRID, 96)
    roots = [tmp_path / "a", tmp_path / "b"]
    capacity, rows = 2 << 20, 8
    names = [keys(200, 0), keys(200, 1)]
    lower = fs(*roots, capacity=capacity, region_bytes=128 << 10)
    budget = rows * Geometry(HYBRID, 4096).row_bytes
    with watched(*roots) as seen:
        async with running(stack_file(HYBRID, rows, lower), engine) as stack:
            for turn in range(80):
                group = turn // 20 % 2
                await store(stack, engine, whole(rng.sample(names[group], 6), 0, 4))
                await stack.drain(10)
                await load(stack, engine, whole(rng.sample(names[1 - group], 12), 40, 4))
            assert stack.stats().tiers["fs"].evictions > 20
    assert seen["samples"] >= 5
    assert seen["size"] <= budget
    for root in roots:
        assert 0.4 * capacity / 2 < seen["folders"][str(root)] <= capacity / 2
