"""The capacity holds at every moment, checked from outside after each change: open, store, format, snapshot, close."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from support_counts import full_alone
from support_fs import Tier, bytes_on_disk, layout, open_tier, options
from support_fs_engine import FaultyEngine

from kvtier.types.jobs import LOADED
from kvtier.types.keys import make_key
from kvtier_fs import FSOptions
from kvtier_fs.format.region_header import RegionPlan
from kvtier_fs.io.contract import IORequest
from kvtier_fs.local.folder import SlabFolder
from kvtier_fs.local.opening import Hooks

MIB = 1 << 20


class Watch:
    """Looks at a root's folder after every change and keeps the most it ever held. `during` says what was going on."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.looks = 0
        self.most = 0
        self.during: set[str] = set()

    def look(self, during: str) -> None:
        try:
            self.most = max(self.most, bytes_on_disk(self.root))
        except FileNotFoundError:
            return  # a text was replaced under our eyes
        self.looks += 1
        self.during.add(during)

    def hooks(self) -> Hooks:
        return Hooks(folder=lambda path, settings: _Folder(path, settings, self), engine=lambda root: _Engine(self))


class _Folder(SlabFolder):
    def __init__(self, path: str, settings: FSOptions, watch: Watch) -> None:
        super().__init__(path, settings)
        self._watch = watch

    def open_file(self, name: str, flags: int = os.O_RDWR | os.O_CREAT) -> int:
        fd = super().open_file(name, flags)
        self._watch.look(f"open {name}")
        return fd

    def write_at(self, fd: int, data: bytes, at: int) -> None:
        super().write_at(fd, data, at)
        self._watch.look("write")

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self._watch.look("sync")

    def rename(self, old: str, new: str) -> None:
        super().rename(old, new)
        self._watch.look(f"rename {new}")

    def truncate(self, fd: int, size: int) -> None:
        super().truncate(fd, size)
        self._watch.look("truncate")

    def allocate(self, plan: RegionPlan, region: int) -> int:
        fd = super().allocate(plan, region)
        self._watch.look("allocate")
        return fd


class _Engine(FaultyEngine):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def submit(self, requests: Sequence[IORequest]) -> None:
        super().submit(requests)
        self._watch.look("submit")


async def churn(tier: Tier, rng: random.Random, key_bytes: int) -> None:
    """Format every region, at random for either size, and fill it; then format some again, and fill those."""
    regions = list(range(tier.space.num_regions))
    for region in [*regions, *rng.sample(regions, len(regions) // 2)]:
        group = rng.randrange(2)
        first = region * tier.space.slots_per_region
        gone = range(first, first + tier.space.slots_per_region)
        tier.directory = {key: at for key, at in tier.directory.items() if at[0] not in gone}
        formats = [tier.format_region(region, group)]
        free = sum(1 for _ in tier.free_slots(group))
        while free:
            names = [make_key(rng.randbytes(key_bytes - 4), group) for _ in range(min(free, tier.rows.num_rows))]
            assert all(outcome.ok for outcome in await tier.store(names, formats))
            formats, free = [], sum(1 for _ in tier.free_slots(group))


@pytest.mark.parametrize("capacity", [400_000, 1 * MIB, 3 * MIB + 12345])
@pytest.mark.parametrize("key_bytes", [12, pytest.param(40, marks=full_alone()), 400])
async def test_nothing_ever_grows_past_the_capacity(tmp_path, seed, capacity, key_bytes):
    rng, root = random.Random(seed), tmp_path / "root"
    watch = Watch(root)
    for session, share in enumerate((capacity, capacity, capacity * 2 // 3, capacity)):
        settings = options(root, capacity=share)
        watch.most = 0
        if root.exists() and share < capacity:
            async with open_tier(settings, layout(8192, 4096), tag="smaller"):
                pass  # what is too much goes while the root is opened; from then on the smaller bound holds
        async with open_tier(settings, layout(8192, 4096), tag=f"{session % 2}", hooks=watch.hooks()) as tier:
            await churn(tier, rng, key_bytes)
            await tier.backend.reset(tier.epoch + 1)
            tier.epoch += 1
            tier.directory.clear()
            await churn(tier, rng, key_bytes)
            held = bytes_on_disk(root)
            for group in range(2):
                mine = [key for key in tier.directory if key[-1] == group]
                assert await tier.load_all(mine) == [LOADED] * len(mine)
        assert watch.most <= share, f"{watch.most} bytes in session {session}"
        assert bytes_on_disk(root) <= share
        assert held > share * 0.6
        assert (root / "snapshot").exists() or key_bytes > 40, "keys of 40 bytes always fit"
    expected = {"open superblock", "open lock", "open slab-00000", "write", "sync", "allocate"}
    assert expected <= watch.during
    assert "rename snapshot" in watch.during or key_bytes > 40
    assert watch.looks > 100
