"""The power fails, or the process is killed, at every step of a session's life: nothing from before a reset returns."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support_fs import bytes_on_disk, keys, layout, open_tier, options
from support_fs_power import Recorder, put

from kvtier.errors import RootDamagedError
from kvtier_fs.format.superblock import COPY_BYTES

MIB = 1 << 20
SHAPE = layout(4096)
OLD, LATER, NEW = keys(6), keys(4, start=100), keys(4, start=200)


@pytest.fixture
def folder(tmp_path) -> Iterator[Path]:
    """Where images are opened: in memory where there is such a place, for their flushes need not reach a disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as name:
        yield Path(name)


class Life:
    """A session that was recorded, and the moments after which its promises hold."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.begun = self.reset = self.closed = -1

    @property
    def moments(self) -> range:
        return range(len(self.recorder.events) + 1)


async def live(root: Path, old: bool, syncs: bool = True, rotten: int | None = None) -> Life:
    """Open, store, reset, store, close, all of it recorded; over a root that was closed in order if `old`, whose
    superblock has a damaged byte at `rotten`."""
    if old:
        async with open_tier(options(root, capacity=MIB), SHAPE) as tier:
            await tier.store_all(OLD)
    if rotten is not None:
        data = bytearray((root / "superblock").read_bytes())
        data[rotten] ^= 1
        (root / "superblock").write_bytes(data)
    life = Life(Recorder(root, syncs))
    async with open_tier(options(root, capacity=MIB), SHAPE, hooks=life.recorder.hooks()) as tier:
        life.begun = len(life.recorder.events)
        assert list(tier.opened.recovered.keys) == (OLD if old else [])
        await tier.store_all(LATER)
        await tier.backend.reset(1)
        life.reset = len(life.recorder.events)
        tier.epoch = 1
        tier.directory.clear()
        await tier.store_all(NEW)
    life.closed = len(life.recorder.events)
    return life


async def after(image: dict[str, bytes], root: Path, was_reset: bool) -> int:
    """Open what was left, compare every byte that counts as loaded, close. Returns the blocks loaded."""
    put(image, root)
    async with open_tier(options(root, capacity=MIB), SHAPE) as tier:
        found = list(tier.opened.recovered.keys)
        if was_reset:
            assert not set(found) & {*OLD, *LATER}, "a block from before the reset is back"
            assert tier.opened.epoch == 1
        loaded = sum(outcome.ok for outcome in await tier.load_all(found))
        await tier.store_all(keys(2, start=300))
    assert bytes_on_disk(root) <= MIB
    shutil.rmtree(root)
    return loaded


@pytest.mark.parametrize("old", [True, False], ids=["a clean root", "a new root"])
async def test_after_a_reset_nothing_older_is_found_whatever_was_not_flushed(tmp_path, folder, seed, old, dial):
    """A quick run opens every second image."""
    rng = random.Random(seed)
    life = await live(tmp_path / "root", old)
    assert 0 < life.begun < life.reset < life.closed == len(life.recorder.events)
    loaded = images = opened = 0
    step = dial(1, 2)
    for moment in life.moments:
        for image in life.recorder.images(moment, rng):
            images += 1
            if images % step:
                continue
            opened += 1
            loaded += await after(image, folder / "after", moment >= life.reset)
    assert images > 3 * len(life.moments)
    assert loaded > (opened if old else 10), "images hold blocks to compare"


@pytest.mark.parametrize("rotten", [None, 100, COPY_BYTES + 100])
async def test_before_the_session_began_everything_is_as_it_was(tmp_path, folder, seed, rotten):
    """Until the superblock says that the root is in use, the old snapshot may serve; it must be right. A copy of the
    superblock that is damaged is written before the one that counts."""
    rng = random.Random(seed)
    life = await live(tmp_path / "root", True, rotten=rotten)
    for moment in range(life.begun + 1):
        for image in life.recorder.images(moment, rng):
            assert await after(image, folder / "after", False) == len(OLD)


async def test_without_its_flushes_the_reset_does_not_hold(tmp_path, folder, seed):
    """The harness proves itself: a reset that does not flush is caught. Where not even the superblock reached the disk
    the root is left as it is."""
    rng = random.Random(seed)
    life = await live(tmp_path / "root", True, syncs=False)
    assert life.reset > 0
    caught = 0
    for image in life.recorder.images(life.reset, rng):
        put(image, folder / "after")
        with suppress(RootDamagedError):
            async with open_tier(options(folder / "after", capacity=MIB), SHAPE) as tier:
                caught += bool(set(tier.opened.recovered.keys) & {*OLD, *LATER})
        shutil.rmtree(folder / "after")
    assert caught > 0
