"""Layout files: whatever lies in a block's place, a load returns what was stored or says that it does not."""

from __future__ import annotations

import os
import random
import shutil

import pytest
from support_files import account_is_true, block_files, open_files, options
from support_fs import keys, layout

from kvtier.tier.block_envelope import decode_slot_header, encode_slot_header
from kvtier.types.jobs import CORRUPT, LOADED, MISSING, PRESENT, STORED, BlockStatus
from kvtier_fs.shared.block_file import MismatchedFile

HEADER = 4096
PAYLOAD = 16384


def put(path, data: bytes) -> None:
    """Replace a file behind the tier's back, under a new inode."""
    path.with_name("elsewhere").write_bytes(data)
    os.rename(path.with_name("elsewhere"), path)


async def test_every_flipped_bit_is_noticed_and_its_file_removed(tmp_path, seed):
    rng = random.Random(seed)
    async with open_files(options(tmp_path / "root")) as tier:
        names = keys(8)
        await tier.store(names)
        good = {key: tier.path(key).read_bytes() for key in names}
        for _ in range(60):
            for key in names:
                # Header bytes are a fifth of a file but carry all the meaning: half of the flips go there.
                bit = rng.randrange(HEADER * 8) if rng.random() < 0.5 else rng.randrange((HEADER + PAYLOAD) * 8)
                flipped = bytearray(good[key])
                flipped[bit // 8] ^= 1 << bit % 8
                put(tier.path(key), bytes(flipped))
            assert await tier.load(names) == [CORRUPT] * 8
            assert block_files(tmp_path) == []
            assert await tier.load(names) == [MISSING] * 8
            for key in names:
                put(tier.path(key), good[key])
        assert await tier.load(names) == [LOADED] * 8
        refused = {name: n for name, n in tier.counters.items() if name.startswith("mismatch.")}
        assert sum(refused.values()) == 480
        assert set(refused) <= {"mismatch.header_checksum", "mismatch.version", "mismatch.payload"}


@pytest.mark.parametrize(
    ("field", "value", "outcome"),
    [
        ("namespace", b"x" * 16, CORRUPT),
        ("epoch", 1, MISSING),
        ("root_uuid", b"x" * 16, CORRUPT),
        ("region", 77, CORRUPT),
        ("slot_index", 3, CORRUPT),
        ("region_generation", 9, CORRUPT),
        ("slot_bytes", PAYLOAD, CORRUPT),
        ("payload_bytes", PAYLOAD - 4096, CORRUPT),
        ("generation", 99, LOADED),
        ("group", 1, CORRUPT),
        ("key", b"another block's key", CORRUPT),
        ("payload_digest", b"x" * 16, CORRUPT),
    ],
)
async def test_a_field_that_differs_under_a_good_checksum(tmp_path, field, value, outcome):
    async with open_files(options(tmp_path / "root")) as tier:
        names = keys(2)
        await tier.store(names)
        path = tier.path(names[0])
        data = bytearray(path.read_bytes())
        page = memoryview(data)[:HEADER]
        header = decode_slot_header(page)
        assert header is not None
        encode_slot_header(header._replace(**{field: value}), page)
        put(path, bytes(data))
        seen = await tier.present(names)
        assert seen == (2 if field in ("generation", "payload_digest") else 1)
        assert await tier.load(names) == [outcome, LOADED]
        # What is wrong is removed; a block of a later epoch is somebody else's and stays.
        assert path.exists() == (outcome is not CORRUPT)


def swap(path, other) -> None:
    put(path, other.read_bytes())


def link(path, other) -> None:
    path.unlink()
    path.symlink_to(other)


def pipe(path, other) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path, other) -> None:
    path.unlink()
    path.mkdir()


def device(path, other) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


INTRUDERS = {
    "truncated": lambda path, other: os.truncate(path, 7777),
    "without its payload": lambda path, other: os.truncate(path, HEADER),
    "empty": lambda path, other: os.truncate(path, 0),
    "extended": lambda path, other: os.truncate(path, HEADER + PAYLOAD + 1),
    "zeroed": lambda path, other: put(path, bytes(HEADER + PAYLOAD)),
    "another key's": swap,
    "a symbolic link to another": link,
    "a pipe": pipe,
    "a folder": folder,
    "a link to a device": device,
}


@pytest.mark.parametrize("intruder", INTRUDERS)
async def test_anything_else_in_a_blocks_place_is_refused_removed_and_replaced(tmp_path, intruder):
    async with open_files(options(tmp_path / "root")) as tier:
        first, second = names = keys(2)
        await tier.store(names)
        path = tier.path(first)
        INTRUDERS[intruder](path, tier.path(second))
        assert await tier.present(names) == 1
        assert await tier.load(names) == [CORRUPT, LOADED]
        assert not path.exists()
        assert await tier.store(names) == [STORED, PRESENT]
        INTRUDERS[intruder](path, tier.path(second))
        assert await tier.store(names) == [STORED, PRESENT], "a store clears the place as well"
        assert await tier.load(names) == [LOADED, LOADED]
        assert account_is_true(tier)


async def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    async with open_files(options(tmp_path / "root")) as tier:
        (key,) = keys(1)
        await tier.store([key])
        path = tier.path(key)
        path.unlink()
        path.mkdir()
        (path / "mine").write_text("precious")
        assert await tier.present([key]) == 0
        assert await tier.load([key]) == [CORRUPT]
        assert (await tier.store([key]))[0].status is BlockStatus.FAILED
        assert (path / "mine").read_text() == "precious"
        shutil.rmtree(path)
        assert await tier.store([key]) == [STORED]


async def test_files_of_another_namespace_or_root_do_not_pass(tmp_path):
    names = keys(1)
    ours, theirs = options(tmp_path / "a"), options(tmp_path / "b")
    async with open_files(ours, tag="x") as x, open_files(theirs, tag="x") as b, open_files(ours, tag="y") as y:
        for tier in (x, y, b):
            await tier.store(names)
        put(x.path(names[0]), y.path(names[0]).read_bytes())
        assert await x.load(names) == [CORRUPT]
        assert x.counters["mismatch.region"] + x.counters["mismatch.namespace"] == 1
        await x.store(names)
        put(x.path(names[0]), b.path(names[0]).read_bytes())
        assert await x.load(names) == [CORRUPT]
        assert x.counters["mismatch.root_uuid"] == 1


async def test_a_block_that_was_replaced_meanwhile_is_not_removed(tmp_path):
    async with open_files(options(tmp_path / "root")) as tier:
        (key,) = keys(1)
        await tier.store([key])
        path = tier.path(key)
        inode, data = os.stat(path).st_ino, path.read_bytes()
        wanted = tier.backend._expect(key, 0)
        bucket = tier.backend._root.buckets[wanted.place.bucket]
        assert bucket.locked(lambda: bucket.remove(wanted, MismatchedFile(inode + 1))) is False, "another inode"
        assert bucket.locked(lambda: bucket.remove(wanted, MismatchedFile(inode, bytes(136)))) is False, (
            "another generation"
        )
        assert await tier.load([key]) == [LOADED]
        assert bucket.locked(lambda: bucket.remove(wanted, MismatchedFile(inode, data[:136]))) is True
        assert await tier.load([key]) == [MISSING]


async def test_blocks_that_vanish_are_misses(tmp_path):
    async with open_files(options(tmp_path / "root"), layout(4096)) as tier:
        names = keys(20)
        await tier.store(names)
        for key in names[::2]:
            tier.path(key).unlink()
        assert await tier.present(names) == 10
        assert await tier.load(names) == [MISSING, LOADED] * 10


async def test_everything_removed_under_a_live_tier_is_a_miss_and_no_hang(tmp_path):
    async with open_files(options(tmp_path / "root"), layout(4096)) as tier:
        names = keys(20)
        await tier.store(names)
        shutil.rmtree(tmp_path / "root")
        assert await tier.present(names) == 0
        assert await tier.load(names) == [MISSING] * 20
        assert not any(outcome.ok for outcome in await tier.store(names))
