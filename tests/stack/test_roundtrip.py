"""Blocks through all tiers and back: the same bytes or none, and not a byte beside them."""

from __future__ import annotations

import asyncio
import random

import pytest
from support_stack import HYBRID, PLAIN, Engine, fs, keys, load, running, runs_of, stack_file, statuses, store, whole

from kvtier.errors import UsageError
from kvtier.types.arrays import int_array
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import GPUGroup, JobKind, RowGroup

DEVICES = {"the disk, io_uring if it can": {"io_engine": "auto", "direct": "auto"}, "threads, buffered": {}}


@pytest.mark.parametrize("options", DEVICES.values(), ids=DEVICES)
async def test_a_block_comes_back_from_memory_from_disk_and_after_a_restart(tmp_path, options):
    names, engine = keys(40), Engine(PLAIN, 80)
    config = stack_file(PLAIN, 64, fs(tmp_path / "r", **options))
    async with running(config, engine) as stack:
        assert statuses(await store(stack, engine, whole(names))) == ["stored"] * 40
        assert statuses(await load(stack, engine, whole(names, 40))) == ["loaded"] * 40
        assert stack.stats().tiers["cpu"].hits == 40
        assert await stack.drain(20)
        assert stack.stats().tiers["fs"].stored == 40
        others = keys(64, start=40)
        for start in range(0, 64, 32):
            assert statuses(await store(stack, engine, whole(others[start : start + 32]))) == ["stored"] * 32
            assert await stack.drain(20)
        assert stack.locate(names) == ["fs"] * 40
        engine.wipe()
        assert statuses(await load(stack, engine, whole(names, 40))) == ["loaded"] * 40
        assert stack.stats().tiers["fs"].hits == 40
    assert stack.close_report.dropped_blocks == stack.close_report.unfinished_jobs == 0

    engine.wipe()
    async with running(config, engine) as stack:
        assert stack.locate(names) == ["fs"] * 40
        assert statuses(await load(stack, engine, whole(names))) == ["loaded"] * 40
        assert stack.locate(names) == ["cpu"] * 40, "what was loaded has been promoted"


@pytest.mark.parametrize("rows", [1, 2, 8])
async def test_a_prefix_longer_than_the_cpu_tier_streams_through_it(tmp_path, rows):
    names, engine = keys(50), Engine(PLAIN, 50)
    config = stack_file(PLAIN, rows, fs(tmp_path / "r"))
    async with running(config, engine) as stack:
        for start in range(0, 50, rows):
            assert statuses(await store(stack, engine, whole(names[start : start + rows], start))) == ["stored"] * len(
                names[start : start + rows]
            )
            assert await stack.drain(20)
        engine.wipe()
        assert statuses(await load(stack, engine, whole(names))) == ["loaded"] * 50
        engine.wipe()
        assert statuses(await load(stack, engine, whole(names))) == ["loaded"] * 50, "and once more from where it is"
        assert stack.stats().tiers["cpu"].peak_bytes <= rows * 4096


async def test_a_store_longer_than_the_cpu_tier_ends_and_keeps_what_it_says(tmp_path):
    names, engine = keys(50), Engine(PLAIN, 50)
    async with running(stack_file(PLAIN, 4, fs(tmp_path / "r")), engine) as stack:
        result = await store(stack, engine, whole(names))
        assert statuses(result) == ["stored"] * 50
        await stack.drain(20)
        engine.wipe()
        loaded = statuses(await load(stack, engine, whole(names)))
        fs_stats = stack.stats().tiers["fs"]
        assert loaded.count("loaded") >= 50 - fs_stats.dropped.get("backlog", 0)
        assert set(loaded) <= {"loaded", "missing"}


async def test_several_prefixes_longer_than_the_cpu_tier_load_at_once(tmp_path):
    names, engine = keys(90), Engine(PLAIN, 90)
    config = stack_file(PLAIN, 90, fs(tmp_path / "r"))
    async with running(config, engine) as stack:
        await store(stack, engine, whole(names))
    engine.wipe()
    async with running(stack_file(PLAIN, 4, fs(tmp_path / "r")), engine) as stack:
        parts = [whole(names[start : start + 30], start) for start in (0, 30, 60)]
        results = await asyncio.gather(*(load(stack, engine, part) for part in parts))
        assert [statuses(result) for result in results] == [["loaded"] * 30] * 3


async def test_bytes_and_seconds_of_a_job_are_reported(tmp_path):
    names, engine = keys(10), Engine(PLAIN, 10)
    async with running(stack_file(PLAIN, 16, fs(tmp_path / "r")), engine) as stack:
        stored = await store(stack, engine, whole(names))
        assert stored.bytes_moved == 10 * 4096
        assert stored.seconds > 0
        loaded = await load(stack, engine, whole(names))
        assert loaded.bytes_moved == 10 * 4096
        await stack.drain(20)
        assert stack.stats().tiers["fs"].store_bytes == 10 * 4096


def hybrid_load(names: list[list], rng: random.Random) -> list[GPUGroup]:
    """A load as hybrid engines ask for it: a head that begins inside a block, a tail that ends inside one, holes."""
    groups = []
    for group, of_group in enumerate(names):
        factor = HYBRID.block_size_factor
        ids = rng.sample(range(96), len(of_group) * factor)
        pieces = []
        for block in range(len(of_group)):
            subs = list(range(factor))
            if block == 0:
                subs = subs[rng.randint(0, factor - 1) :]
            elif block == len(of_group) - 1:
                subs = subs[: rng.randint(1, factor)]
            elif group == 1 and rng.random() < 0.5:
                hole = rng.randint(0, factor)
                subs = subs[:hole] + subs[hole + 1 :]
            runs: list[list[int]] = []
            for sub in subs:
                if runs and runs[-1][-1] == sub - 1:
                    runs[-1].append(sub)
                else:
                    runs.append([sub])
            pieces += [(block, run[0], [ids[block * factor + sub] for sub in run]) for run in runs]
        groups.append(GPUGroup(group, tuple(of_group), runs_of(pieces)))
    return groups


@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
async def test_a_hybrid_model_through_all_tiers_with_heads_tails_and_holes(tmp_path, seed, strided):
    rng = random.Random(seed)
    engine = Engine(HYBRID, 96, strided)
    names = [keys(12, 0), keys(9, 1)]
    config = stack_file(HYBRID, 64, fs(tmp_path / "r", capacity=4 << 20))
    async with running(config, engine) as stack:
        stored = await store(stack, engine, whole(names[0], 0, 4), whole(names[1], 48, 4))
        assert statuses(stored) == ["stored"] * 21
        assert stored.bytes_moved == 12 * 4 * 1357 + 9 * 4 * 2561
        for where in ("cpu", "fs"):
            if where == "fs":
                assert await stack.drain(20)
                filler = keys(64, 0, start=1000)
                for start in range(0, 64, 16):
                    await store(stack, engine, whole(filler[start : start + 16], 0, 4))
                    assert await stack.drain(20)
                assert set(stack.locate(names[0] + names[1])) == {"fs"}
            for _ in range(6):
                engine.wipe()
                before = engine.snapshot()
                groups = hybrid_load(names, rng)
                result = await load(stack, engine, *groups)
                assert statuses(result) == ["loaded"] * 21
                assert engine.untouched(before, groups), "a byte changed that the job does not name"
    async with running(config, engine) as stack:
        engine.wipe()
        before, groups = engine.snapshot(), hybrid_load(names, rng)
        assert statuses(await load(stack, engine, *groups)) == ["loaded"] * 21
        assert engine.untouched(before, groups)


async def test_the_compact_form_with_an_unaligned_head_is_a_load_like_any_other(tmp_path):
    engine = Engine(HYBRID, 64)
    names = [keys(3, 0), keys(2, 1)]
    async with running(stack_file(HYBRID, 16, fs(tmp_path / "r", capacity=4 << 20)), engine) as stack:
        await store(stack, engine, whole(names[0], 0, 4), whole(names[1], 12, 4))
        engine.wipe()
        runs = [
            GPURuns.consecutive(2, int_array(range(30, 40)), 4),
            GPURuns.consecutive(1, int_array(range(40, 46)), 4),
        ]
        groups = [GPUGroup(g, tuple(names[g]), runs[g]) for g in range(2)]
        assert runs[0].firsts.tolist() == [2, 0, 0]
        assert runs[1].firsts.tolist() == [1, 0]
        before = engine.snapshot()
        assert statuses(await load(stack, engine, *groups)) == ["loaded"] * 5
        assert engine.untouched(before, groups)


async def test_a_block_that_is_not_stored_whole_is_never_found(tmp_path):
    engine = Engine(HYBRID, 64)
    names = keys(3, 0)
    async with running(stack_file(HYBRID, 16, fs(tmp_path / "r", capacity=4 << 20)), engine) as stack:
        partial = GPUGroup(0, tuple(names), runs_of([(0, 1, [1, 2, 3]), (1, 0, [4, 5, 6, 7]), (2, 0, [8])]))
        result = await store(stack, engine, partial)
        assert statuses(result) == ["dropped:partial", "stored", "dropped:partial"]
        await stack.drain(20)
        assert stack.locate(names) == [None, "cpu", None]
        assert stack.stats().tiers["fs"].stored == 1


async def test_what_was_stored_by_one_request_is_not_stored_again(tmp_path):
    names, engine = keys(20), Engine(PLAIN, 40)
    async with running(stack_file(PLAIN, 32, fs(tmp_path / "r")), engine) as stack:
        await store(stack, engine, whole(names[:10]))
        again = await store(stack, engine, whole(names, 20))
        assert statuses(again) == ["present"] * 10 + ["stored"] * 10
        assert again.bytes_moved == 10 * 4096
        both = keys(8, start=100)
        one, two = await asyncio.gather(store(stack, engine, whole(both)), store(stack, engine, whole(both, 20)))
        assert sorted(statuses(one) + statuses(two)) == ["present"] * 8 + ["stored"] * 8


async def test_another_namespace_never_finds_a_block(tmp_path):
    names, engine = keys(10), Engine(PLAIN, 20)
    async with running(stack_file(PLAIN, 16, fs(tmp_path / "r"), namespace="one"), engine) as stack:
        await store(stack, engine, whole(names))
    async with running(stack_file(PLAIN, 16, fs(tmp_path / "r"), namespace="two"), engine) as stack:
        assert stack.locate(names) == [None] * 10
        before = engine.snapshot()
        assert statuses(await load(stack, engine, whole(names, 10))) == ["missing"] * 10
        assert engine.untouched(before, [])
    async with running(stack_file(PLAIN, 16, fs(tmp_path / "r"), namespace="one"), engine) as stack:
        assert statuses(await load(stack, engine, whole(names, 10))) == ["loaded"] * 10


async def test_a_job_against_the_layout_is_a_usage_error_and_moves_nothing(tmp_path):
    engine = Engine(HYBRID, 16)
    names = keys(2, 0)
    async with running(stack_file(HYBRID, 16, fs(tmp_path / "r", capacity=4 << 20)), engine) as stack:
        await store(stack, engine, whole(names, 0, 4))
        before = engine.snapshot()
        bad = {
            "a key of another group": GPUGroup(1, tuple(names), runs_of([(0, 0, [1])])),
            "no such group": GPUGroup(7, tuple(keys(1, 7)), runs_of([(0, 0, [1])])),
            "a block beyond the keys": GPUGroup(0, tuple(names), runs_of([(2, 0, [1])])),
            "a negative block": GPUGroup(0, tuple(names), runs_of([(-1, 0, [1])])),
            "a sub-block beyond the factor": GPUGroup(0, tuple(names), runs_of([(0, 3, [1, 2])])),
            "a negative sub-block": GPUGroup(0, tuple(names), runs_of([(0, -1, [1])])),
            "rows instead of runs": RowGroup(0, tuple(names), [0, 1]),
        }
        for what, one in bad.items():
            for kind in JobKind:
                print(f"{kind} with {what}")
                with pytest.raises(UsageError):
                    await stack.run(stack.job(kind, [one]))
        assert engine.untouched(before, [])
        assert stack.stats().tiers["cpu"].slots["filling"] == 0


async def test_gpu_blocks_that_do_not_exist_fail_their_job_and_no_other(tmp_path, caplog):
    names, engine = keys(4), Engine(PLAIN, 8)
    async with running(stack_file(PLAIN, 16, fs(tmp_path / "r")), engine) as stack:
        await store(stack, engine, whole(names))
        before = engine.snapshot()
        for kind in JobKind:
            wanted = names if kind is JobKind.LOAD else keys(4, start=50)
            result = await stack.run(stack.job(kind, [whole(wanted, 6)]))
            assert statuses(result) == ["failed"] * 4
        assert engine.untouched(before, [])
        assert "raised in a load job" in caplog.text
        assert statuses(await load(stack, engine, whole(names, 4))) == ["loaded"] * 4
