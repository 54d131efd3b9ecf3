"""The real vLLM computes what a slow disk has, and loads it again once the disk is fast."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from engines import BLOCK, SEED, Engine, engine, prompts, stack, total, wait_for_figure
from support_paths import PROJECT
from support_service import stack_process

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]
ROWS = 64
COMPUTED_SOONER = "kvtier_computed_sooner_blocks_total"


def cached(vllm: Engine, asked: list[list[int]]) -> list[int]:
    """The cached tokens of prompts that vLLM itself does not have any more, one after another."""
    found = []
    for prompt in asked:
        vllm.reset()
        found += vllm.generate([prompt], tokens=1).cached
    return found


def counted(vllm: Engine) -> float:
    return total(vllm.metrics(), COMPUTED_SOONER)


@contextmanager
def slow_disk(
    models: dict[str, Path], folder: Path, short: str, slowness: Path, config: dict[str, Any]
) -> Iterator[Engine]:
    """An engine at a service whose disk takes so many seconds more a block as the file says."""
    file, path = folder / "stack.yaml", f"{short}/service"
    file.write_text(yaml.safe_dump(config))
    slow = f"""
import sys; sys.path[:0] = [{str(PROJECT)!r}]
from pathlib import Path
from benchmarks.vllm_processes import slow_loads
slow_loads(lambda: float(Path({str(slowness)!r}).read_text()))
"""
    with (
        stack_process(file, path, slow),
        engine(models["llama"], folder, str(file), connector={"service": path}) as vllm,
    ):
        yield vllm


def test_the_speed_of_the_engine_is_measured(models, plain, root, tmp_path, short_folder):
    """The disk takes half a second a block, more than any machine takes to compute one; nobody says what that is."""
    slowness, asked = tmp_path / "slowness", prompts(SEED)
    slowness.write_text("0.5")
    config = stack(root, ROWS) | {"prefill_tokens_per_second": "measured"}
    with slow_disk(models, tmp_path, short_folder, slowness, config) as vllm:
        cold = [vllm.generate([prompt]).tokens[0] for prompt in asked]
        slow = cached(vllm, asked[:10])
        computed = wait_for_figure(vllm, COMPUTED_SOONER, 11)
    print(slow, computed)
    assert cold == plain["llama"].tokens
    assert slow[0] >= 8 * BLOCK, "nothing is known of the disk before its first load"
    assert all(tokens <= 6 * BLOCK for tokens in slow[3:]), "the shared prefixes are in rows, the rest is on the disk"


def test_a_slow_disk_is_not_waited_for_and_used_again_when_it_is_fast(models, plain, root, tmp_path, short_folder):
    """The engine is said to take 20 ms a block, the disk takes none, then 200 ms, then none again."""
    slowness, asked = tmp_path / "slowness", prompts(SEED)
    slowness.write_text("0")
    config = stack(root, ROWS) | {"prefill_tokens_per_second": BLOCK / 0.02}
    with slow_disk(models, tmp_path, short_folder, slowness, config) as vllm:
        cold = [vllm.generate([prompt]).tokens[0] for prompt in asked]
        fast = cached(vllm, asked)
        assert counted(vllm) == 0
        slowness.write_text("0.2")
        slow = cached(vllm, asked)
        begun = time.monotonic()
        tokens = vllm.generate(asked[:4]).tokens
        computed = wait_for_figure(vllm, COMPUTED_SOONER, 21)
        slowness.write_text("0")
        again: list[int] = []
        while not again or (sum(again[-8:]) < 0.9 * sum(fast[-8:]) and time.monotonic() < begun + 200):
            again += cached(vllm, asked[-8:])
    print(fast, slow, again, computed, time.monotonic() - begun)
    assert cold == plain["llama"].tokens
    assert tokens == plain["llama"].tokens[:4]
    assert all(tokens >= 8 * BLOCK for tokens in fast), "no hit of a fast disk is lost"
    assert all(tokens <= 6 * BLOCK for tokens in slow[10:]), "the shared prefixes are in rows, the rest is on the disk"
    assert sum(again[-8:]) >= 0.9 * sum(fast[-8:]), "the disk is fast, and its blocks are not hit"
