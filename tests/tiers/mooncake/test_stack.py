"""Whole stacks and a replay over a real pool: what the disk evicted, two hosts, resets, and every tier hit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support_hosts import host, loaded, stored
from support_mooncake import Pool
from support_replay import run
from support_stack import PLAIN, Engine, keys

pytestmark = [pytest.mark.remote, pytest.mark.mooncake]


def mooncake(pool: Pool, prefix: str) -> dict[str, object]:
    """The entry of a stack file; a slow machine gets time."""
    times = {"request_timeout_seconds": 20, "job_timeout_seconds": 40}
    return {"type": "mooncake", "master": pool.address, "staging": "16MiB", "prefix": prefix} | times


async def test_what_the_disk_has_evicted_is_loaded_from_the_pool(pool, tmp_path):
    engine, names = Engine(PLAIN, 80), keys(80)
    async with host(mooncake(pool, "evicted"), engine, tmp_path / "fs") as stack:
        await stored(stack, engine, names)
        assert await loaded(stack, engine, names[::-1]) == 80
        tiers = stack.stats().tiers
        assert tiers["mooncake"].hits
        assert tiers["fs"].hits


async def test_two_hosts_share_what_one_stored_and_a_reset_is_obeyed_by_each_after_its_own(pool, tmp_path):
    engine, old, new = Engine(PLAIN, 24), keys(8), keys(8, start=100)
    entry = mooncake(pool, "hosts")
    async with host(entry, engine, tmp_path / "a") as one, host(entry, engine, tmp_path / "b") as other:
        await stored(one, engine, old)
        assert await loaded(other, engine, old) == 8
        await one.reset()
        assert await loaded(one, engine, old) == 0
        await stored(one, engine, new)
        await other.reset()
        assert await loaded(other, engine, old) == 0
        assert await loaded(other, engine, new) == 8
    async with host(entry, engine) as third:
        assert await loaded(third, engine, old) == 0
        assert await loaded(third, engine, new) == 8


def test_a_replay_hits_every_tier_and_compares_every_byte(pool, tmp_path: Path):
    tier = ", ".join(f"{name}: {value!r}" for name, value in mooncake(pool, "replay").items())
    stack, path = tmp_path / "stack.yaml", tmp_path / "figures.json"
    disk = f"{{type: fs, roots: [{tmp_path / 'fs'}], capacity: 64MiB}}"
    stack.write_text(f"tiers:\n- {{type: cpu, cpu_bytes_to_use: 64MiB}}\n- {disk}\n- {{{tier}}}\n")
    sizes = ("--block-bytes", "4KiB", "--requests", "120", "--cpu-blocks", "200", "--fs-blocks", "600")
    result = run(str(stack), *sizes, "--json", str(path))
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    assert list(found["hit_tokens"]) == ["gpu", "cpu", "fs", "mooncake"]
    assert all(found["hit_tokens"].values()), found["hit_tokens"]
    assert (found["blocks"]["mismatched"], found["blocks"]["dropped"]) == (0, 0)
