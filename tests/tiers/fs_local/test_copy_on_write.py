"""Copy-on-write file systems: what is overwritten is not kept beside what overwrote it, or one line says so."""

from __future__ import annotations

import errno
import logging
import os
import random
import subprocess
from pathlib import Path

import pytest
from support_disks import small_disk
from support_fs import Tier, keys, open_tier, options

import kvtier_fs.io.syscalls
import kvtier_fs.local.folder
from kvtier_fs import FSOptions

MIB = 1 << 20
CAPACITY = 16 * MIB
COPIED = "copy-on-write"


def used_bytes(mount: Path) -> int:
    """What the file system itself says is taken, once all it does later was done."""
    subprocess.run(["sync", "--file-system", str(mount)], check=True)
    status = os.statvfs(mount)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def make_root(mount: Path, attributes: str) -> None:
    """A root with attributes that what is made in it inherits: `+c` is compression."""
    (mount / "root").mkdir(mode=0o700)
    if attributes:
        subprocess.run(["chattr", attributes, str(mount / "root")], check=True)


async def fill(tier: Tier) -> None:
    """Format every region and store a block into each slot."""
    formats = [tier.format_region(region, 0) for region in range(tier.space.num_regions)]
    names = keys(sum(1 for _ in tier.free_slots(0)))
    for start in range(0, len(names), tier.rows.num_rows):
        assert all(outcome.ok for outcome in await tier.store(names[start : start + tier.rows.num_rows], formats))
        formats = []


async def overwrite(tier: Tier, rng: random.Random) -> None:
    """Store every block again, into the slot of another one, in random order."""
    names = list(tier.directory)
    rng.shuffle(names)
    for start in range(0, len(names), tier.rows.num_rows):
        batch = names[start : start + tier.rows.num_rows]
        for name in batch:
            del tier.directory[name]
        assert all(outcome.ok for outcome in await tier.store(batch))


def roots_settings(mount: Path, **changes: object) -> FSOptions:
    return options(mount / "root", capacity=CAPACITY, region_bytes=4 * MIB, **changes)


@pytest.mark.parametrize(("kind", "mib", "attributes"), [("btrfs", 256, ""), ("btrfs", 256, "+c"), ("xfs", 512, "")])
async def test_overwriting_takes_no_more_than_the_capacity(kind, mib, attributes, seed, caplog):
    rng = random.Random(seed)
    with small_disk(kind, mib=mib) as mount:
        make_root(mount, attributes)
        before = used_bytes(mount)
        for capacity in (CAPACITY, CAPACITY * 2 // 3):
            async with open_tier(roots_settings(mount).model_copy(update={"capacity": capacity})) as tier:
                await fill(tier)
                for _ in range(4):
                    await overwrite(tier, rng)
                    assert used_bytes(mount) - before <= capacity
    assert COPIED not in caplog.text


async def test_slabs_from_before_are_said_to_be_copied(monkeypatch, caplog):
    with small_disk("btrfs", mib=256) as mount, caplog.at_level(logging.WARNING, "kvtier.fs"):
        with monkeypatch.context() as before:
            before.setattr(kvtier_fs.local.folder, "overwrites_in_place", lambda fd: True)
            async with open_tier(roots_settings(mount)) as tier:
                await fill(tier)
        async with open_tier(roots_settings(mount)) as tier:
            assert tier.directory
        (said,) = [record.getMessage() for record in caplog.records if COPIED in record.getMessage()]
        assert str(mount / "root") in said
        caplog.clear()
        for slab in (mount / "root").glob("slab-*"):
            slab.unlink()
        async with open_tier(roots_settings(mount)) as tier:
            assert not tier.directory
            await fill(tier)
        assert COPIED not in caplog.text


async def test_what_cannot_be_switched_over_is_said_once(tmp_path, monkeypatch, caplog):
    """An attribute that the file system refuses: a file system with copy-on-write that does not know it."""
    monkeypatch.setattr(kvtier_fs.io.syscalls, "filesystem_magic", lambda fd: kvtier_fs.io.syscalls.BTRFS_MAGIC)

    def refuse(fd: int, request: int, argument: bytes) -> bytes:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(kvtier_fs.io.syscalls.fcntl, "ioctl", refuse)
    with caplog.at_level(logging.WARNING, "kvtier.fs"):
        async with open_tier(roots_settings(tmp_path)) as tier:
            await fill(tier)
    assert sum(COPIED in record.getMessage() for record in caplog.records) == 1
