"""Whatever happens to the bytes on disk, a load returns what was stored or says that it does not."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import replace

import pytest
import xxhash
from support_fs import Tier, counted, flat, keys, layout, open_tier, options, slot_place

from kvtier.tier.block_envelope import decode_slot_header, encode_slot_header
from kvtier.types.jobs import CORRUPT, LOADED, BlockStatus, JobKind, failed
from kvtier_fs.local import root_queue
from kvtier_fs.local.opening import Hooks

HEADER = 4096
PAYLOAD = 16384
SLOT = HEADER + PAYLOAD


def poke(path, offset: int, data: bytes) -> None:
    """Write bytes behind the tier's back."""
    fd = os.open(path, os.O_RDWR)
    try:
        os.pwrite(fd, data, offset)
    finally:
        os.close(fd)


def peek(path, offset: int, length: int) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.pread(fd, length, offset)
    finally:
        os.close(fd)


async def only(tier: Tier, key) -> BlockStatus:
    """The status of one key's load; the row's bytes are checked if it counts as loaded."""
    return (await tier.load([key]))[0].status


def forge(tier: Tier, name, **changes: object) -> None:
    """Rewrite a key's slot header on disk with some fields changed and a checksum that holds."""
    path, offset = slot_place(tier, name)
    page = memoryview(bytearray(peek(path, offset, HEADER)))
    header = decode_slot_header(page)
    assert header is not None
    encode_slot_header(header._replace(**changes), page)
    poke(path, offset, bytes(page))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("namespace", b"x" * 16),
        ("epoch", 1),
        ("root_uuid", b"x" * 16),
        ("region", 1),
        ("slot_index", 3),
        ("region_generation", 9),
        ("slot_bytes", SLOT * 2),
        ("payload_bytes", PAYLOAD - 4096),
        ("generation", 99),
        ("group", 1),
        ("key", b"another block's key"),
    ],
)
async def test_a_field_that_differs_under_a_good_checksum_is_counted_by_its_name(tmp_path, field, value):
    async with open_tier(options(tmp_path / "root")) as tier:
        names = keys(2)
        await tier.store_all(names)
        forge(tier, names[0], **{field: value})
        assert await tier.load(names) == [CORRUPT, LOADED]
        assert counted(tier) == {f"mismatch.{field}": 1}
    async with open_tier(options(tmp_path / "root")) as tier:
        assert list(tier.opened.recovered.keys) == [names[1]], "what was refused is in no snapshot"
    (tmp_path / "root" / "snapshot").unlink()
    # A generation alone cannot be told from a right one without the directory; the bytes are the key's all the same.
    async with open_tier(options(tmp_path / "root")) as tier:
        found = list(tier.opened.recovered.keys)
        assert found == ([names[1], names[0]] if field == "generation" else [names[1]])


async def test_the_bytes_of_another_slot_do_not_pass(tmp_path):
    async with open_tier(options(tmp_path / "root")) as tier:
        first, second = names = keys(2)
        await tier.store_all(names)
        source, at = slot_place(tier, first)
        target, to = slot_place(tier, second)
        poke(target, to, peek(source, at, SLOT))
        assert await tier.load(names) == [LOADED, CORRUPT]
        # Nor does the other's payload behind the own header.
        header = peek(source, at, HEADER)
        await tier.store_all([second])
        target, to = slot_place(tier, second)
        poke(source, at, header + peek(target, to + HEADER, PAYLOAD))
        assert await tier.load(names) == [CORRUPT, LOADED]


@pytest.mark.parametrize("wrong", [(), (0,), (3, 4), (7,), tuple(range(8))])
@pytest.mark.parametrize("here", [0, PAYLOAD], ids=["on threads", "on the loop"])
async def test_one_request_of_neighbours_is_judged_block_by_block(tmp_path, monkeypatch, here, wrong):
    names, elsewhere = keys(8), []
    verify_blocks = root_queue.verify_blocks

    def watched(checks, **how):
        elsewhere.append(threading.current_thread() is not threading.main_thread())
        return verify_blocks(checks, **how)

    monkeypatch.setattr(root_queue, "verify_blocks", watched)
    async with open_tier(options(tmp_path / "root"), hooks=Hooks(checked_here_bytes=here)) as tier:
        await tier.store_all(names)
        for position in wrong:
            path, offset = slot_place(tier, names[position])
            poke(path, offset + HEADER + 100, bytes(8))
        tier.rows.digests[:] = [b""] * len(tier.rows.digests)
        wanted = [CORRUPT if position in wrong else LOADED for position in range(8)]
        assert await tier.load(names) == wanted
        assert counted(tier) == ({"mismatch.payload": len(wrong)} if wrong else {})
        digests = [xxhash.xxh3_128(row).digest() for row in tier.rows.view[:8]]
        expected = [digest if outcome.ok else b"" for digest, outcome in zip(digests, wanted, strict=True)]
        assert tier.rows.digests[:8] == expected
    assert set(elsewhere) == {not here}


@pytest.mark.parametrize("here", [0, PAYLOAD], ids=["on threads", "on the loop"])
async def test_a_block_that_could_not_be_judged_is_not_loaded(tmp_path, monkeypatch, here):
    def out_of_memory(checks, **how):
        raise MemoryError

    names = keys(2)
    async with open_tier(options(tmp_path / "root"), hooks=Hooks(checked_here_bytes=here)) as tier:
        await tier.store_all(names)
        monkeypatch.setattr(root_queue, "verify_blocks", out_of_memory)
        assert await tier.load(names) == [failed(errno.EIO)] * 2
        assert counted(tier) == {"verify.failed": 2}


async def test_the_slab_of_another_root_does_not_count(tmp_path):
    names = keys(4)
    for name in ("one", "two"):
        async with open_tier(options(tmp_path / name)) as tier:
            await tier.store_all(names)
    os.replace(tmp_path / "one" / "slab-00000", tmp_path / "two" / "slab-00000")
    async with open_tier(options(tmp_path / "two")) as tier:
        assert list(tier.opened.recovered.keys) == []
        assert tier.opened.recovered.formats == ()


async def test_a_changed_namespace_finds_nothing_and_leaves_the_other_its_blocks(tmp_path):
    names = keys(6)
    settings = options(tmp_path / "root")
    async with open_tier(settings, tag="one") as tier:
        await tier.store_all(names)
    async with open_tier(settings, tag="two") as tier:
        assert list(tier.opened.recovered.keys) == []
        assert [one.region for one in tier.opened.recovered.formats] == [0], "its format is known, so generations go on"
    async with open_tier(settings, tag="one") as tier:
        assert list(tier.opened.recovered.keys) == names
        assert await tier.load(names) == [LOADED] * 6
    assert len(list((tmp_path / "root").glob("manifest-*.json"))) == 2


async def test_blocks_of_another_epoch_are_neither_loaded_nor_found(tmp_path):
    async with open_tier(options(tmp_path / "root")) as tier:
        names = keys(2)
        await tier.store_all(names)
        job = tier.load_job(names)
        assert flat(await tier.backend.load(replace(job, epoch=1))) == [CORRUPT] * 2
        assert counted(tier) == {"mismatch.epoch": 2}


async def test_what_a_region_held_before_it_was_cut_again_is_gone(tmp_path):
    async with open_tier(options(tmp_path / "root")) as tier:
        old, new = keys(4), keys(1, start=50)
        await tier.store_all(old)
        stale = dict(tier.directory)
        tier.directory.clear()
        await tier.store(new, [tier.format_region(0, 0)])
        tier.directory |= {key: place for key, place in stale.items() if place[0] != tier.directory[new[0]][0]}
        left = [key for key in old if key in tier.directory]
        assert len(left) == 3
        assert await tier.load(left) == [CORRUPT] * 3
        assert counted(tier) == {"mismatch.region_generation": 3}
        assert await tier.load(new) == [LOADED]
    async with open_tier(options(tmp_path / "root")) as tier:
        assert list(tier.opened.recovered.keys) == new
        assert tier.opened.recovered.formats[0].generation == 2


async def test_a_truncated_slab_is_a_miss(tmp_path):
    names = keys(8)
    async with open_tier(options(tmp_path / "root")) as tier:
        await tier.store_all(names)
        path, offset = slot_place(tier, names[4])
        os.truncate(path, offset + HEADER + 512)
        outcomes = await tier.load(names)
        assert outcomes == [LOADED] * 4 + [failed(5)] * 4
        assert tier.backend.counters["errno.EIO"] == 4
    async with open_tier(options(tmp_path / "root")) as tier:
        assert names[:4] == list(tier.opened.recovered.keys)[:4]
        assert await tier.load(names[:4]) == [LOADED] * 4
        for key in tier.opened.recovered.keys[4:]:
            assert await only(tier, key) in (BlockStatus.FAILED, BlockStatus.CORRUPT)


async def test_a_zeroed_slab_is_empty(tmp_path):
    async with open_tier(options(tmp_path / "root")) as tier:
        await tier.store_all(keys(4))
    slab = tmp_path / "root" / "slab-00000"
    slab.write_bytes(bytes(slab.stat().st_size))
    async with open_tier(options(tmp_path / "root")) as tier:
        assert (list(tier.opened.recovered.keys), tier.opened.recovered.formats) == ([], ())
        await tier.store_all(keys(4))
        assert await tier.load(keys(4)) == [LOADED] * 4


async def test_of_two_copies_of_a_key_the_newest_wins_and_each_key_comes_once(tmp_path):
    async with open_tier(options(tmp_path / "root")) as tier:
        names = keys(5)
        await tier.store_all(names)
        old_slots = [tier.directory[key][0] for key in names]
        held = {slot: (slot, 0) for slot in old_slots}
        tier.directory = {bytes([i]) * 8: place for i, place in enumerate(held.values())}
        await tier.store_all(names[:2])
    async with open_tier(options(tmp_path / "root")) as tier:
        found = tier.opened.recovered
        assert list(found.keys) == [*names[2:], *names[:2]]
        assert found.generations.tolist() == [3, 4, 5, 6, 7]
        assert not set(found.slots.tolist()[3:]) & set(old_slots)
        assert await tier.load(names) == [LOADED] * 5


async def test_other_sizes_of_the_same_key_do_not_count(tmp_path):
    settings = options(tmp_path / "root", region_bytes="1MiB")
    shape = layout(16384, 8192)
    full, window = keys(3, group=0), keys(5, group=1)
    async with open_tier(settings, shape) as tier:
        await tier.store(full, [tier.format_region(0, 0)])
        await tier.store(window, [tier.format_region(1, 1)])
        assert await tier.load(full) == [LOADED] * 3
        assert await tier.load(window) == [LOADED] * 5
        wrong = tier.load_job(full)
        assert wrong.kind is JobKind.LOAD
        crossed = replace(wrong.groups[0], slots=[slot + tier.space.slots_per_region for slot in wrong.groups[0].slots])
        outcomes = flat(await tier.backend.load(replace(wrong, groups=(crossed,))))
        assert [outcome.status for outcome in outcomes] == [BlockStatus.MISSING] * 3
    async with open_tier(settings, shape) as tier:
        assert set(tier.opened.recovered.keys) == {*full, *window}
        assert await tier.load(full) == [LOADED] * 3
        assert await tier.load(window) == [LOADED] * 5
