"""Places of an engine's blocks in its memory: pages of arrays, or addresses in an arena."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError, UsageError
from kvtier.types.keys import OffloadKey, key_group

Bytes = npt.NDArray[np.uint8]
PLACES_MAX = 1 << 62
"""Places are kept in signed integers of 64 bits."""


class EngineMemory(ABC):
    """Memory of an engine. A block of group g has `block_bytes[g]` bytes at a place, which is a number.

    `num_blocks` is how many blocks there are at most. Blocks are touched one at a time, and only by a `CopyPermit`.
    After `release` nothing here refers to the memory any more.
    """

    block_bytes: tuple[int, ...]
    num_blocks: int

    @abstractmethod
    def holds(self, group: int, place: int) -> bool:
        """True if a block of this group can be at this place."""

    @abstractmethod
    def pieces(self, group: int, place: int) -> Sequence[Bytes]:
        """The block's bytes in order, as writable views of the engine's memory. `holds` of it is True."""

    def read(self, group: int, place: int, target: Bytes) -> int:
        """Copy a block to the front of `target`; the number of its bytes."""
        start = 0
        for piece in self.pieces(group, place):
            np.copyto(target[start : start + piece.size].reshape(piece.shape), piece)
            start += piece.size
        return start

    def write(self, group: int, place: int, source: Bytes) -> None:
        """Copy a block from the front of `source`."""
        start = 0
        for piece in self.pieces(group, place):
            np.copyto(piece, source[start : start + piece.size].reshape(piece.shape))
            start += piece.size

    @abstractmethod
    def release(self) -> None:
        """Drop every reference to the memory. Every permit must be shut."""

    def check(self, keys: Sequence[OffloadKey], places: Sequence[int]) -> None:
        """Raise UsageError unless every block lies in this memory: one that does not would overwrite other memory."""
        if len(keys) != len(places):
            raise UsageError(f"{len(keys)} blocks cannot be at {len(places)} places")
        for key, place in zip(keys, places, strict=True):
            group = key_group(key)
            if group >= len(self.block_bytes) or not self.holds(group, place):
                raise UsageError(f"no block of group {group} is at place {place} of the engine's memory")


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of equal length in every page: piece i of page p begins at
    `address + i * piece_stride + p * page_stride` and has `length` bytes."""

    address: int
    length: int
    count: int
    piece_stride: int
    pages: int
    page_stride: int

    def array(self) -> Bytes:
        """This memory as an array of shape (pieces, pages, bytes), without a copy. Its owner must keep it allocated.

        Raises ConfigError for addresses or lengths that cannot be.
        """
        sizes = (self.address, self.length, self.count, self.pages, self.page_stride)
        if min(sizes) < 1 or self.piece_stride < 0:
            raise ConfigError(f"the engine's memory cannot be {self}")
        extent = (self.count - 1) * self.piece_stride + (self.pages - 1) * self.page_stride + self.length
        flat = np.ctypeslib.as_array((ctypes.c_uint8 * extent).from_address(self.address))
        shape, strides = (self.count, self.pages, self.length), (self.piece_stride, self.page_stride, 1)
        return np.lib.stride_tricks.as_strided(flat, shape, strides, writeable=True)


class PagedMemory(EngineMemory):
    """Arrays of pages: the block of group g at place p is page p of each array of the group, one after another.

    Arrays are uint8 of shape (pages, bytes) or (pieces, pages, bytes), of any strides. `groups[g]` are those of group
    g, all with the same number of pages.
    """

    def __init__(self, groups: Sequence[Sequence[Bytes]]) -> None:
        self._groups = [[each if each.ndim == 3 else each[np.newaxis] for each in arrays] for arrays in groups]
        shapes = [[each.shape for each in arrays] for arrays in self._groups]
        if not all(arrays and len({pages for _, pages, _ in arrays}) == 1 for arrays in shapes):
            raise ConfigError(f"the arrays of a group have one number of pages, at least one; got {shapes}")
        self._pages: list[int] = [arrays[0][1] for arrays in shapes]
        self.block_bytes = tuple(sum(pieces * length for pieces, _, length in arrays) for arrays in shapes)
        self.num_blocks = max(self._pages)

    @classmethod
    def of_rows(cls, view: memoryview, num_groups: int) -> PagedMemory:
        """Rows that blocks of every group may be in, each whole: a writable buffer of shape (rows, bytes of a row)
        without gaps. Raises ConfigError for a buffer of another form."""
        rows = np.asarray(view)
        if rows.ndim != 2 or not rows.flags.c_contiguous or not rows.flags.writeable or not rows.size:
            raise ConfigError(f"the engine's memory is a buffer of shape {rows.shape}; it must be writable rows")
        return cls([[rows.view(np.uint8)]] * num_groups)

    def holds(self, group: int, place: int) -> bool:
        return 0 <= place < self._pages[group]

    def pieces(self, group: int, place: int) -> Sequence[Bytes]:
        return [array[:, place] for array in self._groups[group]]

    def release(self) -> None:
        self._groups = [[] for _ in self._groups]


class ArenaMemory(EngineMemory):
    """A stretch of memory in which the engine puts blocks as it likes. `place` makes a place of an offset.

    A block may be shorter than those of its group are in the tier. Then zeros are stored behind it, and a load leaves
    alone what lies behind it here. `num_blocks` is how many of the largest blocks there are at most.
    """

    def __init__(self, address: int, size: int, block_bytes: Sequence[int]) -> None:
        if not block_bytes or min(block_bytes) < 1 or max(block_bytes) > size:
            raise ConfigError(f"blocks of {list(block_bytes)} bytes do not fit into an arena of {size} bytes")
        self._unit = max(block_bytes)
        if size * self._unit >= PLACES_MAX:
            raise ConfigError(f"an arena of {size} bytes is too large for blocks of {self._unit} bytes")
        self._arena: Bytes = Pieces(address, size, 1, 0, 1, size).array().reshape(-1)
        self._size = size
        self.block_bytes = tuple(block_bytes)
        self.num_blocks = size // self._unit

    def place(self, group: int, offset: int, length: int) -> int:
        """The place of a block of `length` bytes that begins `offset` bytes behind the arena's first one.

        Raises UsageError for a block outside the arena, or longer than those of its group.
        """
        if not 0 <= offset <= self._size - length:
            raise UsageError(f"a block of {length} bytes at {offset} is outside an arena of {self._size} bytes")
        missing = self.block_bytes[group] - length
        if not 0 <= missing < self._unit:
            raise UsageError(f"a block of group {group} has {self.block_bytes[group]} bytes, and not {length}")
        return offset * self._unit + missing

    def _extent(self, group: int, place: int) -> tuple[int, int]:
        offset, missing = divmod(place, self._unit)
        return offset, offset + self.block_bytes[group] - missing

    def holds(self, group: int, place: int) -> bool:
        start, end = self._extent(group, place)
        return 0 <= start < end <= self._size

    def pieces(self, group: int, place: int) -> Sequence[Bytes]:
        start, end = self._extent(group, place)
        return [self._arena[start:end]]

    def release(self) -> None:
        self._arena = self._arena[:0].copy()
