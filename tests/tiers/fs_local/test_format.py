"""The bytes on disk: headers say who they are, superblocks survive one damaged copy, epochs never go back."""

from __future__ import annotations

import random
import struct
from dataclasses import replace

import pytest
import xxhash

from kvtier.tier.block_envelope import (
    KEY_AT,
    Mismatch,
    SlotHeader,
    checksum_holds,
    decode_slot_header,
    encode_slot_header,
    max_key_bytes,
    payload_digest,
    verify_slot,
)
from kvtier.tier.shared_epoch import EPOCH_CEILING, OPENINGS_FROM
from kvtier_fs.format.region_header import RegionHeader, encode_region_header
from kvtier_fs.format.superblock import (
    COPY_BYTES,
    MAX_NAMESPACES,
    Superblock,
    decode_superblock,
    encode_superblock,
    foreign_version,
)
from kvtier_fs.local.opening import first_epoch

PAYLOAD = b"the bytes of a block" * 100


def header(**changes: object) -> SlotHeader:
    plain = SlotHeader(
        namespace=b"n" * 16,
        epoch=3,
        root_uuid=b"u" * 16,
        region=5,
        slot_index=11,
        region_generation=2,
        slot_bytes=8192,
        payload_bytes=len(PAYLOAD),
        generation=77,
        group=1,
        key=b"a block's key",
        payload_digest=xxhash.xxh3_128(PAYLOAD).digest(),
    )
    return plain._replace(**changes)


def page_of(slot: SlotHeader, size: int = 4096) -> bytearray:
    page = bytearray(b"\xff" * size)
    encode_slot_header(slot, memoryview(page))
    return page


def test_the_header_page_is_laid_out_as_documented():
    page = page_of(header())
    assert page[:8] == b"KVTIERSL"
    assert page[8:24] == xxhash.xxh3_128_digest(bytes(page[24:]))
    assert struct.unpack_from("<II", page, 24) == (1, 4096)
    assert page[32:48] == b"n" * 16
    assert struct.unpack_from("<Q", page, 48) == (3,)
    assert page[56:72] == b"u" * 16
    assert struct.unpack_from("<IIQQQQIHH", page, 72) == (5, 11, 2, 8192, len(PAYLOAD), 77, 1, 13, 0)
    assert page[120:136] == xxhash.xxh3_128(PAYLOAD).digest()
    assert page[136:149] == b"a block's key"
    assert not any(page[149:]), "what a header does not use is zero"


@pytest.mark.parametrize("size", [4096, 16384])
def test_keys_of_any_length_that_fits_come_back(size):
    for length in (1, 5, 36, max_key_bytes(size)):
        slot = header(key=b"k" * length)
        page = memoryview(page_of(slot, size))
        assert decode_slot_header(page) == slot
        assert payload_digest(page) == slot.payload_digest
    assert KEY_AT + max_key_bytes(4096) == 4096


def test_a_slot_is_taken_only_if_every_field_is_as_expected():
    page = memoryview(page_of(header()))
    assert verify_slot(page, memoryview(PAYLOAD), header()) == header().payload_digest
    others = {
        Mismatch.ROOT_UUID: header(root_uuid=b"v" * 16),
        Mismatch.REGION: header(region=6),
        Mismatch.REGION_GENERATION: header(region_generation=1),
        Mismatch.SLOT_INDEX: header(slot_index=10),
        Mismatch.SLOT_BYTES: header(slot_bytes=12288),
        Mismatch.NAMESPACE: header(namespace=b"m" * 16),
        Mismatch.EPOCH: header(epoch=4),
        Mismatch.KEY: header(key=b"a block's kez"),
        Mismatch.GROUP: header(group=0),
        Mismatch.PAYLOAD_BYTES: header(payload_bytes=len(PAYLOAD) - 1),
        Mismatch.GENERATION: header(generation=78),
    }
    for place, expected in others.items():
        assert verify_slot(page, memoryview(PAYLOAD), expected) is place
    for key in (b"a block's ke", b"a block's key\0", b""):
        assert verify_slot(page, memoryview(PAYLOAD), header(key=key)) is Mismatch.KEY
    wrong = bytearray(PAYLOAD)
    wrong[-1] ^= 1
    assert verify_slot(page, memoryview(wrong), header()) is Mismatch.PAYLOAD


def test_another_version_or_magic_is_refused_even_with_a_good_checksum():
    for at, value in ((0, b"KVTIERRG"), (24, struct.pack("<I", 2)), (28, struct.pack("<I", 8192))):
        page = page_of(header())
        page[at : at + len(value)] = value
        page[8:24] = xxhash.xxh3_128_digest(bytes(page[24:]))
        assert checksum_holds(memoryview(page))
        assert verify_slot(memoryview(page), memoryview(PAYLOAD), header()) is Mismatch.VERSION


def block(**changes: object) -> Superblock:
    return replace(Superblock(b"r" * 16, 1 << 20, 8, 4096, 4096, sequence=4, session=2), **changes)


def test_one_damaged_copy_of_a_superblock_is_survived_and_two_are_noticed():
    rng = random.Random(seed := 20240817)
    good = encode_superblock(block(clean=True).with_epoch(b"n" * 16, 9))
    expected = decode_superblock(good + good)
    assert expected is not None
    assert (expected.clean, expected.epoch(b"n" * 16), expected.root_uuid) == (True, 9, b"r" * 16)
    for _ in range(300):
        copies = bytearray(good + good)
        first, second = rng.randrange(COPY_BYTES * 8), rng.randrange(COPY_BYTES * 8)
        copies[first // 8] ^= 1 << first % 8
        assert decode_superblock(bytes(copies)) == expected, f"seed {seed}"
        copies[COPY_BYTES + second // 8] ^= 1 << second % 8
        assert decode_superblock(bytes(copies)) is None, f"seed {seed}"


def test_the_newest_whole_copy_wins():
    old, new = encode_superblock(block(sequence=4)), encode_superblock(block(sequence=5, session=3))
    for data in (old + new, new + old):
        found = decode_superblock(data)
        assert found is not None
        assert found.session == 3
    torn = new[:50] + old[50:]
    found = decode_superblock(torn + old)
    assert found is not None
    assert found.session == 2
    assert decode_superblock(b"") is None
    assert decode_superblock(new[:1000]) is None


def test_a_superblock_of_another_release_is_told_from_a_damaged_one():
    other = bytearray(encode_superblock(block()))
    struct.pack_into("<I", other, 24, 7)
    other[8:24] = xxhash.xxh3_128_digest(bytes(other[24:]))
    assert decode_superblock(bytes(other) * 2) is None
    assert foreign_version(bytes(other) * 2) == 7
    assert foreign_version(bytes(8192)) is None
    assert foreign_version(b"") is None


def test_an_epoch_never_goes_back_also_when_the_table_forgets_its_namespace():
    root = block(session=0)
    digests = [bytes([i]) * 16 for i in range(MAX_NAMESPACES + 20)]
    epochs: dict[bytes, int] = {}
    for session, digest in enumerate(digests):
        root = replace(root, session=session)
        epochs[digest] = root.epoch(digest) + session % 5
        root = root.with_epoch(digest, epochs[digest])
        found = decode_superblock(encode_superblock(root) * 2)
        assert found == root
        assert len(root.namespaces) <= MAX_NAMESPACES
        for known, epoch in epochs.items():
            assert root.epoch(known) >= epoch
    forgotten = [digest for digest in digests if digest not in dict(root.namespaces)]
    assert len(forgotten) == 20
    assert root.with_epoch(digests[-1], 1).epoch(digests[-1]) == epochs[digests[-1]]


def test_namespaces_that_were_never_reset_raise_no_floor_when_the_table_forgets_them():
    root = block(session=0)
    for session in range(3 * MAX_NAMESPACES):
        root = replace(root, session=session).with_epoch(struct.pack("<QQ", session, 0), root.floor_epoch)
    assert root.floor_epoch == 0


def test_an_epoch_that_other_stores_state_is_taken_below_the_floor_and_never_below_what_is_listed():
    root = block(floor_epoch=7)
    assert first_epoch([root], b"n" * 16, 3) == 3, "others decide what the table has forgotten"
    assert root.with_epoch(b"n" * 16, 3).epoch(b"n" * 16) == 3
    assert first_epoch([root], b"n" * 16, None) == 7, "a disk alone goes on above all that it has forgotten"
    listed = root.with_epoch(b"n" * 16, 9)
    assert first_epoch([listed, None], b"n" * 16, 3) == 9
    assert listed.with_epoch(b"n" * 16, 3).epoch(b"n" * 16) == 9


@pytest.mark.parametrize(("floor", "begun"), [(2, 2), (0, 0), (EPOCH_CEILING, None)])
def test_a_table_that_forgot_a_namespace_counts_beside_one_that_lists_it(floor, begun):
    forgot, listed = block(floor_epoch=floor), block().with_epoch(b"n" * 16, 0)
    for roots in ([forgot, listed], [listed, forgot]):
        epoch = first_epoch(roots, b"n" * 16, None)
        assert epoch == begun or (begun is None and OPENINGS_FROM <= epoch < EPOCH_CEILING)
        assert first_epoch(roots, b"n" * 16, 5) == 0, "others state whether it was reset"


@pytest.mark.parametrize("epoch", [EPOCH_CEILING - 1, EPOCH_CEILING, (1 << 62) - 1])
def test_an_epoch_that_cannot_be_counted_from_is_none_and_costs_no_other_namespace(epoch):
    """Whoever wrote it: a release before this one took it from a forged marker."""
    root = block().with_epoch(b"o" * 16, 5).with_epoch(b"n" * 16, epoch)
    begun = first_epoch([root], b"n" * 16, None)
    assert OPENINGS_FROM <= begun < EPOCH_CEILING
    assert first_epoch([root], b"n" * 16, 3) == 3
    assert OPENINGS_FROM <= first_epoch([root, block()], b"n" * 16, None) < EPOCH_CEILING
    after = decode_superblock(encode_superblock(root.with_epoch(b"n" * 16, begun)) * 2)
    assert after is not None
    assert (after.epoch(b"n" * 16), after.epoch(b"o" * 16)) == (begun, 5)


def test_the_superblock_is_laid_out_as_documented():
    page = encode_superblock(block(clean=True, floor_epoch=6).with_epoch(b"n" * 16, 9))
    assert len(page) == 4096
    assert page[:8] == b"KVTIERSB"
    assert page[8:24] == xxhash.xxh3_128_digest(page[24:])
    assert struct.unpack_from("<IIQ", page, 24) == (1, 4096, 4)
    assert page[40:56] == b"r" * 16
    assert struct.unpack_from("<QIIQIIIIQ", page, 56) == (2, 1, 4096, 1 << 20, 4096, 8, 1, 0, 6)
    assert page[512:528] == b"n" * 16
    assert struct.unpack_from("<QQ", page, 528) == (9, 2)
    assert not any(page[104:512])
    assert not any(page[544:])


def test_the_region_header_is_laid_out_as_documented():
    page = bytearray(4096)
    encode_region_header(RegionHeader(b"u" * 16, 5, 69632, 3), memoryview(page))
    assert page[:8] == b"KVTIERRG"
    assert page[8:24] == xxhash.xxh3_128_digest(bytes(page[24:]))
    assert struct.unpack_from("<II", page, 24) == (1, 4096)
    assert page[32:48] == b"u" * 16
    assert struct.unpack_from("<IIQQ", page, 48) == (5, 0, 69632, 3)
    assert not any(page[72:])
