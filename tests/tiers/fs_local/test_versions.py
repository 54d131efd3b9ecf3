"""Other versions, other disks, other people's files: refused or left alone, in words, and never believed."""

from __future__ import annotations

import os
import struct
import tempfile
from pathlib import Path

import pytest
import xxhash
from support_fs import PAGE, keys, layout, open_tier, options, slot_place

from kvtier.errors import RootError
from kvtier.types.geometry import Geometry
from kvtier.types.jobs import LOADED
from kvtier_fs import FSBackend
from kvtier_fs.io.probe import DirectProbe


async def refusal(settings, **changes) -> RootError:
    """What opening raises."""
    with pytest.raises(RootError) as caught:
        async with open_tier(settings, **changes):
            pass
    assert "\n" not in str(caught.value)
    return caught.value


def rewrite(path: Path, at: int, changed_at: int, value: bytes, size: int = 4096) -> None:
    """Change a field of a checked page at an offset of a file, with a checksum that holds."""
    data = bytearray(path.read_bytes())
    page = data[at : at + size]
    page[changed_at : changed_at + len(value)] = value
    page[8:24] = xxhash.xxh3_128_digest(bytes(page[24:]))
    data[at : at + size] = page
    path.write_bytes(data)


def contents(root: Path) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_ino, path.read_bytes()) for path in root.iterdir() if path.name != "lock"}


@pytest.mark.parametrize("copies", [(0,), (4096,), (0, 4096)], ids=["first copy", "second copy", "both"])
async def test_a_superblock_of_another_version_is_refused_and_nothing_is_touched(tmp_path, copies):
    root = tmp_path / "root"
    async with open_tier(options(root)) as tier:
        await tier.store_all(keys(4))
    for at in copies:
        rewrite(root / "superblock", at, 24, struct.pack("<I", 2))
    before = contents(root)
    refused = str(await refusal(options(root)))
    assert "holds format version 2 of layout slab, which this release does not know" in refused
    problems = FSBackend(options(root)).dry_run(Geometry(layout(16384), PAGE), True).problems
    assert "format version 2" in problems[0]
    assert contents(root) == before
    assert "snapshot" in before


async def test_a_flipped_bit_in_the_version_of_one_copy_is_damage_not_another_release(tmp_path):
    root = tmp_path / "root"
    async with open_tier(options(root)) as tier:
        await tier.store_all(keys(4))
    data = bytearray((root / "superblock").read_bytes())
    data[24] ^= 2
    (root / "superblock").write_bytes(data)
    async with open_tier(options(root)) as tier:
        assert list(tier.opened.recovered.keys) == keys(4)


async def test_regions_and_slots_of_another_version_do_not_count_and_are_used_again(tmp_path):
    root, names = tmp_path / "root", keys(6)
    async with open_tier(options(root, capacity="4MiB")) as tier:
        await tier.store_all(names)
        path, offset = slot_place(tier, names[2])
        taken = tier.directory[names[2]][0]
    rewrite(path, offset, 24, struct.pack("<I", 2))
    (root / "snapshot").unlink()
    async with open_tier(options(root, capacity="4MiB")) as tier:
        assert list(tier.opened.recovered.keys) == [*names[:2], *names[3:]]
        await tier.store_all(keys(1, start=50))
        assert tier.directory[keys(1, start=50)[0]][0] == taken
    rewrite(path, 0, 24, struct.pack("<I", 2))
    async with open_tier(options(root, capacity="4MiB")) as tier:
        assert (list(tier.opened.recovered.keys), tier.opened.recovered.formats) == ([], ())
        await tier.store_all(names)
        assert await tier.load_all(names) == [LOADED] * 6


async def test_a_snapshot_of_another_version_does_not_count(tmp_path):
    root = tmp_path / "root"
    async with open_tier(options(root)) as tier:
        await tier.store_all(keys(3))
    rewrite(root / "snapshot", 0, 24, struct.pack("<I", 2), (root / "snapshot").stat().st_size)
    async with open_tier(options(root)) as tier:
        assert tier.backend.counters["open.scan"] == 1
        assert list(tier.opened.recovered.keys) == keys(3)


async def test_a_root_made_for_a_finer_disk_is_refused_on_a_coarser_one(tmp_path, monkeypatch):
    import kvtier_fs.roots.disk

    settings = options(tmp_path / "root", direct="auto", capacity="16MiB")
    coarse = DirectProbe(True, alignment=16384, offset_alignment=16384)
    fine = DirectProbe(False, reason="turned off")
    monkeypatch.setattr(kvtier_fs.roots.disk, "probe_direct", lambda fd: fine)
    async with open_tier(settings, alignment=16384) as tier:
        await tier.store_all(keys(2))
    monkeypatch.setattr(kvtier_fs.roots.disk, "probe_direct", lambda fd: coarse)
    error = await refusal(settings, alignment=16384)
    assert "was laid out for a disk alignment of 4096 bytes, this stack needs 16384" in str(error)


async def test_files_of_others_are_noted_and_never_touched(tmp_path):
    root = tmp_path / "root"
    async with open_tier(options(root)) as tier:
        await tier.store_all(keys(2))
        assert tier.opened.notes == ()
    (root / "precious").write_text("precious")
    (root / "slab-00000.bak").write_text("a copy")
    (root / "folder").mkdir()
    (root / "link").symlink_to(tmp_path)
    (root / "manifest-x.json").symlink_to("/etc/passwd")
    async with open_tier(options(root)) as tier:
        (note,) = tier.opened.notes
        assert (
            "holds files of others, which stay and do not count: 'folder', 'link', 'manifest-x.json' and 2 more" in note
        )
        await tier.store_all(keys(2, start=9))
    left = {path.name for path in root.iterdir()}
    assert {"precious", "slab-00000.bak", "folder", "link", "manifest-x.json"} < left
    assert (root / "precious").read_text() == "precious"


@pytest.mark.parametrize("name", ["snapshot", "snapshot.new"])
async def test_things_planted_where_the_snapshot_goes_are_not_followed(tmp_path, name):
    root, victim = tmp_path / "root", tmp_path / "victim"
    victim.write_text("precious")
    async with open_tier(options(root)) as tier:
        await tier.store_all(keys(2))
    (root / name).unlink(missing_ok=True)
    (root / name).mkdir()
    assert f"{name} is not a plain file; remove it" in str(await refusal(options(root)))
    (root / name).rmdir()
    async with open_tier(options(root)) as tier:
        (root / name).symlink_to(victim)
        await tier.store_all(keys(2, start=9))
    assert victim.read_text() == "precious"
    assert (root / "snapshot").is_file()
    assert not (root / "snapshot").is_symlink()
    async with open_tier(options(root)) as tier:
        assert tier.backend.counters["open.snapshot"] == 1


async def test_a_folder_of_another_user_is_refused():
    if os.geteuid() != 0:
        pytest.skip("needs root to give a folder away")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "root"
        root.mkdir(mode=0o700)
        os.chown(root, 12345, -1)
        assert "belongs to another user (12345)" in str(await refusal(options(root)))
