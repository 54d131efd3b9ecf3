"""Engines that divide a root among them, and what stays on the disk when their number changes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import support_fs as support
from support_protections_fs import without_leftovers

from kvtier.tier.inspection import Access
from kvtier.types.keys import OffloadKey
from kvtier_fs.inspect.local import LocalInspection
from kvtier_fs.local.folder import SlabFolder
from kvtier_fs.local.opening import remove_leftovers
from kvtier_fs.options import FSOptions

CAPACITY = 2 << 20


def options(root: Path, **more: object) -> FSOptions:
    return support.options(root, capacity=CAPACITY, **more)


async def run(given: FSOptions, engines: int, first: int = 0) -> list[str]:
    """Start the engines one after the other, fill and close each. Returns the notes of all of them."""
    notes = []
    for index in range(first, engines):
        async with support.open_tier(given.share(index, engines)) as tier:
            notes += tier.opened.notes
            await fill(tier)
    return notes


async def fill(tier: support.Tier) -> list[OffloadKey]:
    """Take every slot that is free. Returns the keys that were stored."""
    regions, slots = tier.space.num_regions, tier.space.region_bytes // tier.space.slot_bytes[0]
    keys = support.keys(regions * slots - len(tier.directory), start=1000 * len(tier.directory))
    await tier.store_all(keys)
    return keys


def held(folder: Path) -> dict[str, int]:
    """Bytes of disk by the name of a folder."""
    return {
        path.name: sum(file.stat().st_blocks * 512 for file in path.iterdir())
        for path in sorted(folder.iterdir())
        if path.is_dir()
    }


def forget_source(root: Path) -> None:
    """As an earlier release writes its lock file."""
    record = json.loads((root / "lock").read_text())
    del record["source"]
    (root / "lock").write_text(json.dumps(record))


@pytest.mark.parametrize("steps", [(4, 2, 1), (1, 4), (4, 1, 2), (3, 2, 3, 1)])
async def test_what_an_earlier_number_of_engines_left_is_removed(tmp_path: Path, steps: tuple[int, ...]) -> None:
    for engines in steps:
        notes = await run(options(tmp_path / "dp"), engines)
        kept = held(tmp_path)
        names = ["dp"] if engines == 1 else [f"dp-{index}" for index in range(engines)]
        assert list(kept) == names
        assert sum(kept.values()) <= CAPACITY
        assert "perhaps" not in "".join(notes)
    assert any("removed: an earlier configuration" in note for note in notes)


async def test_without_the_removal_the_bound_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_leftovers(monkeypatch)
    for engines in (4, 2, 1):
        await run(options(tmp_path / "dp"), engines)
    assert sum(held(tmp_path).values()) > CAPACITY


async def test_a_folder_of_an_earlier_release_is_named_and_stays(tmp_path: Path) -> None:
    await run(options(tmp_path / "dp"), 3)
    for index in range(3):
        forget_source(tmp_path / f"dp-{index}")
    before = held(tmp_path)
    (note,) = await run(options(tmp_path / "dp"), 1)
    assert "perhaps left by an earlier configuration" in note
    assert note.endswith(f"rm -r {tmp_path}/dp-0 {tmp_path}/dp-1 {tmp_path}/dp-2")
    assert "KiB" in note or "MiB" in note
    assert before.items() <= held(tmp_path).items()


async def test_a_folder_that_names_another_source_stays(tmp_path: Path) -> None:
    """A stack file of another stack may name a root `dp-0`; a record of `dp` as its source makes it ours."""
    await run(options(tmp_path / "dp-0"), 1)
    (note,) = await run(options(tmp_path / "dp"), 1)
    assert "perhaps" in note
    assert set(held(tmp_path)) == {"dp", "dp-0"}


async def test_a_folder_in_use_stays_until_it_is_free(tmp_path: Path) -> None:
    given = options(tmp_path / "dp")
    async with support.open_tier(given.share(1, 2)) as old:
        keys = await fill(old)
        notes = await run(given, 1)
        assert any("still in use by an engine of an earlier configuration" in note for note in notes)
        assert all(outcome.ok for outcome in await old.load_all(keys))
    assert "dp-1" in held(tmp_path)
    await run(given, 1)
    assert list(held(tmp_path)) == ["dp"]


async def test_another_stacks_folder_that_is_in_use_is_not_named(tmp_path: Path) -> None:
    async with support.open_tier(options(tmp_path / "dp-0")):
        assert await run(options(tmp_path / "dp"), 1) == []


async def test_files_of_others_keep_a_folder(tmp_path: Path) -> None:
    await run(options(tmp_path / "dp"), 2)
    (tmp_path / "dp-1" / "notes.txt").write_text("precious")
    notes = await run(options(tmp_path / "dp"), 1)
    assert any("holds files of others too" in note for note in notes)
    assert (tmp_path / "dp-1" / "notes.txt").read_text() == "precious"
    assert "dp-0" not in held(tmp_path)


async def test_a_link_beside_the_root_is_not_followed(tmp_path: Path) -> None:
    for name in ("far", "near"):
        (tmp_path / name).mkdir()
    await run(options(tmp_path / "far" / "dp"), 2)
    (tmp_path / "near" / "dp-1").symlink_to(tmp_path / "far" / "dp-1")
    assert await run(options(tmp_path / "near" / "dp"), 1) == []
    assert set(held(tmp_path / "far")) == {"dp-0", "dp-1"}


async def test_a_removal_that_was_cut_short_is_ended_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the order of its steps a folder names its source until nothing else is in it."""
    async with support.open_tier(options(tmp_path / "dp").share(1, 2)) as tier:
        await fill(tier)
    unlink = SlabFolder.unlink
    for _ in os.listdir(tmp_path / "dp-1"):
        assert "lock" in os.listdir(tmp_path / "dp-1")
        left = iter((1,))

        def killed_after_one(self: SlabFolder, name: str, left: Iterator[int] = left) -> None:
            if not next(left, 0):
                raise OSError(5, "killed")
            unlink(self, name)

        with monkeypatch.context() as cut:
            cut.setattr(SlabFolder, "unlink", killed_after_one)
            remove_leftovers(str(tmp_path / "dp"), options(tmp_path / "dp"))
    assert not (tmp_path / "dp-1").exists()


async def test_the_source_stays_recorded_when_a_tool_owns_the_root(tmp_path: Path) -> None:
    await run(options(tmp_path / "dp"), 2)
    inspection = LocalInspection.inspect(str(tmp_path / "dp-1"), Access.CHANGE)
    assert inspection is not None
    inspection.close()
    await run(options(tmp_path / "dp"), 1)
    assert list(held(tmp_path)) == ["dp"]
