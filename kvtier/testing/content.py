"""The content of a block in tests: a function of its full key and generation, so that a wrong byte names its owner.

The content is the sequence of 64-bit little-endian words `base + i * STEP` (modulo 2**64), with `base` the xxh3 hash
of key and generation, as long as wanted. Every word of a block found in the wrong place gives the base back,
and with it the block it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.types.keys import OffloadKey

Bytes = npt.NDArray[np.uint8]

WORD_BYTES = 8
STEP = 0x9E3779B97F4A7C15


def content(key: OffloadKey, generation: int, length: int) -> Bytes:
    """The `length` bytes that a block of this key and generation holds, shape (length,), uint8."""
    ramp = np.arange(-(-length // WORD_BYTES), dtype=np.uint64) * np.uint64(STEP)
    ramp += np.uint64(_base(key, generation))
    return ramp.astype("<u8", copy=False).view(np.uint8)[:length]


def _base(key: OffloadKey, generation: int) -> int:
    return xxhash.xxh3_64_intdigest(key + generation.to_bytes(8, "little"))


class Owners:
    """The blocks a test knows of; tells whose bytes were found where others should be."""

    def __init__(self, blocks: Iterable[tuple[OffloadKey, int]] = ()) -> None:
        self._blocks: dict[int, tuple[OffloadKey, int]] = {}
        for key, generation in blocks:
            self.note(key, generation)

    def note(self, key: OffloadKey, generation: int) -> None:
        """Remember a block that was given its content."""
        self._blocks[_base(key, generation)] = key, generation

    def complaint(self, found: Bytes, key: OffloadKey, generation: int) -> str:
        """The fault in the bytes of a block, naming the owner of the first wrong word; empty if nothing is."""
        wrong = np.flatnonzero(found != content(key, generation, len(found)))
        if not len(wrong):
            return ""
        at = int(wrong[0])
        return (
            f"key {key.hex()} generation {generation}: {len(wrong)} of {len(found)} bytes are wrong, "
            f"from byte {at} on {self._owner(found, at)}"
        )

    def _owner(self, found: Bytes, at: int) -> str:
        start = at // WORD_BYTES * WORD_BYTES
        piece = found[start : start + WORD_BYTES].tobytes()
        if not any(piece):
            return "there are zeros"
        index = start // WORD_BYTES
        base = (int.from_bytes(piece.ljust(WORD_BYTES, b"\0"), "little") - index * STEP) % (1 << 64)
        if len(piece) == WORD_BYTES and base in self._blocks:
            key, generation = self._blocks[base]
            return f"they belong to key {key.hex()} generation {generation}"
        return f"they belong to no block ({piece.hex()})"
