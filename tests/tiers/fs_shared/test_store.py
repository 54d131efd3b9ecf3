"""Layout files: what is stored comes back byte for byte, here, after a reopen and in another process's tier."""

from __future__ import annotations

import os
import stat

import pytest
from support_files import block_files, disk_bytes, open_files, options, temporaries
from support_fs import keys, layout

from kvtier.config import build_tiers, parse_stack
from kvtier.errors import ConfigError, GeometryError, RootError
from kvtier.types.jobs import LOADED, MISSING, PRESENT, STORED, DropReason, dropped
from kvtier.types.keys import make_key
from kvtier_fs import FSBackend, FSOptions, SharedFSBackend, SharedFSOptions
from kvtier_fs.io.uring import probe_uring

ENGINES = [
    "threads",
    pytest.param("io_uring", marks=pytest.mark.skipif(bool(probe_uring()), reason="this machine offers no io_uring")),
]


@pytest.mark.parametrize("direct", ["off", "auto"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("page_bytes", [4096, 65536, 3 << 20])
async def test_what_was_stored_is_loaded_and_found_again(tmp_path, engine, direct, page_bytes):
    settings = options(tmp_path / "root", capacity=256 << 20, io_engine=engine, direct=direct)
    names = keys(16)
    async with open_files(settings, layout(page_bytes), rows=8) as tier:
        assert tier.opened.space is None
        assert tier.opened.mode.startswith(f"files, {engine}")
        assert await tier.present(names) == 0
        assert await tier.load(names) == [MISSING] * 16
        assert await tier.store(names) == [STORED] * 16
        assert await tier.load(names) == [LOADED] * 16
        assert await tier.store(names[:4]) == [PRESENT] * 4
    async with open_files(settings, layout(page_bytes), rows=8) as tier:
        assert await tier.present(names + keys(3, start=100)) == 16
        assert await tier.load(names) == [LOADED] * 16
        assert tier.counters == {}
    assert len(block_files(tmp_path)) == 16
    assert temporaries(tmp_path) == []


async def test_two_open_tiers_on_one_root_see_each_others_blocks(tmp_path):
    settings, names = options(tmp_path / "root"), keys(24)
    async with open_files(settings) as one, open_files(settings) as other:
        assert await one.store(names[:12]) == [STORED] * 12
        assert await other.present(names) == 12
        assert await other.load(names) == [LOADED] * 12 + [MISSING] * 12
        assert await other.store(names) == [PRESENT] * 12 + [STORED] * 12
        assert await one.present(names) == 24
        assert await one.load(names) == [LOADED] * 24


async def test_groups_and_namespaces_lie_side_by_side(tmp_path):
    settings, shape = options(tmp_path / "root", capacity=16 << 20), layout(16384, 4096)
    first, second = keys(8), keys(8, group=1)
    async with open_files(settings, shape, tag="a") as a, open_files(settings, shape, tag="b") as b:
        assert await a.store(first) == [STORED] * 8
        assert await a.store(second) == [STORED] * 8
        assert await b.present(first + second) == 0
        assert await b.load(first) == [MISSING] * 8
        assert await b.store(first, version=1) == [STORED] * 8
        assert await a.load(first) == [LOADED] * 8
        assert await b.load(first, version=1) == [LOADED] * 8
        assert await a.load(second) == [LOADED] * 8
    assert len(list((tmp_path / "root").glob("manifest-*.json"))) == 2


async def test_a_full_root_evicts_the_oldest_and_keeps_its_bound(tmp_path):
    root = tmp_path / "root"
    settings, names = options(root, capacity=6 << 20), keys(600)
    async with open_files(settings) as tier:
        for start in range(0, 600, 30):
            assert await tier.store(names[start : start + 30]) == [STORED] * 30
            assert disk_bytes(root) <= 6 << 20
        assert tier.counters["evicted"] > 200
        kept = await tier.present(names)
        assert kept * (16384 + 4096) > 0.85 * (6 << 20), "room was left unused"
        last = await tier.load(names[-100:])
        assert last == [LOADED] * 100
        assert await tier.load(names[:100]) == [MISSING] * 100
    async with open_files(settings) as tier:
        assert await tier.present(names) == kept


async def test_files_and_folders_belong_to_the_user_alone(tmp_path):
    root = tmp_path / "root"
    before = os.umask(0)
    try:
        async with open_files(options(root)) as tier:
            await tier.store(keys(4))
            for folder, _, names in os.walk(root):
                assert stat.S_IMODE(os.lstat(folder).st_mode) == 0o700, folder
                for name in names:
                    assert stat.S_IMODE(os.lstat(os.path.join(folder, name)).st_mode) == 0o600, name
    finally:
        os.umask(before)


async def test_keys_that_fit_no_header_are_not_stored(tmp_path):
    long, short = make_key(b"x" * 5000, 0), make_key(b"y", 0)
    async with open_files(options(tmp_path / "root")) as tier:
        assert await tier.store([long, short]) == [dropped(DropReason.KEY_TOO_LONG), STORED]
        assert await tier.present([long, short]) == 1
        assert (await tier.load([short])) == [LOADED]


async def test_another_alignment_layout_or_version_is_refused(tmp_path):
    root = tmp_path / "root"
    async with open_files(options(root), alignment=4096):
        pass
    with pytest.raises(RootError, match="rows aligned to 4096 bytes, this stack aligns to 8192"):
        async with open_files(options(root), alignment=8192):
            pass
    with pytest.raises(RootError, match="format version"):
        async with open_files_slab(root):
            pass
    superblock = root / "superblock"
    good = superblock.read_bytes()
    superblock.write_bytes(good[:100] + bytes([good[100] ^ 1]) + good[101:])
    async with open_files(options(root)):
        pass  # the second copy is whole
    superblock.write_bytes(bytes(len(good)))
    with pytest.raises(RootError, match="damaged"):
        async with open_files(options(root)):
            pass
    superblock.write_bytes(good)
    async with open_files(options(root)) as tier:
        assert await tier.store(keys(1)) == [STORED]


def open_files_slab(root):
    from support_fs import open_tier
    from support_fs import options as slab_options

    return open_tier(slab_options(root))


async def test_a_slab_root_is_refused(tmp_path):
    async with open_files_slab(tmp_path / "root"):
        pass
    with pytest.raises(RootError, match="type: fs"):
        async with open_files(options(tmp_path / "root")):
            pass


async def test_a_capacity_below_one_block_is_refused(tmp_path):
    with pytest.raises(GeometryError, match="need about"):
        async with open_files(options(tmp_path / "root", capacity=140000)):
            pass


UPPER = "tiers:\n  - {type: gpu}\n  - {type: cpu, cpu_bytes_to_use: 1MiB}\n"


def test_a_stack_file_chooses_the_type():
    stack = UPPER + "  - {type: shared_fs, root: /x, capacity: 1GiB}\n  - {type: fs, roots: [/y], capacity: 1GiB}\n"
    shared, local = build_tiers(parse_stack(stack))[2:]
    assert isinstance(shared, SharedFSBackend)
    assert isinstance(local, FSBackend)


def test_each_type_takes_its_own_options_only():
    own = set(FSOptions.model_fields) - set(SharedFSOptions.model_fields)
    owned = {"roots", "region_bytes", "allow_network_fs", "owner_timeout_seconds", "policy", "index_bytes_max"}
    assert own == owned | {"retained_max", "write_bytes_per_day"}
    shared = {"root", "hit_hint_seconds", "miss_hint_seconds"}
    assert set(SharedFSOptions.model_fields) - set(FSOptions.model_fields) == shared
    for key in ("roots: [/x]", "policy: arc", "allow_network_fs: true", "layout: files"):
        with pytest.raises(ConfigError, match=r"tiers\[2\]\.[a-z_]+: unknown key"):
            parse_stack(UPPER + f"  - {{type: shared_fs, root: /x, capacity: 1GiB, {key}}}\n")
    with pytest.raises(ConfigError, match="is not an absolute path"):
        parse_stack(UPPER + "  - {type: shared_fs, root: x, capacity: 1GiB}\n")


def test_the_old_spelling_names_the_new_one_in_one_line():
    with pytest.raises(ConfigError) as caught:
        parse_stack(UPPER + "  - {type: fs, layout: files, roots: [/x], capacity: 1GiB}\n")
    assert str(caught.value).startswith("tiers[2]: layout: files is a type of its own; write type: shared_fs")
    assert "\n" not in str(caught.value)
