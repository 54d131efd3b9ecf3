"""What is restored is what was saved, bit for bit, as far as it can be vouched for, and the model goes on from it as if
it had never been away."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from support_stack import until
from support_transformers import (
    bits,
    content,
    first_tokens,
    forward,
    gemma,
    llama,
    needs_transformers,
    new_cache,
    prefill,
    prompt,
    same_bytes,
    stack,
)

import kvtier
from kvtier.engines.transformers import AsyncPrefixCache, cache_argument

pytestmark = needs_transformers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("factor", [1, 4])
async def test_a_restored_prefix_has_the_same_bits_and_gives_the_same_logits(dtype: torch.dtype, factor: int) -> None:
    model, tokens = llama(dtype=dtype), prompt(150)
    computed = new_cache()
    prefill(model, tokens, computed)
    async with AsyncPrefixCache(stack(block_size_factor=factor), model, block_size=8) as prefixes:
        unit = 8 * factor
        assert await prefixes.save(tokens, computed) == 150 // unit * unit
        restored, count = await prefixes.restore(tokens)
    assert count == 149 // unit * unit
    kept = first_tokens(computed, count)
    assert same_bytes(restored, kept)
    assert torch.equal(prefill(model, tokens, restored), prefill(model, tokens, kept))
    assert same_bytes(restored, kept)


async def test_a_prefix_comes_back_from_the_disk_after_the_stack_was_closed(tmp_path: Path) -> None:
    model, tokens = llama(), prompt(150)
    computed = new_cache()
    prefill(model, tokens, computed)
    async with AsyncPrefixCache(stack(tmp_path / "root"), model) as prefixes:
        assert await prefixes.save(tokens, computed) == 144
    async with AsyncPrefixCache(stack(tmp_path / "root"), llama()) as prefixes:
        restored, count = await prefixes.restore(tokens)
        assert prefixes.stats().tiers["fs"].hits == 9
    assert count == 144
    assert same_bytes(restored, first_tokens(computed, 144))


async def test_generate_goes_on_from_a_restored_prefix() -> None:
    model, tokens = llama(), prompt(100)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(torch.tensor([tokens]), **options)
    async with AsyncPrefixCache(stack(), model) as prefixes:
        for hit in (0, 96):
            cache, count = await prefixes.restore(tokens)
            assert count == hit
            sequence = model.generate(torch.tensor([tokens]), **{cache_argument(model): cache}, **options)
            assert torch.equal(sequence, expected)
            # The cache lacks the token that was sampled last: 111 of 112, six whole blocks.
            assert cache.get_seq_length() == 111
            assert await prefixes.save(sequence, cache) == 96


@pytest.mark.parametrize(("tokens", "hit"), [(0, 0), (1, 0), (16, 0), (17, 16), (32, 16), (33, 32), (95, 80), (96, 80)])
async def test_at_least_one_token_is_left_to_compute(tokens: int, hit: int) -> None:
    model = llama()
    async with AsyncPrefixCache(stack(), model) as prefixes:
        whole = prompt(96)
        assert await prefixes.save(whole, content(whole, prefixes.kv)) == 96
        cache, count = await prefixes.restore(whole[:tokens])
        assert (count, cache.get_seq_length()) == (hit, hit)
        assert not hit or same_bytes(cache, content(whole[:hit], prefixes.kv))


async def test_prompts_share_what_they_have_in_common_and_it_is_stored_once() -> None:
    model = llama()
    async with AsyncPrefixCache(stack(), model) as prefixes:
        system, one, other = prompt(64, seed=1), prompt(40, seed=2), prompt(40, seed=3)
        assert await prefixes.save(system + one, content(system + one, prefixes.kv)) == 96
        assert prefixes.stats().tiers["cpu"].stored == 6
        cache, count = await prefixes.restore(system + other)
        assert count == 64
        assert same_bytes(cache, content(system, prefixes.kv))
        assert await prefixes.save(system + other, content(system + other, prefixes.kv)) == 96
        assert await prefixes.save(system + other, content(system + other, prefixes.kv)) == 96
        assert prefixes.stats().tiers["cpu"].stored == 8


async def test_a_cache_may_hold_less_than_the_tokens_named() -> None:
    async with AsyncPrefixCache(stack(), llama()) as prefixes:
        tokens = prompt(64)
        assert await prefixes.save(tokens, content(tokens[:40], prefixes.kv)) == 32
        assert await prefixes.save(tokens, new_cache()) == 0
        assert (await prefixes.restore(tokens))[1] == 32


async def test_a_salt_keeps_sequences_of_the_same_tokens_apart() -> None:
    async with AsyncPrefixCache(stack(), llama()) as prefixes:
        tokens = prompt(64)
        for salt in (b"one", b"other"):
            assert (await prefixes.restore(tokens, salt))[1] == 0
            assert await prefixes.save(tokens, content(tokens, prefixes.kv, salt), salt) == 64
        for salt in (b"one", b"other"):
            cache, count = await prefixes.restore(tokens, salt)
            assert count == 48
            assert same_bytes(cache, content(tokens[:48], prefixes.kv, salt))
        assert (await prefixes.restore(tokens))[1] == 0


def tuned(model: Any) -> Any:
    """The same model after a training step that changed one number by the least possible."""
    weight = next(iter(model.parameters())).data.view(-1)
    weight[7] = torch.nextafter(weight[7], torch.tensor(100.0))
    return model


CHANGES = {
    "other weights": lambda: (llama(seed=1), 16, ""),
    "a number of the weights": lambda: (tuned(llama()), 16, ""),
    "another type": lambda: (llama(dtype=torch.bfloat16), 16, ""),
    "another shape": lambda: (llama(rope_theta=5000.0), 16, ""),
    "other attention kernels": lambda: (llama(attn_implementation="eager"), 16, ""),
    "another block size": lambda: (llama(), 8, ""),
    "the operator's word for the weights": lambda: (llama(), 16, "step 1000"),
    "nothing": lambda: (llama(), 16, ""),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_whatever_changes_what_the_bytes_mean_is_a_clean_miss(change: str, tmp_path: Path) -> None:
    tokens = prompt(64)
    async with AsyncPrefixCache(stack(tmp_path / "root"), llama()) as prefixes:
        assert await prefixes.save(tokens, content(tokens, prefixes.kv)) == 64
    model, block_size, weights = CHANGES[change]()
    async with AsyncPrefixCache(stack(tmp_path / "root"), model, block_size, weights) as prefixes:
        _, count = await prefixes.restore(tokens)
    assert count == (48 if change == "nothing" else 0)


@pytest.mark.parametrize(("scale", "active", "found"), [(4.0, "a", 48), (16.0, "a", 0), (4.0, "b", 0)])
async def test_an_adapter_of_another_scale_is_another_model(scale, active, found, tmp_path: Path) -> None:
    """PEFT keeps both beside the tensors, which are equal."""

    def adapted(scale: float, active: str) -> Any:
        model = llama()
        for layer in model.model.layers:
            layer.self_attn.k_proj.scaling = {"a": scale}
            layer.self_attn.k_proj._active_adapter = [active]
        return model

    tokens = prompt(64)
    async with AsyncPrefixCache(stack(tmp_path / "root"), adapted(4.0, "a")) as prefixes:
        assert await prefixes.save(tokens, content(tokens, prefixes.kv)) == 64
    async with AsyncPrefixCache(stack(tmp_path / "root"), adapted(scale, active)) as prefixes:
        _, count = await prefixes.restore(tokens)
    assert count == found


async def test_a_corrupt_block_ends_the_prefix_before_it(tmp_path: Path) -> None:
    root, tokens = tmp_path / "root", prompt(200)
    async with AsyncPrefixCache(stack(root), llama()) as prefixes:
        whole = content(tokens, prefixes.kv)
        assert await prefixes.save(tokens, whole) == 192
    spoil(root, bits(whole.layers[1].values[0, 1, 70:75]))
    async with AsyncPrefixCache(stack(root), llama()) as prefixes:
        cache, count = await prefixes.restore(tokens)
        assert count == 64
        assert same_bytes(cache, first_tokens(whole, 64))
        assert prefixes.stats().tiers["fs"].corrupt == 1
        # What was lost is stored again, and nothing else.
        assert await prefixes.save(tokens, whole) == 192
        assert prefixes.stats().tiers["fs"].corrupt == 1
        cache, count = await prefixes.restore(tokens)
        assert count == 192
        assert same_bytes(cache, first_tokens(whole, 192))


def spoil(root: Path, needle: torch.Tensor) -> None:
    """Flip one bit in the middle of the only place in the root that holds these bytes."""
    raw = needle.numpy().tobytes()
    found = [(path, path.read_bytes()) for path in root.rglob("*") if path.is_file()]
    found = [(path, data) for path, data in found if raw in data]
    ((path, data),) = found
    assert data.count(raw) == 1
    with path.open("r+b") as file:
        place = data.index(raw) + len(raw) // 2
        file.seek(place)
        file.write(bytes([data[place] ^ 0x10]))


async def test_a_prefix_longer_than_the_cpu_tier_and_the_staging_pool_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Blocks of 4 KiB: eight of them in the CPU tier, three in the staging pool.
    monkeypatch.setattr("kvtier.engines.transformers.staging.STAGING_BYTES", 3 * 4096 + 1)
    tokens = prompt(16 * 50 + 1)
    async with AsyncPrefixCache(stack(tmp_path / "root", cpu="32KiB"), llama()) as prefixes:
        whole = content(tokens, prefixes.kv)
        assert await prefixes.save(tokens, whole) == 800
        assert await prefixes.drain(20)
        cache, count = await prefixes.restore(tokens)
    assert count == 800
    assert same_bytes(cache, first_tokens(whole, 800))


async def test_holes_that_eviction_left_are_filled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.engines.transformers.staging.STAGING_BYTES", 4 * 4096)
    async with AsyncPrefixCache(stack(cpu="64KiB"), llama()) as prefixes:  # 16 blocks
        long, short = prompt(16 * 12, seed=1), prompt(16 * 9, seed=2)
        for tokens in (long, short, long):
            whole = content(tokens, prefixes.kv)
            assert await prefixes.save(tokens, whole) == len(tokens)
            cache, count = await prefixes.restore([*tokens, 0])
            assert count == len(tokens)
            assert same_bytes(cache, whole)


@pytest.mark.parametrize("way", ["saved at once", "saved in two steps", "restored since"])
async def test_what_is_pushed_out_goes_from_the_end_of_a_prompt(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.engines.transformers.staging.STAGING_BYTES", 4 * 4096)
    async with AsyncPrefixCache(stack(cpu="64KiB"), llama()) as prefixes:  # 16 blocks
        tokens, other = prompt(16 * 12, seed=1), prompt(16 * 9, seed=2)
        for end in (6, 12) if way == "saved in two steps" else (12,):
            assert await prefixes.save(tokens[: 16 * end], content(tokens[: 16 * end], prefixes.kv)) == 16 * end
        if way == "restored since":
            await prefixes.restore([*tokens, 0])
        assert await prefixes.save(other, content(other, prefixes.kv)) == 16 * 9
        cache, count = await prefixes.restore(tokens)
        assert count == 16 * 7
        assert same_bytes(cache, content(tokens[:count], prefixes.kv))


@pytest.mark.parametrize("pool_blocks", [4, 100])
async def test_of_a_prompt_longer_than_all_tiers_the_beginning_is_kept(
    pool_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.engines.transformers.staging.STAGING_BYTES", pool_blocks * 4096)
    async with AsyncPrefixCache(stack(cpu="32KiB"), llama()) as prefixes:  # 8 blocks, nowhere else to go
        tokens = prompt(16 * 30)
        for _ in range(2):
            assert await prefixes.save(tokens, content(tokens, prefixes.kv)) == 128
            cache, count = await prefixes.restore(tokens)
            assert count == 128
            assert same_bytes(cache, content(tokens[:128], prefixes.kv))


async def test_after_a_reset_nothing_comes_back(tmp_path: Path) -> None:
    tokens = prompt(64)
    async with AsyncPrefixCache(stack(tmp_path / "root"), llama()) as prefixes:
        await prefixes.save(tokens, content(tokens, prefixes.kv))
        await prefixes.reset()
        assert (await prefixes.restore(tokens))[1] == 0
        await prefixes.save(tokens, content(tokens, prefixes.kv, generation=1))
    async with AsyncPrefixCache(stack(tmp_path / "root"), llama()) as prefixes:
        cache, count = await prefixes.restore(tokens)
        assert count == 48
        assert same_bytes(cache, content(tokens[:48], prefixes.kv, generation=1))


async def test_tasks_may_save_and_restore_at_once(tmp_path: Path) -> None:
    async with AsyncPrefixCache(stack(tmp_path / "root", cpu="64KiB"), llama()) as prefixes:

        async def chat(number: int) -> None:
            tokens = prompt(40, seed=number % 4)
            for turn in range(4):
                cache, count = await prefixes.restore(tokens)
                assert not count or same_bytes(cache, content(tokens[:count], prefixes.kv))
                await prefixes.save(tokens, content(tokens, prefixes.kv))
                tokens = tokens + prompt(40, seed=number + 10 * turn)

        async with asyncio.TaskGroup() as group:
            for number in range(12):
                group.create_task(chat(number))


@pytest.mark.parametrize("at", range(12))
async def test_a_cancelled_call_leaves_the_others_right(at: int, tmp_path: Path) -> None:
    async with AsyncPrefixCache(stack(tmp_path / "root", cpu="64KiB"), llama()) as prefixes:
        one, other = prompt(400, seed=1), prompt(400, seed=2)
        for tokens in (one, other):
            await prefixes.save(tokens, content(tokens, prefixes.kv))
        third = prompt(400, seed=3)
        tasks = [
            asyncio.create_task(prefixes.restore(one)),
            asyncio.create_task(prefixes.save(third, content(third, prefixes.kv))),
        ]
        for _ in range(at):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for tokens in (one, other, third):
            cache, count = await prefixes.restore(tokens)
            assert not count or same_bytes(cache, content(tokens[:count], prefixes.kv))


async def test_caches_and_restores_work_in_and_out_of_inference_mode() -> None:
    model, tokens = llama(), prompt(64)
    with torch.inference_mode():
        prefixes = AsyncPrefixCache(stack(), model)
        await prefixes.open()
        computed = new_cache()
        forward(model, tokens, computed)
        assert await prefixes.save(tokens[:40], first_tokens(computed, 40)) == 32
    assert await prefixes.save(tokens, computed) == 64
    grown = new_cache()
    forward(model, tokens, grown)
    assert grown.layers[0].keys.requires_grad
    assert await prefixes.save([*tokens[:-1], 1], grown) == 64
    restored, _ = await prefixes.restore(tokens)
    assert not restored.layers[0].keys.is_inference()
    assert same_bytes(restored, first_tokens(computed, 48))
    await prefixes.close()


async def test_layers_with_a_sliding_window_keep_every_token_and_come_back() -> None:
    from transformers import DynamicCache

    model, tokens = gemma(), prompt(100)
    with torch.no_grad():
        expected = forward(model, tokens, DynamicCache(config=model.config))
    async with AsyncPrefixCache(stack(), model) as prefixes:
        cache, count = await prefixes.restore(tokens)
        assert count == 0
        assert torch.equal(prefill(model, tokens, cache), expected)
        assert await prefixes.save(tokens, cache) == 96
        restored, count = await prefixes.restore(tokens)
    assert count == 96
    assert same_bytes(restored, first_tokens(cache, 96))
    logits = prefill(model, tokens, restored)
    assert torch.equal(logits, prefill(model, tokens, first_tokens(cache, 96)))
    assert torch.allclose(logits, expected[:, 96:], atol=1e-4)


async def test_what_a_session_retains_outlasts_a_flood_and_is_in_the_cpu_tier_before_its_next_turn(
    tmp_path: Path,
) -> None:
    """The others' blocks, 16 of 4 KiB a prompt, are four times the disk."""
    agent, disk = prompt(100), 1 << 20
    async with AsyncPrefixCache(stack(tmp_path / "root", cpu="256KiB", capacity=disk), llama()) as prefixes:
        saved = content(agent, prefixes.kv)
        assert await prefixes.save(agent, saved) == 96
        assert prefixes.hint(kvtier.Retain(prefixes.keys(agent), 300.0, "agent")) == kvtier.HintResult(6)
        for number in range(4 * disk // (16 * 4096) + 1):
            other = prompt(16 * 16, seed=number + 1)
            await prefixes.save(other, content(other, prefixes.kv))
            assert await prefixes.drain(20)
        flooded = prefixes.stats().tiers
        assert flooded["fs"].evictions > 0
        assert flooded["fs"].retained_bytes > 0
        assert flooded["cpu"].retained_bytes == 0

        assert prefixes.hint(kvtier.Prefetch(session="agent")) == kvtier.HintResult(6)
        await until(lambda: prefixes.stats().hints.prefetched == 6)
        restored, count = await prefixes.restore(agent)
        assert prefixes.stats().tiers["fs"].hits == 0
        assert prefixes.hint(kvtier.Release("agent")) == kvtier.HintResult(6)
    assert count == 96
    assert same_bytes(restored, first_tokens(saved, 96))
