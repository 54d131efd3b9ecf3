"""LMCache's objects as blocks: their keys and their pieces."""

from __future__ import annotations

import hashlib
import logging
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support_lmcache import object_key

from kvtier.engines.lmcache.objects import ObjectIndex, PieceSizes, object_digest, object_of, piece_keys, prefix_order
from kvtier.types.keys import OffloadKey, key_group, make_key

pytestmark = [pytest.mark.lmcache, pytest.mark.filterwarnings("ignore")]  # what LMCache warns of is not ours
SIZES = PieceSizes.of(256 << 10, 4)


@given(st.integers(1, 4 << 20))
def test_pieces_cover_an_object_without_a_gap_and_pad_less_than_the_smallest_piece(size):
    pieces = SIZES.cut(size)
    end = 0
    for piece in pieces:
        assert piece.offset == end
        assert 0 < piece.length <= SIZES.sizes[piece.group]
        end += piece.length
    assert end == size
    assert sum(SIZES.sizes[piece.group] for piece in pieces) - size < SIZES.sizes[-1]
    keys = piece_keys(object_digest(object_key(1)), size, pieces)
    assert len(set(keys)) == len(keys)
    assert [key_group(key) for key in keys] == [piece.group for piece in pieces]
    assert {object_of(key) for key in keys} == {(object_digest(object_key(1)), size)}


def test_every_field_of_a_key_identifies_an_object():
    others = [
        object_key(2), object_key(1, model_name="other"), object_key(1, kv_rank=1), object_key(1, object_group_id=1),
        object_key(1, cache_salt="tenant"), object_key(1, model_name="test-mode", cache_salt="l"),
    ]  # fmt: skip
    digests = {object_digest(key) for key in [object_key(1), *others]}
    assert len(digests) == 1 + len(others)


def test_parts_of_a_chunk_on_several_ranks_are_neighbours():
    keys = [object_key(number, kv_rank=rank) for rank in range(2) for number in range(3)]
    assert prefix_order(keys) == [0, 3, 1, 4, 2, 5]


@given(st.integers(1, 4 << 20))
def test_the_number_of_pieces_needs_no_pieces(size):
    assert SIZES.count(size) == len(SIZES.cut(size))


def forged(size: int, at: int = 0, digest: bytes = b"d" * 24, group: int = 0) -> OffloadKey:
    return make_key(digest + struct.pack(">QH", size, at), group)


def test_a_block_that_is_no_piece_of_an_object_is_left_out_with_one_line(caplog):
    """A record on disk can state any size: one of 2^40 bytes would have 2^22 pieces, each a tuple."""
    index = ObjectIndex(SIZES)
    strange = [
        *(forged(size) for size in (0, 1 << 40, (1 << 64) - 1, SIZES.largest_object + 1)),
        forged(1 << 20, at=4), make_key(b"short", 0), make_key(b"l" * 64, 0),
    ]  # fmt: skip
    good = piece_keys(object_digest(object_key(1)), 1000, SIZES.cut(1000))
    with caplog.at_level(logging.WARNING):
        assert index.follow(False, [*strange, *good]) == []
        assert index.follow(True, strange) == []
    assert len(index) == 1
    assert index.size(object_digest(object_key(1))) == 1000
    assert [record.getMessage() for record in caplog.records] == [
        "the tier holds blocks that are no pieces of objects; they are not used"
    ]


def test_an_object_of_the_largest_size_is_counted_in_no_memory():
    index = ObjectIndex(SIZES)
    sizes = range(SIZES.largest_object - 4000, SIZES.largest_object)
    index.follow(False, [forged(size, digest=hashlib.sha256(str(size).encode()).digest()[:24]) for size in sizes])
    assert len(index) == len(sizes)
