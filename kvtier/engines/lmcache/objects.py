"""LMCache's objects as blocks of kvtier: their keys, and the pieces in which an object of any length is kept.

LMCache does not say how long its objects are before it stores one, and several models and groups of layers have
objects of several lengths. A tier has blocks of a few sizes. So an object is cut into pieces of `piece_bytes`, and its
end into pieces of a half, a quarter and an eighth of that: less than an eighth of a piece is padding. An object is
found only as a whole, and its first piece is the first to be evicted.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from lmcache.v1.distributed.api import ObjectKey

from kvtier.types.keys import GROUP_BYTES, OffloadKey, make_key

DIGEST_BYTES = 24
_FIELDS = struct.Struct(">IIIqq")
_PIECE = struct.Struct(">QH")
PIECES_MAX = 1 << 16


class Piece(NamedTuple):
    """A stretch of an object: its group, which decides the size of its block, its place in the object, its length."""

    group: int
    offset: int
    length: int


@dataclass(frozen=True)
class PieceSizes:
    """The bytes of a block of each group, each half of the one before."""

    sizes: tuple[int, ...]

    @classmethod
    def of(cls, piece_bytes: int, count: int) -> PieceSizes:
        return cls(tuple(piece_bytes >> group for group in range(count)))

    @property
    def largest_object(self) -> int:
        """Bytes of the largest object that can be kept."""
        return self.sizes[0] * (PIECES_MAX - len(self.sizes))

    def count(self, size: int) -> int:
        """The number of pieces of an object of `size` bytes."""
        units, count = -(-size // self.sizes[-1]), 0
        for block in self.sizes:
            whole, units = divmod(units, block // self.sizes[-1])
            count += whole
        return count

    def can_be(self, key: OffloadKey) -> bool:
        """True if a key can be a piece's. A tier may hold blocks that are none."""
        if len(key) != DIGEST_BYTES + _PIECE.size + GROUP_BYTES:
            return False
        size, at = _PIECE.unpack_from(key, DIGEST_BYTES)
        return bool(0 < size <= self.largest_object and at < self.count(size))

    def cut(self, size: int) -> tuple[Piece, ...]:
        """The pieces of an object of `size` bytes, 1 to `largest_object`."""
        return _cut(self.sizes, size)


@lru_cache(maxsize=1024)
def _cut(sizes: tuple[int, ...], size: int) -> tuple[Piece, ...]:
    pieces, offset = [], 0
    units = -(-size // sizes[-1])
    for group, block in enumerate(sizes):
        per_block = block // sizes[-1]
        count, units = divmod(units, per_block)
        for _ in range(count):
            pieces.append(Piece(group, offset, min(block, size - offset)))
            offset += block
    return tuple(pieces)


def object_digest(key: ObjectKey) -> bytes:
    """The identity of an object: a digest of all five fields of its key."""
    model, salt = key.model_name.encode(), key.cache_salt.encode()
    fields = _FIELDS.pack(len(model), len(salt), len(key.chunk_hash), key.kv_rank, key.object_group_id)
    return hashlib.sha256(b"".join((fields, model, salt, key.chunk_hash))).digest()[:DIGEST_BYTES]


def piece_keys(digest: bytes, size: int, pieces: Sequence[Piece]) -> list[OffloadKey]:
    """The keys of an object's pieces. They contain its size, so that no object of another size is taken for it."""
    return [make_key(digest + _PIECE.pack(size, at), piece.group) for at, piece in enumerate(pieces)]


def absent_key(digest: bytes) -> OffloadKey:
    """A key that no piece has, for an object that is not known: asked for, it counts as a miss."""
    return make_key(digest + _PIECE.pack(0, 0), 0)


def object_of(key: OffloadKey) -> tuple[bytes, int]:
    """The digest and the size of the object that a key's piece belongs to."""
    size, _ = _PIECE.unpack_from(key, DIGEST_BYTES)
    return key[:DIGEST_BYTES], size


def prefix_order(keys: Sequence[ObjectKey]) -> list[int]:
    """The positions of keys, those of one chunk together: the parts of a chunk on several ranks age together."""
    first: dict[bytes, int] = {}
    for at, key in enumerate(keys):
        first.setdefault(key.chunk_hash, at)
    return sorted(range(len(keys)), key=lambda at: first[keys[at].chunk_hash])


def total_bytes(shapes: Iterable[Sequence[int]], item_bytes: Iterable[int]) -> int:
    """The bytes of an object with tensors of these shapes and bytes of an item."""
    total = 0
    for shape, each in zip(shapes, item_bytes, strict=True):
        count = each
        for extent in shape:
            count *= extent
        total += count
    return total
