"""Conversations that branch, over tiers too small for them, with restarts, resets and rot on the disk: whatever comes
back has the right bits."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support_transformers import content, llama, needs_transformers, same_bytes, stack

from kvtier.engines.transformers import AsyncPrefixCache

pytestmark = needs_transformers

BLOCK = 8


class Conversations:
    """Prompts that share beginnings, and which of their blocks were ever saved since the last reset."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.all: list[tuple[int, ...]] = [()]
        self.saved: set[tuple[int, ...]] = set()
        self.generation = 0

    def next(self) -> tuple[int, ...]:
        """An earlier prompt, cut somewhere, and something new after it."""
        old = self.rng.choice(self.all)
        kept = old[: self.rng.randrange(len(old) + 1)] if self.rng.random() < 0.3 else old
        new = (kept + tuple(self.rng.randrange(3) for _ in range(self.rng.randrange(60))))[:300]
        self.all.append(new)
        return new

    def save(self, tokens: tuple[int, ...]) -> None:
        self.saved |= {tokens[:end] for end in range(BLOCK, len(tokens) + 1, BLOCK)}

    def longest(self, tokens: tuple[int, ...]) -> int:
        """How many tokens could come back at most."""
        ends = range(BLOCK, len(tokens), BLOCK)
        return next((end - BLOCK for end in ends if tokens[:end] not in self.saved), ends[-1] if ends else 0)


def rot(root: Path, rng: random.Random) -> None:
    """Flip bits at random places of the slabs, some of them in blocks."""
    for path in (path for path in root.rglob("slab-*") if path.is_file()):
        with path.open("r+b") as file:
            for _ in range(20):
                file.seek(rng.randrange(path.stat().st_size))
                byte = file.read(1)[0]
                file.seek(-1, 1)
                file.write(bytes([byte ^ 1 << rng.randrange(8)]))


@pytest.mark.parametrize("lives", [6, pytest.param(200, marks=pytest.mark.long)])
async def test_random_conversations_never_get_a_wrong_bit(
    lives: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    model, chats = llama(), Conversations(rng)
    monkeypatch.setattr("kvtier.engines.transformers.staging.STAGING_BYTES", 5 * 2048)
    hits = corrupt = 0
    for _ in range(lives):
        # 64 rows of a page; a block of 8 tokens is 2 KiB.
        config = stack(tmp_path / "root", cpu="256KiB", capacity=4 << 20)
        async with AsyncPrefixCache(config, model, BLOCK) as prefixes:
            for _ in range(25):
                tokens = chats.next()
                cache, count = await prefixes.restore(tokens)
                assert count <= chats.longest(tokens)
                expected = content(tokens, prefixes.kv, generation=chats.generation)
                assert not count or same_bytes(cache, content(tokens[:count], prefixes.kv, b"", chats.generation))
                hits += count
                saved = await prefixes.save(tokens, expected)
                assert saved <= len(tokens) // BLOCK * BLOCK
                chats.save(tokens)
                if rng.random() < 0.02:
                    await prefixes.reset()
                    chats.saved.clear()
                    chats.generation += 1
            corrupt += sum(tier.corrupt for tier in prefixes.stats().tiers.values())
        rot(tmp_path / "root", rng)
    print(f"{hits} tokens came back, {corrupt} corrupt blocks were refused")
    assert hits > 100 * lives
