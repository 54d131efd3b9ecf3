"""The fence around GPU blocks that a store still has to read."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.errors import IntegrityError
from kvtier.keys import OffloadKey


class Fence:
    """GPU blocks that must not be reused, each with the key whose bytes it holds.

    Blocks count by id: two GPU blocks with one hash are two blocks, and lowering the fence of one leaves the other.
    """

    __slots__ = ("_keys",)

    def __init__(self) -> None:
        self._keys: dict[int, OffloadKey] = {}

    def raise_around(self, blocks: Sequence[int], key: OffloadKey) -> None:
        """Fence blocks that hold a key's bytes. IntegrityError if one of them is fenced already."""
        for block in blocks:
            if block in self._keys:
                raise IntegrityError(f"GPU block {block} was fenced twice")
            self._keys[block] = key

    def lower_around(self, blocks: Sequence[int], key: OffloadKey) -> None:
        """Take down the fence of blocks that hold this key. IntegrityError if one is not fenced for this key."""
        for block in blocks:
            if self._keys.get(block) != key:
                raise IntegrityError(f"GPU block {block} is not fenced for the store that ended")
            del self._keys[block]

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def __len__(self) -> int:
        return len(self._keys)
