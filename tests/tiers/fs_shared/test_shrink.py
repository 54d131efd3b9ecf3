"""A root whose capacity was lowered: brought within it at opening, the oldest blocks first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import support_files as support
import support_fs
from support_protections_fs import without_shrinking

from kvtier.types.jobs import BlockStatus
from kvtier_fs.shared import tier as shared_tier
from kvtier_fs.shared.bucket import Bucket

LARGE, SMALL = 8 << 20, 2 << 20
KEYS = support_fs.keys(300)
HOUR = 3600


async def fill(root: Path) -> None:
    """Store every key; those later in the list were used later."""
    async with support.open_files(support.options(root, capacity=LARGE)) as tier:
        await tier.store(KEYS)
        for number, key in enumerate(KEYS):
            path = tier.path(key)
            os.utime(path, (HOUR + number, HOUR + number))


async def test_the_oldest_go_at_opening_and_their_number_is_said(tmp_path: Path) -> None:
    root = tmp_path / "root"
    await fill(root)
    assert support.disk_bytes(root) > SMALL
    async with support.open_files(support.options(root, capacity=SMALL)) as tier:
        assert support.disk_bytes(root) <= SMALL
        kept = [key for key in KEYS if tier.path(key).exists()]
        assert f"{root}: {len(KEYS) - len(kept)} blocks were evicted to keep the capacity" in tier.opened.notes
        assert tier.counters["evicted"] == len(KEYS) - len(kept)
        by_bucket: dict[Path, list[int]] = {}
        for key in kept:
            by_bucket.setdefault(tier.path(key).parent, []).append(KEYS.index(key))
        for folder, numbers in by_bucket.items():
            there = [number for number, key in enumerate(KEYS) if tier.path(key).parent == folder]
            assert sorted(numbers) == there[-len(numbers) :], "the latest of each bucket stay"
        outcomes = await tier.load(kept[-20:])
        assert all(outcome.status is BlockStatus.LOADED for outcome in outcomes)
        assert support.account_is_true(tier)
    async with support.open_files(support.options(root, capacity=SMALL)) as tier:
        assert not any("evicted" in note for note in tier.opened.notes)


async def test_without_it_the_bound_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    await fill(root)
    without_shrinking(monkeypatch)
    async with support.open_files(support.options(root, capacity=SMALL)):
        assert support.disk_bytes(root) > SMALL


async def test_a_bucket_without_an_account_is_counted(tmp_path: Path) -> None:
    root = tmp_path / "root"
    await fill(root)
    for account in root.rglob("account"):
        account.unlink()
    async with support.open_files(support.options(root, capacity=SMALL)):
        assert support.disk_bytes(root) <= SMALL


async def test_an_opening_within_its_capacity_counts_nothing(tmp_path: Path) -> None:
    root = tmp_path / "root"
    await fill(root)
    async with support.open_files(support.options(root, capacity=LARGE)) as tier:
        assert tier.counters["bucket.scanned"] == 0


async def test_an_opening_does_not_wait_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    await fill(root)
    monkeypatch.setattr(shared_tier, "_SHRINK_SECONDS", 0.0)
    async with support.open_files(support.options(root, capacity=SMALL)) as tier:
        assert any("more are being evicted" in note for note in tier.opened.notes)


async def test_a_disk_that_fails_keeps_no_tier_from_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    await fill(root)

    def fails(self: Bucket) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Bucket, "shrink", fails)
    async with support.open_files(support.options(root, capacity=SMALL)) as tier:
        assert tier.counters["shrink.EIO"] > 0
