"""The snapshot of a clean close: it says what a scan would say, and nobody believes it a session too late."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
from support_fs import Tier, bytes_on_disk, counted, keys, layout, open_tier, options

from kvtier.tier.block_envelope import SlotHeader
from kvtier.tier.contract import Recovered
from kvtier.types.jobs import LOADED, RegionFormat
from kvtier_fs.format.slot_map import Owner, SlotMap
from kvtier_fs.format.snapshot import StoredFormat, decode_snapshot, encode_snapshot
from kvtier_fs.format.superblock import Superblock

OF = Superblock(b"u" * 16, stride=1 << 20, regions=5, header_bytes=4096, row_alignment=4096, session=7)
SHAPE = layout(16384, 8192)
MIB = 1 << 20


def how(tier: Tier) -> str:
    """Whether the roots of an open tier were recovered from a snapshot or by a scan."""
    return " ".join(name for name in ("open.snapshot", "open.scan") if tier.backend.counters[name])


def facts(found: Recovered) -> tuple[object, ...]:
    """Everything a recovery says, to be compared."""
    foreign = [(blocks.slots.tolist(), blocks.regions) for blocks in found.foreign]
    return list(found.keys), found.slots.tolist(), found.generations.tolist(), sorted(map(repr, found.formats)), foreign


def slot_map(rng: random.Random, regions: int = 5, slots: int = 40) -> tuple[SlotMap, list[StoredFormat]]:
    """A slot_map with blocks of three namespaces and keys of several lengths."""
    names = [bytes([65 + i]) * 16 for i in range(3)]
    book = SlotMap([Owner(name, i) for i, name in enumerate(names)], names[0])
    formats = []
    for region in range(regions):
        formats.append(StoredFormat(8192 * (1 + region % 2), region + 1))
        book.format(region, region + 1, slots)
        for index in range(slots):
            owner, generation = rng.randrange(4), rng.randrange(1 << 62)
            key = rng.randbytes(rng.choice([5, 36, 36, 70])) + bytes(4)
            if owner < 3:
                place = (OF.root_uuid, region, index, region + 1, 8192, 4096, generation, 0, key)
                book.record(SlotHeader(names[owner], owner, *place))
    return book, formats


def contents(book: SlotMap) -> list[object]:
    return [
        (region, slots.region_generation, index, slots.keys[index], slots.generations[index], owner)
        for region, slots in book.regions()
        for index, owner in enumerate(slots.owners)
        if owner != 0xFF
    ]


def test_a_ledger_comes_back_from_its_snapshot(seed):
    book, formats = slot_map(random.Random(seed))
    found = decode_snapshot(encode_snapshot(OF, formats, book), OF)
    assert found is not None
    assert list(found.formats) == formats
    back = SlotMap(book.owners, book.owners[0].namespace)
    assert all(found.fill(back, region, 40) for region in range(len(formats)))
    assert len(contents(back)) > 100
    assert contents(back) == contents(book)
    # A namespace that was reset or forgotten meanwhile has no blocks, the others keep theirs.
    later = SlotMap([Owner(b"B" * 16, 1), Owner(b"A" * 16, 5)], b"B" * 16)
    assert all(found.fill(later, region, 40) for region in range(len(formats)))
    expected = [entry[3:5] for entry in contents(book) if entry[5] == 1]
    assert [entry[3:5] for entry in contents(later)] == expected
    assert not found.fill(later, 0, 3), "more slots than the region has"


def test_no_flipped_bit_no_missing_byte_and_no_other_session_passes(seed):
    rng = random.Random(seed)
    book, formats = slot_map(rng)
    data = encode_snapshot(OF, formats, book)
    for _ in range(300):
        bit = rng.randrange(len(data) * 8)
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert decode_snapshot(bytes(flipped), OF) is None
    for length in (0, 7, 24, 127, 128, len(data) - 1):
        assert decode_snapshot(data[:length], OF) is None
    assert decode_snapshot(data + b"\0", OF) is None
    others = (replace(OF, root_uuid=b"v" * 16), replace(OF, session=6), replace(OF, stride=2 * MIB))
    assert [decode_snapshot(data, other) for other in others] == [None] * 3


async def test_a_snapshot_says_what_a_scan_says(tmp_path, seed):
    """Random stores, overwrites, formats and refusals in two namespaces; each reopen happens both ways."""
    rng = random.Random(seed)
    roots = [tmp_path / "a", tmp_path / "b"]
    settings = options(*roots, capacity=4 * MIB, region_bytes=256 << 10)
    for session in range(8):
        tag = f"model {rng.randrange(2)}"
        async with open_tier(settings, SHAPE, tag=tag) as tier:
            by_snapshot = facts(tier.opened.recovered)
            assert how(tier) == ("open.snapshot" if session else "open.scan")
        for root in roots:
            (root / "snapshot").unlink()
        async with open_tier(settings, SHAPE, tag=tag) as tier:
            assert how(tier) == "open.scan"
            assert facts(tier.opened.recovered) == by_snapshot
            for step in range(12):
                region, group = rng.randrange(tier.space.num_regions), rng.randrange(2)
                formats = []
                if rng.random() < 0.3 or region not in tier.region_sizes:
                    first = region * tier.space.slots_per_region
                    gone = range(first, first + tier.space.slots_per_region)
                    tier.directory = {key: at for key, at in tier.directory.items() if at[0] not in gone}
                    formats = [tier.format_region(region, group)]
                fits = sum(1 for _ in tier.free_slots(group))
                names = keys(min(fits, rng.randrange(1, 9)), group, start=rng.randrange(40) + 100 * session)
                names = [key for key in names if key not in tier.directory or step % 3]
                if names:
                    await tier.store(names, formats)
            if session == 5:
                await tier.backend.reset(tier.epoch + 1)


async def test_a_snapshot_counts_once(tmp_path):
    root, names = tmp_path / "root", keys(9)
    async with open_tier(options(root)) as tier:
        await tier.store_all(names)
    kept = (root / "snapshot").read_bytes()
    assert os.stat(root / "snapshot").st_mode & 0o777 == 0o600
    async with open_tier(options(root)) as tier:
        assert how(tier) == "open.snapshot"
        assert not (root / "snapshot").exists()
        assert await tier.load(names) == [LOADED] * 9
        await tier.store_all(keys(3, start=50))
    (root / "snapshot").write_bytes(kept)
    async with open_tier(options(root)) as tier:
        assert how(tier) == "open.scan"
        assert list(tier.opened.recovered.keys) == names + keys(3, start=50)


@pytest.mark.parametrize("damage", ["truncated", "grown", "garbage", "empty"])
async def test_a_damaged_snapshot_is_as_good_as_none(tmp_path, damage):
    root, names = tmp_path / "root", keys(9)
    async with open_tier(options(root)) as tier:
        await tier.store_all(names)
    data = (root / "snapshot").read_bytes()
    changed = {"truncated": data[:-9], "grown": data + data, "garbage": b"x" * len(data), "empty": b""}[damage]
    (root / "snapshot").write_bytes(changed)
    (root / "snapshot.new").write_bytes(b"left by a crash")
    async with open_tier(options(root)) as tier:
        assert how(tier) == "open.scan"
        assert not (root / "snapshot.new").exists()
        assert list(tier.opened.recovered.keys) == names


async def test_slabs_that_are_not_those_of_the_snapshot_are_scanned(tmp_path):
    root, names = tmp_path / "root", keys(6)
    async with open_tier(options(root)) as tier:
        await tier.store_all(names)
    slab = root / "slab-00000"
    slab.write_bytes(bytes(4096) + slab.read_bytes()[4096:])
    async with open_tier(options(root)) as tier:
        assert (how(tier), facts(tier.opened.recovered)[:4]) == ("open.scan", ([], [], [], []))


async def test_generations_of_a_region_go_on_after_a_clean_close(tmp_path):
    settings = options(tmp_path / "root", capacity=4 * MIB, region_bytes=256 << 10)
    async with open_tier(settings, SHAPE) as tier:
        for _ in range(3):
            tier.directory.clear()
            await tier.store(keys(2), [tier.format_region(1, 0)])
    async with open_tier(settings, SHAPE) as tier:
        assert tier.opened.recovered.formats == (RegionFormat(1, tier.space.slot_bytes[0], 3),)
        assert list(tier.opened.recovered.keys) == keys(2)


async def test_without_room_for_a_snapshot_the_close_is_clean_all_the_same(tmp_path):
    long_keys = [bytes([i]) * 900 + bytes(4) for i in range(30)]
    async with open_tier(options(tmp_path / "root", capacity=1 * MIB)) as tier:
        await tier.store_all(long_keys)
    assert counted(tier) == {"close.no_snapshot": 1, "close.stuck": 0}
    assert not list((tmp_path / "root").glob("snapshot*"))
    async with open_tier(options(tmp_path / "root", capacity=1 * MIB)) as tier:
        assert how(tier) == "open.scan"
        assert list(tier.opened.recovered.keys) == long_keys
        assert bytes_on_disk(tmp_path / "root") <= 1 * MIB
