"""What the simulator found, kept as small tests of the production code."""

from __future__ import annotations

import asyncio
import errno
import shutil

import pytest
from support_fs import keys as fs_keys
from support_fs import open_tier, options
from support_stack import PLAIN, Engine, keys, opened, parts_of, stack_file, store, whole
from support_stack_tiers import LOAD, STORE, MemoryTier, backends

from kvtier.errors import RootError
from kvtier.types.jobs import DropReason, dropped
from kvtier_fs.local.folder import SlabFolder
from kvtier_fs.local.opening import Hooks
from simulator.seed_run import run_seed


def over_memory(engine: Engine, rows: int, **options: object):
    config = stack_file(PLAIN, rows, {"type": "memory", **options}, backends=backends())
    parts = parts_of(config, engine, backends(), close_timeout_seconds=2.0)
    tier = parts.tiers[-1]
    assert isinstance(tier, MemoryTier)
    return parts, tier


async def test_closing_over_a_smaller_tier_writes_each_row_once():
    """Closing once evicted below what it had just written, owed it again, and went round until its deadline."""
    engine = Engine(PLAIN, 16)
    parts, tier = over_memory(engine, rows=16, slots=4, write_policy="on_evict")
    async with opened(parts) as stack:
        await store(stack, engine, whole(keys(16)))
        before = tier.begun.count(STORE)
    assert tier.begun.count(STORE) - before <= 16
    assert stack.stats().tiers["memory"].stored <= 16


async def test_a_load_cancelled_while_the_stack_closes_leaves_no_error_behind():
    """The copy outlived the stack: the load's future was failed when nobody was left to look at it."""
    engine = Engine(PLAIN, 16)
    parts, _ = over_memory(engine, rows=16)
    unseen: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unseen.append(context))
    cpu = parts.tiers[1]
    gate = asyncio.Event()
    copy = cpu.load

    async def slow(job):
        await gate.wait()
        return await copy(job)

    cpu.load = slow
    async with opened(parts) as stack:
        await store(stack, engine, whole(keys(4)))
        loading = asyncio.ensure_future(stack.run(stack.job(LOAD, [whole(keys(4))])))
        await asyncio.sleep(0)
        loading.cancel()
        await asyncio.sleep(0)
    gate.set()
    await asyncio.wait((loading,))
    assert loading.cancelled()
    del loading
    await asyncio.sleep(0)
    assert not unseen


async def test_nothing_is_written_for_an_epoch_that_is_not_durable(tmp_path):
    """A reset that failed left blocks of its epoch on disk; the next process gave that epoch out again."""
    broken = False

    class Folder(SlabFolder):
        def write_superblock(self, copy: bytes) -> None:
            if broken:
                raise OSError(errno.EIO, "broken")
            super().write_superblock(copy)

    names = fs_keys(4)
    async with open_tier(options(tmp_path / "root"), hooks=Hooks(folder=Folder)) as tier:
        await tier.store_all(names[:2])
        broken = True
        with pytest.raises(RootError):
            await tier.backend.reset(1)
        tier.epoch = 1
        assert await tier.store(names[2:]) == [dropped(DropReason.RESET)] * 2
        shutil.copytree(tmp_path / "root", tmp_path / "killed")
        broken = False
        await tier.backend.reset(1)
        assert all(outcome.ok for outcome in await tier.store(names[2:])), "a reset that holds ends it"
    async with open_tier(options(tmp_path / "killed")) as tier:
        assert tier.epoch == 0
        await tier.backend.reset(1)
        shutil.copytree(tmp_path / "killed", tmp_path / "killed again")
    async with open_tier(options(tmp_path / "killed again")) as tier:
        assert (tier.epoch, list(tier.opened.recovered.keys)) == (1, [])


def test_a_store_that_waits_for_rows_offers_the_ones_it_has_once():
    """Each step it made them dirty for a disk whose policy then refused them, and never came to an end."""
    assert not run_seed(277).violations


def test_a_job_that_waits_for_a_copy_is_not_lost_by_the_copies_of_others():
    assert not run_seed(4001210, "files").violations


def test_no_tier_answers_a_lookup_of_a_new_epoch_by_its_old_one():
    """The reset of a tier began a turn of the loop after a lookup that was sent later."""
    assert not run_seed(28753182770000073, "files").violations


@pytest.mark.parametrize(("seed", "layout"), [(20058103670000048, "slab"), (30559790510000017, "files")])
def test_two_calls_that_wait_for_progress_do_not_wake_each_other_without_end(seed, layout):
    """`drain` and `close` at once ran in turns until the close timed out."""
    assert not run_seed(seed, layout).violations
