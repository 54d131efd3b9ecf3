"""How many tiers a stack takes, and what a shared tier must be able to do."""

from __future__ import annotations

import dataclasses
import re

import pytest
from support_stack import PLAIN, Engine, keys, load, opened, parts_of, stack_file, statuses, store, whole
from support_stack_tiers import SharedTier, backends

from kvtier.errors import ConfigError


async def test_eight_lower_tiers_all_get_every_block():
    engine, names = Engine(PLAIN, 16), keys(6)
    lowers = [{"type": "memory", "name": f"m{i}"} for i in range(8)]
    parts = parts_of(stack_file(PLAIN, 4, *lowers, backends=backends()), engine, backends())
    async with opened(parts) as stack:
        for start in (0, 3):
            assert statuses(await store(stack, engine, whole(names[start : start + 3], start))) == ["stored"] * 3
            assert await stack.drain(20)
        assert {key for key, *_ in parts.tiers[-1].kept.values()} == set(names)
        assert all(tier.kept.keys() == parts.tiers[2].kept.keys() for tier in parts.tiers[2:])
        engine.wipe()
        assert statuses(await load(stack, engine, whole(names[:3]))) == ["loaded"] * 3


async def test_a_ninth_lower_tier_is_refused_before_anything_is_opened():
    engine = Engine(PLAIN, 8)
    lowers = [{"type": "memory", "name": f"m{i}"} for i in range(8)]
    parts = parts_of(stack_file(PLAIN, 4, *lowers, backends=backends()), engine, backends())
    parts = dataclasses.replace(parts, tiers=[*parts.tiers, parts.tiers[-1]])
    with pytest.raises(ConfigError, match="at most 8 tiers below the CPU tier"):
        async with opened(parts):
            pass
    assert parts.tiers[-1].context is None


@pytest.mark.parametrize("ability", ["reset(epoch)", "lookup(keys)"])
async def test_a_shared_tier_that_lacks_an_ability_is_refused_and_closed(ability):
    engine = Engine(PLAIN, 8)
    parts = parts_of(stack_file(PLAIN, 4, {"type": "shared"}, backends=backends()), engine, backends())

    lacking = type("Lacking", (SharedTier,), {ability.split("(")[0]: None})
    tier = lacking(parts.tiers[-1].options)
    with pytest.raises(ConfigError, match=re.escape(f"shared and has no {ability}")):
        async with opened(dataclasses.replace(parts, tiers=[*parts.tiers[:-1], tier])):
            pass
    assert tier.closes >= 1
