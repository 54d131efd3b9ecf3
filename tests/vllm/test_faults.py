"""The real vLLM on a bad day: rotten bytes, a root that goes, a full disk, SIGKILL, prefixes too long for the CPU tier.

The engine lives, and says what it says without kvtier.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
from engines import BLOCK, SEED, VOCABULARY, Engine, engine, prompts, stack

from kvtier.tier.block_envelope import SLOT_MAGIC

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]  # each step of an engine has a deadline of its own


def rot(root: Path, every: int) -> int:
    """Flip a byte in the payload of every so many slots; returns how many."""
    hurt = found = 0
    for slab in sorted(root.glob("slab-*")):
        with slab.open("r+b") as file:
            size = os.fstat(file.fileno()).st_size
            for offset in range(0, size, 4096):
                file.seek(offset)
                if file.read(len(SLOT_MAGIC)) != SLOT_MAGIC:
                    continue
                found += 1
                if found % every == 0:
                    file.seek(offset + 4096 + 1000)
                    byte = file.read(1)
                    file.seek(offset + 4096 + 1000)
                    file.write(bytes([byte[0] ^ 0x10]))
                    hurt += 1
    return hurt


def generate_on_and_on(vllm: Engine) -> None:
    for seed in range(SEED, SEED + 100):
        vllm.generate(prompts(seed))


def allocated(root: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in root.iterdir())


def test_rotten_slots_cost_hits_and_nothing_else(models, plain, root, tmp_path):
    with engine(models["llama"], tmp_path, stack(root, 600)) as vllm:
        vllm.generate(prompts(SEED))
    assert rot(root, every=3) > 10
    with engine(models["llama"], tmp_path, stack(root, 600)) as vllm:
        answer = vllm.generate(prompts(SEED))
        vllm.reset()
        again = vllm.generate(prompts(SEED))
        told = vllm.metrics()
        shutil.rmtree(root)
        vllm.reset()
        without_a_root = vllm.generate(prompts(SEED) + prompts(SEED + 1))
    assert answer.tokens == again.tokens == plain["llama"].tokens
    assert without_a_root.tokens[:24] == plain["llama"].tokens
    assert 0 < sum(answer.cached) < sum(again.cached)
    corrupt = [
        value for name, value in told.items() if name.startswith("kvtier_block_errors_total") and "corrupt" in name
    ]
    assert sum(corrupt) > 0, told


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system takes root")
def test_a_full_disk_costs_hits_and_nothing_else(models, plain, root, tmp_path):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m,mode=0700", "kvtier-test", str(root)], check=True)
    try:
        place = root / "tier"
        with engine(models["llama"], tmp_path, stack(place, 64, capacity="64MiB", min_free_bytes=0)) as vllm:
            (root / "ballast").write_bytes(bytes(4 << 20))
            cold = vllm.generate(prompts(SEED))
            vllm.reset()
            again = vllm.generate(prompts(SEED))
            told = vllm.metrics()
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)
    assert cold.tokens == again.tokens == plain["llama"].tokens
    gone = {
        name: value
        for name, value in told.items()
        if name.startswith(("kvtier_dropped_blocks_total", "kvtier_evicted_blocks_total")) and "tier=fs" in name
    }
    assert sum(gone.values()) > 0, told  # what found no room was dropped, or others were evicted for it


def test_killed_while_it_stores_it_comes_back_with_the_same_tokens(models, plain, root, tmp_path):
    capacity = 24 << 20
    for delay in (0.05, 0.4, 1.0):
        with engine(models["llama"], tmp_path, stack(root, 600, capacity=str(capacity))) as vllm:
            threading.Timer(delay, vllm.kill).start()
            with pytest.raises((AssertionError, ConnectionError)):
                generate_on_and_on(vllm)
        assert allocated(root) <= capacity
    with engine(models["llama"], tmp_path, stack(root, 600, capacity=str(capacity))) as vllm:
        assert vllm.generate(prompts(SEED)).tokens == plain["llama"].tokens
    assert allocated(root) <= capacity


def test_a_prefix_longer_than_the_cpu_tier_is_truncated_and_no_request_starves(models, root, tmp_path):
    rng = random.Random(SEED)
    long = [rng.randrange(3, VOCABULARY) for _ in range(60 * BLOCK)]
    asked = [[*long, *(rng.randrange(3, VOCABULARY) for _ in range(20))] for _ in range(10)]
    with engine(models["llama"], tmp_path, stack(root, 128)) as vllm:
        expected = [vllm.generate([prompt]).tokens[0] for prompt in asked]
    with engine(models["llama"], tmp_path, stack(root, 8)) as vllm:
        alone = vllm.generate(asked[:1])
        vllm.reset()
        together = vllm.generate(asked)
    assert alone.cached == [8 * BLOCK]
    assert alone.tokens == expected[:1]
    assert together.tokens == expected


def test_requests_that_share_a_prefix_do_not_wait_for_each_other(models, root, tmp_path):
    rng = random.Random(SEED)
    shared = [rng.randrange(3, VOCABULARY) for _ in range(8 * BLOCK)]
    asked = [[*shared, *(rng.randrange(3, VOCABULARY) for _ in range(40))] for _ in range(16)]
    with engine(models["llama"], tmp_path, stack(root, 64)) as vllm:
        expected = vllm.generate(asked)
        vllm.reset()
        from_cpu = vllm.generate(asked)
    with engine(models["llama"], tmp_path, stack(root, 12)) as vllm:
        from_disk = vllm.generate(asked)
    for answer in (from_cpu, from_disk):
        assert answer.tokens == expected.tokens
        assert answer.cached == [8 * BLOCK] * 16
