"""Whole stacks over an object store in a folder: few questions for a prompt, and right bytes or a miss all the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
from support_objects import Folder, names
from support_stack import PLAIN, Engine, keys, load, opened, parts_of, stack_file, statuses, store, whole

from kvtier.tier.contract import LookupResult
from kvtier.types.keys import OffloadKey
from kvtier_remote.names import key_digest
from kvtier_remote.objects.tier import ObjectBackend

BLOCKS = 48


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[OffloadKey]:
    """Every key that a tier is asked for."""
    found: list[OffloadKey] = []
    lookup = ObjectBackend.lookup

    async def recorded(self: ObjectBackend, wanted: Sequence[OffloadKey]) -> Sequence[LookupResult]:
        found.extend(wanted)
        return await lookup(self, wanted)

    monkeypatch.setattr(ObjectBackend, "lookup", recorded)
    return found


def host(folder: Path, engine: Engine):
    """A stack with eight rows above a bucket of its own kind."""
    parts = parts_of(stack_file(PLAIN, 8), engine, lookup_timeout_seconds=40.0)
    return opened(dataclasses.replace(parts, tiers=[*parts.tiers, Folder(folder).tier(prefix="team")]))


async def hits(stack, wanted: Sequence[OffloadKey]) -> int:
    found = [result is not LookupResult.MISS for result in await stack.lookup(wanted)]
    return found.index(False) if False in found else len(found)


async def test_a_prompt_is_found_with_few_questions_and_holes_are_misses(tmp_path, asked):
    engine, prompt = Engine(PLAIN, BLOCKS), keys(BLOCKS)
    async with host(tmp_path, engine) as one:
        for start in range(0, 40, 8):
            await store(one, engine, whole(prompt[start : start + 8], start))
            assert await one.drain(60)
        assert one.stats().tiers["local"].stored == 40
    asked.clear()
    async with host(tmp_path, engine) as other:
        assert await hits(other, prompt) == 40
        assert len(asked) <= 12
        for key in (prompt[20], prompt[21]):
            digits = key_digest(key).hex()
            (name,) = [name for name in names(Folder(tmp_path).store) if name.endswith(digits)]
            (tmp_path / name).unlink()
        loaded = []
        for start in range(0, 40, 8):
            engine.wipe()
            loaded += statuses(await load(other, engine, whole(prompt[start : start + 8], start)))
        assert [n for n, status in enumerate(loaded) if status != "loaded"] == [20, 21]
        assert await hits(other, prompt) == 20
