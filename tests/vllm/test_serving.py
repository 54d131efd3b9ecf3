"""The real vLLM serves from kvtier: the same tokens as without it, from every tier, over restarts and kills."""

from __future__ import annotations

import shutil

import pytest
from engines import BLOCK, KINDS, SEED, engine, prompts, secondary, stack, total
from support_valkey import valkey_server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]  # each step of an engine has a deadline of its own


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


@pytest.mark.parametrize("kind", ["llama", pytest.param("gemma3", marks=pytest.mark.long)])
def test_a_server_gives_the_same_tokens_after_the_disk_was_emptied(models, plain, root, tmp_path, kind):
    everything = sum(len(prompt) // BLOCK * BLOCK for prompt in prompts(SEED))
    with valkey_server() as server:
        tier = {"type": "valkey", "servers": [server.address], "tls": False, "connections": 2}
        times = {"request_timeout_seconds": 20.0, "job_timeout_seconds": 40.0}
        below = stack(root, 600, kind) | {"lookup_timeout_seconds": 40.0}
        below["tiers"].append(tier | times)
        with engine(models[kind], tmp_path, below, **KINDS[kind]) as vllm:
            cold = vllm.generate(prompts(SEED))
            vllm.reset()
            from_cpu = vllm.generate(prompts(SEED))
        shutil.rmtree(root)
        root.mkdir(mode=0o700)
        with engine(models[kind], tmp_path, below, **KINDS[kind]) as vllm:
            from_server = vllm.generate(prompts(SEED))
            hits = vllm.metrics()
    assert cold.tokens == from_cpu.tokens == from_server.tokens == plain[kind].tokens
    assert sum(from_server.cached) >= sum(from_cpu.cached) > 0.95 * everything
    loaded = {name: value for name, value in hits.items() if name.startswith("kvtier_loaded_blocks_total{")}
    assert [value > 0 for name, value in loaded.items() if "valkey" in name] == [True], loaded
    assert not any(value for name, value in loaded.items() if "tier=fs" in name), loaded
    print(kind, [sum(answer.cached) for answer in (cold, from_cpu, from_server)], "of", everything, loaded)


def test_an_engine_of_one_process_gives_the_same_tokens(models, plain, root, tmp_path):
    alone = {"environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}}
    with engine(models["llama"], tmp_path, stack(root, 600), **alone) as vllm:
        cold = vllm.generate(prompts(SEED))
        vllm.reset()
        from_cpu = vllm.generate(prompts(SEED))
    with engine(models["llama"], tmp_path, stack(root, 600), **alone) as vllm:
        restarted = vllm.generate(prompts(SEED))
        vllm.reset(tiers=True)  # waits on the thread that also calls the worker
        assert "may have been replaced" not in vllm.log.read_text(errors="replace")
    for answer in (cold, from_cpu, restarted):
        assert answer.tokens == plain["llama"].tokens
    assert sum(restarted.cached) >= sum(from_cpu.cached) > sum(cold.cached)


@pytest.mark.parametrize("kind", ["llama", pytest.param("gemma3", marks=pytest.mark.long)])
def test_two_workers_give_the_same_tokens(models, root, tmp_path, kind):
    config = {"tensor_parallel_size": 2, **KINDS[kind]}
    with engine(models[kind], tmp_path, **config) as vllm:
        expected = vllm.generate(prompts(SEED))
    with engine(models[kind], tmp_path, stack(root, 600, kind), **config) as vllm:
        cold = vllm.generate(prompts(SEED))
        vllm.reset()
        from_cpu = vllm.generate(prompts(SEED))
    with engine(models[kind], tmp_path, stack(root, 32, kind), **config) as vllm:
        from_disk = vllm.generate(prompts(SEED))
        vllm.reset(tiers=True)
        assert "may have been replaced" not in vllm.log.read_text(errors="replace")
    for answer in (cold, from_cpu, from_disk):
        assert answer.tokens == expected.tokens
    assert sum(from_disk.cached) >= 0.95 * sum(from_cpu.cached) > sum(cold.cached)


@pytest.mark.parametrize("kind", KINDS)
def test_with_vllms_own_cache_off_the_tiers_are_hit_and_give_the_same_tokens(models, plain, root, tmp_path, kind):
    asked, expected = prompts(SEED)[:8], plain[kind].tokens[:8]
    config = {"enable_prefix_caching": False, **KINDS[kind]}
    with engine(models[kind], tmp_path, stack(root, 300, kind), **config) as vllm:
        assert vllm.generate(asked).tokens == expected
        again = vllm.generate(asked)
    assert again.tokens == expected
    assert sum(again.cached) > sum(map(len, asked)) / 2


def test_larger_chunks_give_the_same_tokens(models, plain, root, tmp_path):
    chunks = {"connector": {"blocks_per_chunk": 3}}
    with engine(models["gemma3"], tmp_path, stack(root, 200, "gemma3"), **KINDS["gemma3"], **chunks) as vllm:
        cold = vllm.generate(prompts(SEED))
        vllm.reset()
        from_cpu = vllm.generate(prompts(SEED))
    assert cold.tokens == from_cpu.tokens == plain["gemma3"].tokens
    assert sum(from_cpu.cached) > sum(cold.cached)


def test_a_reset_of_the_tiers_forgets_everything(models, plain, root, tmp_path):
    """With processes that vLLM spawned, as it does by itself on a CPU; those of the other tests are forked."""
    spawned = {"environment": {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}}
    with engine(models["llama"], tmp_path, stack(root, 600), **spawned) as vllm:
        cold = vllm.generate(prompts(SEED))
        vllm.reset(tiers=True)
        again = vllm.generate(prompts(SEED))
    assert cold.tokens == again.tokens == plain["llama"].tokens
    assert sum(again.cached) == sum(cold.cached)


@pytest.mark.parametrize(("tier", "place"), [("KVTierFs", "roots"), ("KVTierSharedFs", "root")])
def test_a_disk_below_vllms_own_cpu_tier_gives_the_same_tokens(models, plain, root, tmp_path, tier, place):
    where = {place: [str(root)] if place == "roots" else str(root)}
    everything = sum(len(prompt) // BLOCK * BLOCK for prompt in prompts(SEED))
    with engine(models["llama"], tmp_path, kv_transfer_config=secondary(tier, rows=40, **where)) as vllm:
        together = vllm.generate(prompts(SEED))  # more blocks at once than the CPU tier has: some stay out
        vllm.reset()
        one_by_one = [vllm.generate([prompt]) for prompt in prompts(SEED)]
        vllm.reset()
        again = [vllm.generate([prompt]) for prompt in prompts(SEED)]
        figures = vllm.metrics()
    assert together.tokens == plain["llama"].tokens
    for answers in (one_by_one, again):
        assert [answer.tokens[0] for answer in answers] == plain["llama"].tokens
    loaded = total(figures, "kvtier_loaded_blocks_total", tier)
    assert loaded > 20, "the CPU tier holds 40 blocks, the prompts need three times as many"
    print(tier, [sum(a.cached[0] for a in answers) for answers in (one_by_one, again)], "of", everything, loaded)
    assert sum(answer.cached[0] for answer in again) > 0.95 * everything
