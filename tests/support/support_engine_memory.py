"""An engine's memory with blocks of two groups, and what belongs into them."""

from __future__ import annotations

import numpy as np

from kvtier.engines.engine_memory.memory import PagedMemory
from kvtier.types.geometry import GroupKind, GroupLayout, KVLayout
from kvtier.types.keys import OffloadKey, key_group, make_key

PAGES = 32
PAGE, STATE = 6000, 17_000
"""Bytes of a block of each group; neither is a multiple of any alignment."""
LONG = 60.0
"""Seconds that no call needs."""
LAYOUT = KVLayout([GroupLayout.of_pages(PAGE), GroupLayout.of_pages(STATE, kind=GroupKind.MAMBA)])


def key(number: int, group: int = 0) -> OffloadKey:
    return make_key(number.to_bytes(16, "big"), group)


def content(name: OffloadKey) -> np.ndarray:
    """The bytes that belong to a key."""
    size = (PAGE, STATE)[key_group(name)]
    return np.random.default_rng(list(name)).integers(0, 256, size, dtype=np.uint8)


class Engine:
    """Memory with pages in two halves and states in one piece, and what is in it."""

    def __init__(self) -> None:
        self.halves = np.zeros((2, PAGES, PAGE // 2), dtype=np.uint8)
        self.states = np.zeros((PAGES, STATE), dtype=np.uint8)
        self.memory = PagedMemory([[self.halves], [self.states]])

    def write(self, name: OffloadKey, place: int) -> None:
        if key_group(name):
            self.states[place] = content(name)
        else:
            self.halves[:, place] = content(name).reshape(2, -1)

    def read(self, name: OffloadKey, place: int) -> np.ndarray:
        return self.states[place] if key_group(name) else self.halves[:, place].reshape(-1)
