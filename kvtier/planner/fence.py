"""The fence around GPU blocks that a store still has to read."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvtier.errors import IntegrityError
from kvtier.keys import OffloadKey


class Fence:
    """GPU blocks that must not be reused, each with the keys of the stores that need it.

    Blocks count by id: two GPU blocks with one hash are two blocks, and lowering the fence of one leaves the other.
    A block needed by several stores is fenced until the last of them has ended.
    """

    __slots__ = ("_keys",)

    def __init__(self) -> None:
        self._keys: dict[int, dict[OffloadKey, None]] = {}

    def raise_around(self, blocks: Sequence[int], key: OffloadKey) -> None:
        """Fence blocks for the store of a key. IntegrityError if one of them is fenced for this key already."""
        for block in blocks:
            keys = self._keys.setdefault(block, {})
            if key in keys:
                raise IntegrityError(f"GPU block {block} was fenced twice for one store")
            keys[key] = None

    def lower_around(self, blocks: Sequence[int], key: OffloadKey) -> None:
        """The store of a key has ended. IntegrityError if one of the blocks is not fenced for this key."""
        for block in blocks:
            keys = self._keys.get(block, {})
            if key not in keys:
                raise IntegrityError(f"GPU block {block} is not fenced for the store that ended")
            del keys[key]
            if not keys:
                del self._keys[block]

    def keys_at(self, block: int) -> Collection[OffloadKey]:
        """The keys whose stores need a block, in the order they were fenced; empty if it is not fenced."""
        return self._keys.get(block, ())

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def __len__(self) -> int:
        """Fenced GPU blocks, each counted once."""
        return len(self._keys)
