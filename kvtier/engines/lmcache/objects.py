"""LMCache's objects as blocks of kvtier: their keys, and the pieces in which an object of any length is kept.

LMCache does not give the length of its objects before it stores one, and several models and groups of layers have
objects of several lengths. A tier has blocks of a few sizes. So an object is cut into pieces of `piece_bytes`, and its
end into pieces of a half, a quarter and an eighth of that: less than an eighth of a piece is padding. An object is
found only as a whole, and its first piece is the first to be evicted. `ObjectIndex` has those in an owned tier, under
LMCache's names.
"""

from __future__ import annotations

import hashlib
import heapq
import logging
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
    """A key that no piece has, for an object that is not known: looked up, it counts as a miss."""
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


Named = list[tuple[ObjectKey, int]]
"""Objects and their sizes."""
_Shape = tuple[str, int, int, str]
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _KnownObject:
    """An object of which `pieces` of `wanted` pieces are here. Its `name` is known from the first call that has it on;
    `shape` is the part of it that many objects share. `announced`: it was reported to LMCache as stored."""

    size: int
    wanted: int
    pieces: int = 0
    name: bytes = b""
    shape: _Shape | None = None
    announced: bool = False

    @property
    def whole(self) -> bool:
        return self.pieces == self.wanted

    @property
    def key(self) -> ObjectKey:
        assert self.shape is not None
        return ObjectKey(self.name, *self.shape)


class ObjectIndex:
    """Follows the changes of the tier. An object that was recovered is reported to LMCache once it is looked up.

    Not safe to use from several threads. About 300 bytes of memory an object.
    """

    def __init__(self, sizes: PieceSizes) -> None:
        self._sizes = sizes
        self._objects: dict[bytes, _KnownObject] = {}
        self._shapes: dict[_Shape, _Shape] = {}
        self._warned = False

    def __len__(self) -> int:
        return len(self._objects)

    def size(self, digest: bytes) -> int | None:
        """The size of an object that is here as a whole."""
        found = self._objects.get(digest)
        return found.size if found is not None and found.whole else None

    def follow(self, removed: bool, keys: Iterable[OffloadKey]) -> Named:
        """Pieces came or went. Returns the reported objects that have gone."""
        gone: Named = []
        for key in keys:
            if not self._sizes.can_be(key):
                self._warn()
                continue
            digest, size = object_of(key)
            known = self._objects.get(digest)
            if removed and known is not None and known.size == size:
                if known.announced:
                    gone.append((known.key, size))
                    known.announced = False
                known.pieces -= 1
                if not known.pieces:
                    del self._objects[digest]
            elif not removed:
                if known is None or known.size != size:
                    if known is not None and known.announced:
                        gone.append((known.key, known.size))
                    known = self._objects[digest] = _KnownObject(size, self._sizes.count(size))
                known.pieces += 1
        return gone

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("the tier holds blocks that are no pieces of objects; they are not used")

    def announce(self, objects: Sequence[tuple[bytes, ObjectKey]]) -> Named:
        """LMCache has these objects. Returns those that are here as a whole and were not reported."""
        new: Named = []
        for digest, key in objects:
            known = self._objects.get(digest)
            if known is None or not known.whole or known.announced:
                continue
            shape = (key.model_name, key.kv_rank, key.object_group_id, key.cache_salt)
            known.name, known.shape = key.chunk_hash, self._shapes.setdefault(shape, shape)
            known.announced = True
            new.append((key, known.size))
        return new

    def page(self, model_name: str | None, count: int, after: bytes) -> tuple[Named, bytes]:
        """The next objects after a digest in the order of digests, of one model; and the digest of the last one, empty
        if no others follow."""
        matching = (
            digest
            for digest, found in self._objects.items()
            if digest > after
            and found.announced
            and (model_name is None or (found.shape is not None and found.shape[0] == model_name))
        )
        digests = heapq.nsmallest(count + 1, matching)
        shown = [self._objects[digest] for digest in digests[:count]]
        return [(each.key, each.size) for each in shown], digests[count - 1] if len(digests) > count else b""
