"""Numbers that no session ever wrote, under checksums that hold: damaged, never an error of another kind."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import replace
from typing import Any

import pytest
import support_stack
from support_fs import keys, open_tier, options
from support_tools import Written, found, loadable, overwrite, refusal, tool_json, write

from kvtier.errors import RootDamagedError, RootError
from kvtier.tier.block_envelope import COUNTER_LIMIT, decode_slot_header, encode_slot_header
from kvtier.tier.checksum import seal
from kvtier.types.keys import make_key
from kvtier_fs.format.region_header import decode_region_header, encode_region_header
from kvtier_fs.format.snapshot import SNAPSHOT_MAGIC
from kvtier_fs.format.superblock import NamespaceEpoch, Superblock, decode_superblock, encode_superblock
from kvtier_fs.local.folder import SlabFolder
from kvtier_fs.local.root import Root

MOST = 2**64 - 1
BEYOND = (2**63 - 1, 2**63, MOST - 1, MOST)


def superblock(root: Written) -> Superblock:
    """What a root states of itself."""
    block = decode_superblock((root.path / "superblock").read_bytes())
    assert block is not None
    return block


def state(root: Written, copies: int = 2, **changes: Any) -> None:
    """Change fields of the superblock, in its first or in both copies."""
    copy = encode_superblock(replace(superblock(root), **changes))
    overwrite(root.path / "superblock", 0, copy * copies)


SUPERBLOCKS: list[dict[str, Any]] = [
    *({name: value} for name in ("sequence", "session", "floor_epoch", "stride") for value in BEYOND),
    *({"stride": value} for value in (0, 1, 4096, 4097, 2**40 + 1)),
    *({"header_bytes": value} for value in (0, 1, 512, 4095, 4097, 12288, 2**31, 2**32 - 1)),
    *({"row_alignment": value} for value in (0, 1, 4095, 6144)),
    {"regions": 0},
    {"regions": 2**32 - 1, "stride": 2**50},
    *({"namespaces": ((b"n" * 16, NamespaceEpoch(value, 1)),)} for value in BEYOND),
    *({"namespaces": ((b"n" * 16, NamespaceEpoch(1, value)),)} for value in BEYOND),
    {"namespaces": ((b"n" * 16, NamespaceEpoch(1, 1)), (b"n" * 16, NamespaceEpoch(2, 1)))},
]


@pytest.mark.parametrize("changes", SUPERBLOCKS, ids=str)
def test_a_superblock_beyond_the_limits_is_damaged(tmp_path, changes):
    root = write(tmp_path / "root")
    state(root, **changes)
    assert decode_superblock((root.path / "superblock").read_bytes()) is None
    for command in (["ls"], ["du"], ["fsck"], ["fsck", "--repair"], ["gc", "--old"]):
        assert "superblock has no whole copy" in refusal(*command, root.path)

    async def work() -> None:
        async with open_tier(options(root.path)):
            pass

    before = (root.path / "superblock").read_bytes()
    with pytest.raises(RootDamagedError):
        asyncio.run(work())
    assert (root.path / "superblock").read_bytes() == before


@pytest.mark.parametrize("changes", [{"sequence": MOST}, {"session": 2**63}, {"stride": 0}], ids=str)
def test_the_other_copy_of_a_superblock_counts_where_one_is_beyond_the_limits(tmp_path, changes):
    root = write(tmp_path / "root")
    state(root, copies=1, **changes)
    assert ("bad_superblock", "checksum", 1) in found(tool_json("fsck", root.path, status=1))
    assert len(loadable(root.path)) == 8


def test_more_regions_than_there_are_files_for_cost_the_tools_nothing(tmp_path):
    root = write(tmp_path / "root")
    state(root, regions=2**32 - 1)
    assert len(tool_json("ls", root.path)["blocks"]) == 8
    assert tool_json("fsck", root.path, status=1)["whole"] == 8


@pytest.mark.parametrize("stride", [2**30, 2**40, 2**50])
def test_a_region_larger_than_its_file_costs_the_tools_nothing(tmp_path, stride):
    root = write(tmp_path / "root")
    state(root, stride=stride, regions=1)
    assert len(tool_json("ls", root.path)["blocks"]) == 8
    tool_json("fsck", root.path, status=1)
    assert tool_json("du", root.path)["total"]["blocks"] == 8


def test_a_repair_reserves_no_disk_for_a_region_that_only_the_superblock_knows_of(tmp_path):
    root = write(tmp_path / "root")
    slab = root.path / "slab-00000"
    before = slab.stat()
    state(root, stride=2**30, regions=1)
    document = tool_json("fsck", "--repair", root.path, status=1)
    assert ("truncated", "length", 1) in found(document)
    after = slab.stat()
    assert (after.st_size, after.st_blocks) == (before.st_size, before.st_blocks)


async def test_an_engine_steps_on_blocks_of_a_generation_at_the_limit(tmp_path):
    """The control plane counts on from what it finds."""
    layout, engine = support_stack.PLAIN, support_stack.Engine(support_stack.PLAIN, 8)
    config = support_stack.stack_file(layout, 8, support_stack.fs(tmp_path / "root"))
    names = support_stack.keys(4)

    async def store_through(first: int) -> None:
        async with support_stack.running(config, engine) as stack:
            one = support_stack.whole(support_stack.keys(4, start=first))
            assert support_stack.statuses(await support_stack.store(stack, engine, one)) == ["stored"] * 4
            assert await stack.drain(20.0)

    await store_through(0)
    (tmp_path / "root" / "snapshot").unlink()
    slab = tmp_path / "root" / "slab-00000"
    forged = [COUNTER_LIMIT - 1, COUNTER_LIMIT, *BEYOND[:2]]
    for at in range(0, slab.stat().st_size, 4096):
        page = memoryview(bytearray(slab.read_bytes()[at : at + 4096]))
        header = decode_slot_header(page)
        if header is not None:
            encode_slot_header(header._replace(generation=forged.pop()), page)
            overwrite(slab, at, bytes(page))
    assert not forged
    await store_through(10)
    async with support_stack.running(config, engine) as stack:
        found_again = await support_stack.load(stack, engine, support_stack.whole(names))
        assert support_stack.statuses(found_again).count("loaded") == 1
        later = await support_stack.load(stack, engine, support_stack.whole(support_stack.keys(4, start=10)))
        assert support_stack.statuses(later).count("loaded") == 0, "counted on beyond the limit, so they are misses"


@pytest.mark.parametrize("generation", BEYOND)
def test_a_block_of_a_generation_beyond_the_limit_does_not_count(tmp_path, generation):
    root = write(tmp_path / "root")
    forged, *others = root.places
    (root.path / "snapshot").unlink()
    root.forge(forged, generation=generation)
    assert sorted(loadable(root.path)) == sorted(others)


@pytest.mark.parametrize("payload_bytes", [0, 16385, *BEYOND])
def test_a_block_that_reaches_beyond_its_slot_does_not_count_for_the_tools(tmp_path, payload_bytes):
    root = write(tmp_path / "root")
    root.forge(next(iter(root.places)), payload_bytes=payload_bytes)
    assert tool_json("fsck", root.path, status=1)["whole"] == 7
    assert len(tool_json("ls", root.path)["blocks"]) == 7


@pytest.mark.parametrize("generation", [0, *BEYOND])
def test_a_region_of_a_generation_beyond_the_limit_is_damaged(tmp_path, generation):
    root = write(tmp_path / "root")
    (root.path / "snapshot").unlink()
    slab = root.path / "slab-00000"
    page = bytearray(slab.read_bytes()[:4096])
    header = decode_region_header(memoryview(page))
    assert header is not None
    encode_region_header(replace(header, generation=generation), memoryview(page))
    overwrite(slab, 0, bytes(page))
    assert found(tool_json("fsck", root.path, status=1)) & {
        ("corrupt", "region_header_checksum", 1),
        ("corrupt", "region_slot_size", 1),
    }
    assert not loadable(root.path)


REGIONS_AT, OWNERS_AT = 128, 128 + 24


def snapshot_of(root: Written) -> bytearray:
    return bytearray((root.path / "snapshot").read_bytes())


def restate(root: Written, data: bytearray) -> None:
    (root.path / "snapshot").write_bytes(seal(SNAPSHOT_MAGIC, bytes(data[24:])))


def columns(root: Written) -> tuple[int, int, int]:
    """Where in the snapshot the generations, the slot numbers and the lengths of the keys begin."""
    block, data = superblock(root), snapshot_of(root)
    entries = struct.unpack_from("<Q", data, 72)[0]
    assert entries == 8
    generations = 128 + 24 * block.regions + 24 * len(block.namespaces)
    return generations, generations + 8 * entries, generations + 12 * entries


@pytest.mark.parametrize("generation", BEYOND)
def test_a_snapshot_with_a_generation_beyond_the_limit_does_not_count(tmp_path, generation):
    root = write(tmp_path / "root")
    data = snapshot_of(root)
    struct.pack_into("<Q", data, columns(root)[0], generation)
    restate(root, data)
    assert ("bad_snapshot", "checksum", 1) in found(tool_json("fsck", root.path, status=1))
    assert len(loadable(root.path)) == 8, "the headers are scanned instead"


@pytest.mark.parametrize("generation", BEYOND)
def test_a_snapshot_with_a_region_beyond_the_limit_does_not_count(tmp_path, generation):
    root = write(tmp_path / "root")
    data, last = snapshot_of(root), 128 + 24 * (superblock(root).regions - 1)
    assert struct.unpack_from("<QQ", data, last) == (0, 0), "a region without a format"
    struct.pack_into("<Q", data, last + 8, generation)
    restate(root, data)
    assert len(loadable(root.path)) == 8


def test_a_snapshot_with_two_blocks_in_one_slot_does_not_count(tmp_path):
    root = write(tmp_path / "root")
    data, at = snapshot_of(root), columns(root)[1]
    data[at + 4 : at + 8] = data[at : at + 4]
    restate(root, data)
    assert len(loadable(root.path)) == 8


def test_a_snapshot_with_a_key_that_is_only_a_group_does_not_count(tmp_path):
    root = write(tmp_path / "root")
    data, at = snapshot_of(root), columns(root)[2]
    assert struct.unpack_from("<2H", data, at) == (36, 36)
    struct.pack_into("<2H", data, at, 4, 68)
    first = data.index(next(iter(root.places))[:32])
    data[first : first + 4] = make_key(b"", 0)
    restate(root, data)
    assert all(len(key) == 36 for key in loadable(root.path))


async def test_a_root_whose_session_cannot_be_ended_is_let_go_of(tmp_path, monkeypatch):
    """Whatever the end of a session raises, the folder is left: another tier of this process can have it."""

    async def broken(self: Root, block: Superblock) -> None:
        raise struct.error("a number does not fit")

    with monkeypatch.context() as patched:
        async with open_tier(options(tmp_path / "root")) as tier:
            await tier.store_all(keys(8))
            patched.setattr(Root, "write_superblock", broken)
    assert tier.backend.counters["close.unclean"] == 1
    async with open_tier(options(tmp_path / "root")) as tier:
        assert len(tier.directory) == 8


async def test_an_owner_whose_lock_file_was_replaced_writes_no_superblock(tmp_path):
    """Removing the lock by hand lets a second owner in. The first one must not write over what the second states."""
    root = tmp_path / "root"
    async with open_tier(options(root)) as first:
        await first.store_all(keys(4))
        (root / "lock").unlink()
        async with open_tier(options(root)) as second:
            before = (root / "superblock").read_bytes()
            with pytest.raises(RootError, match="lock"):
                await first.backend.reset(1)
            assert (root / "superblock").read_bytes() == before
            await second.backend.reset(1)
        closed = (root / "superblock").read_bytes()
    assert (root / "superblock").read_bytes() == closed
    assert first.backend.counters["close.unclean"] == 1
    async with open_tier(options(root)) as tier:
        assert tier.epoch == 1


DEEP = b"[" * 4000


@pytest.mark.parametrize(
    "text",
    [
        DEEP,
        b'{"pid": %s, "host": "h", "start": 1}' % DEEP,
        b'{"pid": 1e999, "host": "h", "start": 1}',
        b'{"pid": 1, "host": "h", "start": 1e999}',
        b'{"pid": %s, "host": "h", "start": 1}' % (b"9" * 4000),
        b'{"pid": 1, "host": "\\ud800", "start": NaN}',
        b'{"pid": -1, "host": {}, "start": "x"}',
    ],
    ids=range(7),
)
def test_a_lock_that_says_nothing_sensible_is_another_process(tmp_path, text):
    owner, folder = (SlabFolder(str(tmp_path), options(tmp_path)) for _ in range(2))
    try:
        assert owner.enter()
        assert owner.try_lock()
        (tmp_path / "lock").write_bytes(text)
        assert folder.enter()
        assert folder.owner() == "another process"
    finally:
        folder.leave()
        owner.leave()
