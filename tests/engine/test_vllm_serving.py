"""The real vLLM serves from kvtier: the same tokens as without it, from every tier, over restarts and kills."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from engines import BLOCK, HERE, Answer, engine, prompts, stack

pytestmark = pytest.mark.engine
KINDS = {
    "llama": {},
    "gemma3": {"disable_hybrid_kv_cache_manager": False},
}
SEED = 11


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    """The small models, each made once."""
    folder = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        subprocess.run([sys.executable, str(HERE / "support_models.py"), kind, str(folder / kind)], check=True)
    return {kind: folder / kind for kind in KINDS}


@pytest.fixture(scope="session")
def plain(models, tmp_path_factory) -> dict[str, Answer]:
    """What vLLM says without kvtier."""
    folder = tmp_path_factory.mktemp("plain")
    found = {}
    for kind, config in KINDS.items():
        with engine(models[kind], folder, **config) as vllm:
            found[kind] = vllm.generate(prompts(SEED))
        assert len({tuple(tokens) for tokens in found[kind].tokens}) == 24, "the model must tell prompts apart"
    return found


@pytest.fixture
def root(tmp_path) -> Path:
    """A folder for the filesystem tier."""
    folder = tmp_path / "root"
    folder.mkdir(mode=0o700)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_every_tier_gives_the_same_tokens(models, plain, root, tmp_path, kind):
    everything = sum(len(prompt) // BLOCK * BLOCK for prompt in prompts(SEED))
    with engine(models[kind], tmp_path, stack(root, 600, kind), **KINDS[kind]) as vllm:
        cold = vllm.generate(prompts(SEED))
        vllm.reset()
        from_cpu = vllm.generate(prompts(SEED))
    with engine(models[kind], tmp_path, stack(root, 600, kind), **KINDS[kind]) as vllm:
        restarted = vllm.generate(prompts(SEED))
    with engine(models[kind], tmp_path, stack(root, 32, kind), **KINDS[kind]) as vllm:
        small = vllm.generate(prompts(SEED))
        vllm.reset()
        again = vllm.generate(prompts(SEED))
    for answer in (cold, from_cpu, restarted, small, again):
        assert answer.tokens == plain[kind].tokens
    assert sum(from_cpu.cached) > 0.95 * everything
    assert sum(restarted.cached) >= sum(from_cpu.cached)
    assert sum(small.cached) >= 0.95 * sum(restarted.cached)
    assert sum(again.cached) >= 0.95 * sum(restarted.cached)
    print(kind, [sum(a.cached) for a in (plain[kind], cold, from_cpu, restarted, small, again)], "of", everything)
