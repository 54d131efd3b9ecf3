"""The objects in an owned tier, under the names that LMCache has for them."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lmcache.v1.distributed.api import ObjectKey

from kvtier.engines.lmcache.objects import PieceSizes, object_of
from kvtier.types.keys import OffloadKey

Named = list[tuple[ObjectKey, int]]
"""Objects and their sizes."""
_Shape = tuple[str, int, int, str]
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _KnownObject:
    """An object of which `pieces` of `wanted` pieces are here. Its `name` is known from the first call that has it on;
    `shape` is the part of it that many objects share. `announced`: LMCache knows that it is stored."""

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
    """Follows what the tier says of its blocks. LMCache knows of an object that was recovered once it is asked for.

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
        """Pieces came or went. Returns the objects that have gone and that LMCache knows."""
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
        """LMCache has these objects. Returns those that are here as a whole and that it did not know."""
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
