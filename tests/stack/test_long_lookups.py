"""A lookup of a very long prompt in a shared tier: answered in time, with few keys asked and little work in a turn."""

from __future__ import annotations

import asyncio
import sys
from types import FrameType

import pytest
from support_counts import full_alone
from support_driver import ServedStack
from support_stack import PLAIN, Engine, keys, parts_of, stack_file, until
from support_stack_tiers import SharedTier, backends

from faults.stepped import SteppedStack
from kvtier.stack import TierStack
from kvtier.tier.contract import LookupResult

BLOCKS = 62_500
ASKED_MAX = 64
CALLS_MAX = 5_000
"""Calls of Python functions for a lookup of 62,500 keys, whatever it has to wait for."""
PENDING, MISS, RETRY = LookupResult.HIT_PENDING, LookupResult.MISS, LookupResult.RETRY


def over_shared(engine: Engine, **settings: float):
    """(parts, the shared tier) of a stack over a store that answers at once."""
    config = stack_file(PLAIN, 16, {"type": "shared"}, backends=backends())
    parts = parts_of(config, engine, backends(), **settings)
    (tier,) = [tier for tier in parts.tiers if isinstance(tier, SharedTier)]
    return parts, tier


def holds(tier: SharedTier, names: list[bytes]) -> None:
    there = set(names)
    tier.answer_with = lambda key: LookupResult.HIT if key in there else LookupResult.MISS


@pytest.mark.parametrize("stored", [0, 1, 31_250, BLOCKS])
async def test_a_prompt_of_62500_blocks_is_found_by_few_keys_and_with_few_calls(stored):
    engine = Engine(PLAIN, 16)
    parts, tier = over_shared(engine, lookup_timeout_seconds=30.0)
    names = keys(BLOCKS)
    holds(tier, names[:stored])
    calls = 0

    def on_event(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and "/kvtier/" in frame.f_code.co_filename

    async with TierStack(parts) as stack:
        sys.setprofile(on_event)
        try:
            found = await stack.lookup(names)
        finally:
            sys.setprofile(None)
    assert found == [PENDING] * stored + [MISS] * (BLOCKS - stored)
    assert sum(map(len, tier.asked)) <= ASKED_MAX
    assert calls <= CALLS_MAX


async def test_a_prompt_of_few_blocks_is_asked_for_whole_so_holes_are_known():
    parts, tier = over_shared(Engine(PLAIN, 16), lookup_timeout_seconds=30.0)
    names = keys(1000)
    holds(tier, names[::2])
    async with TierStack(parts) as stack:
        found = await stack.lookup(names)
    assert found == [PENDING, MISS] * 500
    assert tier.asked == [names]


@pytest.mark.parametrize("face", [SteppedStack, pytest.param(ServedStack, marks=full_alone())])
def test_an_engine_that_looks_up_step_by_step_finds_the_same(face):
    parts, tier = over_shared(Engine(PLAIN, 16), lookup_timeout_seconds=30.0)
    names = keys(BLOCKS)
    holds(tier, names[:20_000])
    with face(parts) as stack:
        found = stack.lookup(names)
        while RETRY in found:
            stack.step()
            stack.wait(5.0)
            stack.step()
            found = stack.lookup(names)
        assert found == [PENDING] * 20_000 + [MISS] * (BLOCKS - 20_000)
    assert sum(map(len, tier.asked)) <= ASKED_MAX


async def test_a_lookup_that_waits_is_not_repeated_for_answers_to_others(monkeypatch):
    """Many lookups at once: each looks again when something was answered that it waits for."""
    parts, tier = over_shared(Engine(PLAIN, 16), lookup_timeout_seconds=30.0)
    async with TierStack(parts) as stack:
        looked = 0
        look = stack._look

        def counted(*arguments):
            nonlocal looked
            looked += 1
            return look(*arguments)

        monkeypatch.setattr(stack, "_look", counted)
        names = keys(100)
        holds(tier, names)
        tier.answers.clear()
        waiting = [asyncio.ensure_future(stack.lookup([name])) for name in names]
        await until(lambda: len(tier.asked) == 100)
        tier.answers.set()
        assert await asyncio.gather(*waiting) == [[PENDING]] * 100
        assert looked <= 200


async def test_a_lookup_that_waits_ends_with_a_reset():
    parts, tier = over_shared(Engine(PLAIN, 16), lookup_timeout_seconds=30.0)
    async with TierStack(parts) as stack:
        names = keys(2000)
        holds(tier, names)
        tier.answers.clear()
        waiting = asyncio.ensure_future(stack.lookup(names))
        await until(lambda: bool(tier.asked))
        holds(tier, [])
        await stack.reset()
        tier.answers.set()
        assert await asyncio.wait_for(waiting, 20.0) == [MISS] * 2000
