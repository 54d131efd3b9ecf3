"""Rows suit every tier of a stack: the least common multiple of what tiers declare and what their devices answer."""

from __future__ import annotations

import math
import mmap

import pytest
from support_stack import HYBRID, PLAIN, Engine, fs, keys, load, opened, parts_of, stack_file, statuses, store, whole
from support_stack_tiers import backends

from kvtier.config import build_tiers
from kvtier.errors import GeometryError
from kvtier.stack import TierStack
from kvtier.stack.assembly import resolve_alignment
from kvtier.types.geometry import Geometry
from kvtier.types.jobs import TransferJob

WIDE, PROBED = 3 * 4096, 16384


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([], mmap.PAGESIZE),
        (["memory"], mmap.PAGESIZE),
        (["wide"], math.lcm(mmap.PAGESIZE, WIDE)),
        (["probed"], math.lcm(mmap.PAGESIZE, PROBED)),
        (["wide", "probed"], math.lcm(mmap.PAGESIZE, WIDE, PROBED)),
    ],
)
async def test_the_stack_takes_the_least_common_multiple(kinds, expected):
    engine = Engine(HYBRID, 64)
    lowers = [{"type": kind, "name": f"tier-{i}"} for i, kind in enumerate(kinds)]
    config = stack_file(HYBRID, 8, *lowers, backends=backends(), alignment=expected)
    assert await resolve_alignment(build_tiers(config, backends())) == expected
    parts = parts_of(config, engine, backends())
    async with opened(parts) as stack:
        assert stack.geometry == Geometry(HYBRID, expected)
        assert stack.geometry.row_bytes % expected == 0
        for tier in parts.tiers[2:]:
            assert tier.rows.row_bytes == stack.geometry.row_bytes
            assert tier.rows.view.ctypes.data % mmap.PAGESIZE == 0
        names = [keys(3, 0), keys(2, 1)]
        stored = await store(stack, engine, whole(names[0], 0, 4), whole(names[1], 12, 4))
        assert statuses(stored) == ["stored"] * 5
        assert await stack.drain(10)
        engine.wipe()
        assert statuses(await load(stack, engine, whole(names[0], 0, 4), whole(names[1], 12, 4))) == ["loaded"] * 5


async def test_a_wide_tier_beside_a_real_disk_moves_the_same_bytes(tmp_path):
    engine = Engine(HYBRID, 64)
    lowers = [{"type": "wide"}, fs(tmp_path / "r", capacity=4 << 20, direct="auto", io_engine="auto")]
    names = [keys(6, 0), keys(6, 1)]
    config = stack_file(HYBRID, 4, *lowers, backends=backends(), alignment=WIDE)
    for session in range(2):
        async with opened(parts_of(config, engine, backends())) as stack:
            assert stack.geometry.alignment % WIDE == 0
            if session == 0:
                for start in range(0, 6, 2):
                    for group in (0, 1):
                        await store(stack, engine, whole(names[group][start : start + 2], 0, 4))
                        assert await stack.drain(10)
            engine.wipe()
            result = await load(stack, engine, whole(names[0], 0, 4), whole(names[1], 24, 4))
            assert statuses(result) == ["loaded"] * 12


async def test_alignment_costs_blocks_and_never_bytes():
    engine = Engine(PLAIN, 64)
    lower = {"type": "wide"}
    config = stack_file(PLAIN, 16, lower, backends=backends())
    assert config.tiers[1].cpu_bytes_to_use == 16 * 4096
    parts = parts_of(config, engine, backends())
    async with opened(parts) as stack:
        tier = parts.tiers[-1]
        assert tier.rows.num_rows == 16 * 4096 // WIDE
        assert tier.rows.num_rows * tier.rows.row_bytes <= 16 * 4096
        assert stack.stats().tiers["cpu"].capacity_bytes == 16 * 4096


async def test_a_budget_below_one_aligned_row_names_the_bytes_it_needs():
    engine = Engine(PLAIN, 64)
    config = stack_file(PLAIN, 2, {"type": "wide"}, backends=backends())
    with pytest.raises(GeometryError, match=f"one block needs {WIDE}"):
        await TierStack(parts_of(config, engine, backends())).open()


async def test_what_a_block_does_not_use_of_its_row_is_zero_below():
    engine = Engine(HYBRID, 64)
    config = stack_file(HYBRID, 8, {"type": "wide"}, backends=backends(), alignment=WIDE)
    parts = parts_of(config, engine, backends())
    tier = parts.tiers[-1]
    async with opened(parts) as stack:
        for turn in range(4):
            group = turn % 2
            await store(stack, engine, whole(keys(8, group, 8 * turn), 0, 4))
            assert await stack.drain(10)
            for key, _, row, _ in tier.kept.values():
                used = stack.geometry.kv_bytes_per_offloaded_block(int.from_bytes(key[-4:], "big"))
                aligned = stack.geometry.aligned_bytes(int.from_bytes(key[-4:], "big"))
                assert row[:used].any()
                assert not row[used:aligned].any(), "padding that reaches a lower tier is zero"


async def test_a_tier_only_sees_jobs_of_rows_and_slots_it_was_told_of():
    engine = Engine(PLAIN, 64)
    config = stack_file(PLAIN, 8, {"type": "memory", "slots": 16}, backends=backends())
    parts = parts_of(config, engine, backends())
    tier = parts.tiers[-1]
    seen: list[TransferJob] = []

    def watch(call):
        async def watched(job):
            seen.append(job)
            return await call(job)

        return watched

    tier.store, tier.load = watch(tier.store), watch(tier.load)
    async with opened(parts) as stack:
        for start in range(0, 40, 8):
            await store(stack, engine, whole(keys(8, start=start)))
            assert await stack.drain(10)
        await load(stack, engine, whole(keys(40)))
    assert seen
    for job in seen:
        assert job.deadline is not None
        for group in job.groups:
            assert len(group.keys) == len(group.rows) == len(group.slots) == len(group.generations)
            assert len(set(group.slots)) == len(group.slots)
            assert 0 <= min(group.slots) <= max(group.slots) < 16
            assert 0 <= min(group.rows) <= max(group.rows) < 8
