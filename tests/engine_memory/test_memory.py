"""Where blocks are in an engine's memory: each byte of a block once, in order, and never a byte beside it."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.engines.engine_memory.memory import ArenaMemory, EngineMemory, PagedMemory, Pieces
from kvtier.errors import ConfigError, UsageError
from kvtier.types.keys import make_key


def block(memory: EngineMemory, group: int, place: int) -> bytes:
    return b"".join(piece.tobytes() for piece in memory.pieces(group, place))


def layers_of(keys_and_values: np.ndarray) -> list[np.ndarray]:
    """Memory laid out by layer, `(2, layers, pages, bytes)`, as the arrays of one group."""
    return [keys_and_values.reshape(-1, *keys_and_values.shape[2:])]


def test_a_page_is_all_its_pieces_in_order():
    array = np.arange(2 * 3 * 4 * 8, dtype=np.uint8).reshape(2, 3, 4, 8)
    memory = PagedMemory([layers_of(array)])
    assert memory.block_bytes == (2 * 3 * 8,)
    assert memory.num_blocks == 4
    for page in range(4):
        assert block(memory, 0, page) == array[:, :, page].tobytes()


def test_groups_have_arrays_and_sizes_of_their_own():
    keys, values, states = (np.full((pages, size), size, dtype=np.uint8) for pages, size in ((6, 8), (6, 4), (3, 32)))
    memory = PagedMemory([[keys, values], [states]])
    assert memory.block_bytes == (12, 32)
    assert block(memory, 0, 5) == bytes([8] * 8 + [4] * 4)
    assert block(memory, 1, 2) == bytes([32] * 32)
    assert not memory.holds(1, 3)


def test_pieces_at_addresses_are_written_in_place():
    memory = np.zeros((2, 5, 3, 16), dtype=np.uint8)  # a page of 3 x 16 bytes in each half
    pieces = Pieces(memory.ctypes.data, 3 * 16, 2, memory.strides[0], 5, memory.strides[1])
    paged = PagedMemory([[pieces.array()]])
    for number, piece in enumerate(paged.pieces(0, 3)[0]):
        piece[:] = number + 1
    assert memory[0, 3].min() == memory[0, 3].max() == 1
    assert memory[1, 3].min() == memory[1, 3].max() == 2
    assert np.count_nonzero(memory) == 2 * 3 * 16


def test_an_arena_has_blocks_wherever_the_engine_puts_them():
    arena = np.arange(200, dtype=np.uint8)
    memory = ArenaMemory(arena.ctypes.data, arena.size, (64, 16))
    assert block(memory, 0, memory.place(0, 7, 64)) == bytes(range(7, 71))
    assert block(memory, 1, memory.place(1, 184, 16)) == bytes(range(184, 200))
    assert memory.num_blocks == 200 // 64


def test_a_block_of_an_arena_may_be_shorter_than_its_group_but_never_longer_or_empty():
    arena = np.arange(200, dtype=np.uint8)
    memory = ArenaMemory(arena.ctypes.data, arena.size, (64, 16))
    for length in (1, 33, 63):
        place = memory.place(0, 200 - length, length)
        memory.check([make_key(b"k", 0)], [place])
        assert block(memory, 0, place) == arena[-length:].tobytes()
    for length in (0, 65, -1):
        with pytest.raises(UsageError, match="has 64 bytes"):
            memory.place(0, 0, length)


def test_a_block_of_an_arena_ends_within_it():
    memory = ArenaMemory(np.zeros(200, dtype=np.uint8).ctypes.data, 200, (64, 16))
    for offset, length in ((137, 64), (200, 1), (-1, 64)):
        with pytest.raises(UsageError, match="outside an arena of 200 bytes"):
            memory.place(0, offset, length)


@pytest.mark.parametrize("place", [-1, 4, 1 << 40])
@pytest.mark.parametrize("kind", ["paged", "arena"])
def test_a_place_outside_the_memory_is_refused(kind, place):
    array = np.zeros((4, 8), dtype=np.uint8)
    memory = PagedMemory([[array]]) if kind == "paged" else ArenaMemory(array.ctypes.data, 11, (8,))
    unit = 1 if kind == "paged" else 8
    memory.check([make_key(b"k", 0)], [3 * unit])
    with pytest.raises(UsageError, match="no block of group 0"):
        memory.check([make_key(b"k", 0)], [place * unit])
    with pytest.raises(UsageError, match="no block of group 1"):
        memory.check([make_key(b"k", 1)], [0])


def test_memory_of_another_form_is_refused():
    with pytest.raises(ConfigError, match="must be writable rows"):
        PagedMemory.of_rows(memoryview(bytes(64)), 1)
    with pytest.raises(ConfigError, match="one number of pages"):
        PagedMemory([[np.zeros((4, 8), dtype=np.uint8), np.zeros((5, 8), dtype=np.uint8)]])
    with pytest.raises(ConfigError, match="do not fit into an arena"):
        ArenaMemory(4096, 16, (32,))
    with pytest.raises(ConfigError, match="too large for blocks"):
        ArenaMemory(4096, 1 << 42, (1 << 20,))
    with pytest.raises(ConfigError, match="cannot be"):
        Pieces(0, 8, 1, 0, 1, 8).array()
