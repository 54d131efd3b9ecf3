"""`max_age` of the tier `fs`: a block that is too old is neither loaded nor found again, whatever a clock did."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support_fs import keys, open_tier, options
from support_stack import PLAIN, Engine, fs, load, opened, parts_of, stack_file, statuses, store, whole
from support_stack import keys as stack_keys

from kvtier.control.tiers.aged_tier import AgedTier
from kvtier.stack.assembly import StackParts
from kvtier.stack.tier_stack import TierStack
from kvtier.tier.inspection import Access
from kvtier.types.jobs import LOADED, MISSING
from kvtier_fs import FSBackend
from kvtier_fs.inspect.local import LocalInspection
from kvtier_fs.local.opening import Hooks

DAY_NS = 86400 * 10**9
NAMES = keys(4)


class Clock:
    """A wall clock that tests set, in days."""

    def __init__(self) -> None:
        self.day = 20000.0

    def __call__(self) -> int:
        return int(self.day * DAY_NS)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def tier_at(path: Path, clock: Clock, max_age: str | None = "7d"):
    changes = {} if max_age is None else {"max_age": max_age}
    return open_tier(options(path, **changes), hooks=Hooks(wall_ns=clock))


async def put(tier, clock: Clock, *names) -> None:
    """Store blocks as the control plane would now."""
    tier.generation = clock()
    await tier.store_all(names)


async def test_a_load_of_a_block_that_is_too_old_reads_nothing(tmp_path, clock):
    async with tier_at(tmp_path / "root", clock) as tier:
        await put(tier, clock, *NAMES[:2])
        clock.day += 2
        await put(tier, clock, *NAMES[2:])
        assert await tier.load(NAMES) == [LOADED] * 4
        clock.day += 5.1
        assert await tier.load(NAMES) == [MISSING, MISSING, LOADED, LOADED]
        assert (tier.rows.view[:2] == 0xEE).all()
        assert tier.backend.counters["expired"] == 2
        clock.day += 2
        assert await tier.load(NAMES) == [MISSING] * 4, "also if not one is left"


@pytest.mark.parametrize("killed", [False, True], ids=["closed", "killed"])
async def test_it_is_not_found_after_a_restart(tmp_path, clock, killed):
    async with tier_at(tmp_path / "root", clock) as tier:
        await put(tier, clock, *NAMES[:3])
        clock.day += 6
        await put(tier, clock, NAMES[3])
        if killed:
            shutil.copytree(tmp_path / "root", tmp_path / "dead")
    root = tmp_path / ("dead" if killed else "root")
    clock.day += 1.5
    async with tier_at(root, clock) as tier:
        assert tier.backend.counters["open.snapshot"] == (not killed)
        assert list(tier.opened.recovered.keys) == [NAMES[3]]
        assert await tier.load(NAMES[3:]) == [LOADED]


async def test_an_old_copy_of_a_key_does_not_hide_a_young_one(tmp_path, clock):
    """A copy that a clock far ahead stored has the larger generation; it does not count, so it must not win."""
    async with tier_at(tmp_path / "root", clock) as tier:
        clock.day += 365
        await put(tier, clock, NAMES[0])
        clock.day -= 365
        tier.directory[b"the first copy"] = tier.directory.pop(NAMES[0])
        await put(tier, clock, NAMES[0])
        young = tier.directory[NAMES[0]]
    async with tier_at(tmp_path / "root", clock) as tier:
        assert tier.directory == {NAMES[0]: young}
        assert await tier.load(NAMES[:1]) == [LOADED]


async def test_blocks_of_unknown_age_are_not_used_and_a_limit_can_be_taken_away(tmp_path, clock):
    """Generations were counted at first, and are in stores of earlier versions."""
    async with tier_at(tmp_path / "root", clock, None) as tier:
        await tier.store_all(NAMES[:2])
        assert [tier.directory[name][1] for name in NAMES[:2]] == [1, 2]
        await put(tier, clock, *NAMES[2:])
    async with tier_at(tmp_path / "root", clock) as tier:
        assert list(tier.opened.recovered.keys) == NAMES[2:]
    clock.day += 30
    async with tier_at(tmp_path / "root", clock) as tier:
        assert list(tier.opened.recovered.keys) == []
    async with tier_at(tmp_path / "root", clock, None) as tier:
        assert list(tier.opened.recovered.keys) == NAMES
        assert await tier.load(NAMES) == [LOADED] * 4


# -- the whole stack -------------------------------------------------------------------------------------------------


def stack_parts_at(root: Path, engine: Engine, clock: Clock, **more: object) -> StackParts:
    parts = parts_of(stack_file(PLAIN, 4, fs(root, **more)), engine)
    (tier,) = [tier for tier in parts.tiers if isinstance(tier, FSBackend)]
    tier._hooks = Hooks(wall_ns=clock)
    return parts


async def stored(stack: TierStack, engine: Engine, names) -> None:
    for start in range(0, len(names), 4):
        assert statuses(await store(stack, engine, whole(names[start : start + 4]))) == ["stored"] * 4
    assert await stack.drain(20)


@pytest.mark.parametrize("max_age", ["7d", None])
async def test_a_stack_stores_the_time_with_every_block_and_keeps_to_the_limit(tmp_path, clock, max_age):
    engine, limit = Engine(PLAIN, 16), {} if max_age is None else {"max_age": max_age}
    first, second, third = stack_keys(8), stack_keys(8, start=100), stack_keys(4, start=200)
    async with opened(stack_parts_at(tmp_path / "r", engine, clock, **limit)) as stack:
        await stored(stack, engine, first)
        clock.day += 4
        await stored(stack, engine, second)
        assert stack.locate(first + second[:4]) == ["fs"] * 12
    inspection = LocalInspection.inspect(str(tmp_path / "r"), Access.READ)
    days = sorted(block.stored_at / 86400 for step in inspection.blocks() for block in step.blocks)
    inspection.close()
    assert days == pytest.approx([20000.0] * 8 + [20004.0] * 8)
    clock.day += 2.9
    kept = 8 if max_age is None else 0
    async with opened(stack_parts_at(tmp_path / "r", engine, clock, **limit)) as stack:
        assert stack.locate(first + second) == ["fs"] * 16
        clock.day += 0.2
        await stored(stack, engine, third)
        assert stack.locate(first) == ["fs" if kept else None] * 8
        assert statuses(await load(stack, engine, whole(first[:4]))) == ["loaded" if kept else "missing"] * 4
        assert statuses(await load(stack, engine, whole(second[:4]))) == ["loaded"] * 4
        tier = stack._assembled.plane.control.lowers[0].owned
        if isinstance(tier, AgedTier):
            assert stack.stats().tiers["fs"].expired == 8
            clock.day += 10
            tier.reclaim(tier.reclaim_at)
            assert stack.stats().tiers["fs"].used_bytes == 0
