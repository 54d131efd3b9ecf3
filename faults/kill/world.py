"""A world: one root or two, how they are configured, and the blocks that may be stored in them."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path

from kvtier.types.geometry import Geometry, GroupLayout, KVLayout, TensorRef
from kvtier.types.keys import OffloadKey, key_group, make_key
from kvtier.types.namespace import Namespace
from kvtier_fs import FSOptions, SharedFSOptions

from .shared_log import LogShape

ERA_SHIFT = 40
STORE_ROWS = 16
KIB, MIB = 1 << 10, 1 << 20


def tag_of(era: int, number: int) -> int:
    """Which bytes a block holds: its content is a function of its key and this. `number` counts stores.

    An era is an epoch as the world sees it: a reset that a death undid leaves its era behind for good, while the
    epoch's number is used again.
    """
    return era << ERA_SHIFT | number


def era_of(tag: int) -> int:
    """The era of a tag."""
    return tag >> ERA_SHIFT


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a world: bytes of a block by group, the capacity of one root, the size of a region (slab)."""

    block_bytes: tuple[int, ...]
    capacity: int
    region_bytes: int
    weight: int


SHAPES = {
    "slab": (
        Shape((4 * KIB, 8 * KIB, 20 * KIB), 768 * KIB, 64 * KIB, 40),
        Shape((12 * KIB, 60 * KIB), 3 * MIB, 260 * KIB, 4),
        Shape((60 * KIB, 1500 * KIB), 8 * MIB, 1600 * KIB, 1),  # requests of more than a MiB are split
    ),
    "files": (
        Shape((4 * KIB, 8 * KIB, 20 * KIB), 480 * KIB, 0, 40),
        Shape((12 * KIB, 28 * KIB), 1280 * KIB, 0, 4),
        Shape((4 * KIB, 1500 * KIB), 6 * MIB, 0, 1),
    ),
}


@dataclass(frozen=True, slots=True)
class Tools:
    """What this machine offers: whether io_uring works."""

    uring: bool


class World:
    """What a victim and the harness agree on. Made anew every few dozen cycles."""

    def __init__(self, layout: str, folder: Path, rng: random.Random, tools: Tools) -> None:
        shapes = SHAPES[layout]
        shape = rng.choices(shapes, [each.weight for each in shapes])[0]
        count = 2 if layout == "slab" and rng.random() < 0.15 else 1
        self.layout = layout
        self.shape = shape
        self.roots = [folder / f"root{number}" for number in range(count)]
        self.capacity = shape.capacity * count
        self.geometry = Geometry(_kv_layout(shape), 4096)
        self.namespace = Namespace(self.geometry.layout)
        self.engine = "io_uring" if tools.uring and rng.random() < 0.5 else "threads"
        self.options = self._options(rng)
        smallest = min(shape.block_bytes) + 4 * KIB
        self.keys = self._keys(rng, 2 * self.capacity // smallest)
        self.numbers = {bytes(key): number for number, key in enumerate(self.keys)}
        self.eras = {0: 0}
        self.next_era = 1
        self.stored: dict[int, tuple[int, int]] = {}
        digest = self.namespace.digest()
        self.file_names = [hashlib.sha256(digest + key).hexdigest()[:40] for key in self.keys]
        load_rows = self.capacity // smallest
        arena = 64 * MIB if max(shape.block_bytes) > MIB else 8 * MIB
        self.log_shape = LogShape(load_rows, load_rows + STORE_ROWS, self.geometry.row_bytes, arena_bytes=arena)

    def _options(self, rng: random.Random) -> FSOptions | SharedFSOptions:
        fields: dict[str, object] = {
            "capacity": self.capacity,
            "min_free_bytes": 0,
            "io_engine": "auto",  # threads serve where io_uring is refused meanwhile, as another row of the suite does
            "direct": rng.choice(("auto", "off")),
            "io_depth": rng.choice((4, 8, 32)),
            "io_threads": rng.choice((1, 2, 4)),
        }
        if self.layout == "files":
            return SharedFSOptions.model_validate(fields | {"root": str(self.roots[0])})
        roots = [str(root) for root in self.roots]
        return FSOptions.model_validate(fields | {"roots": roots, "region_bytes": self.shape.region_bytes})

    def _keys(self, rng: random.Random, count: int) -> list[OffloadKey]:
        """Keys of all groups; more of small blocks than fit."""
        salt, groups = rng.randbytes(8), self.geometry.num_groups
        smallest = min(self.shape.block_bytes)
        keys = []
        for group in range(groups):
            share = max(8, count * smallest // self.shape.block_bytes[group])
            keys += [make_key(hashlib.sha256(salt + bytes([group]) + i.to_bytes(4, "big")).digest(), group)
                     for i in range(share)]  # fmt: skip
        return keys

    def numbers_of(self, group: int) -> list[int]:
        """The keys of a group, by number."""
        return [number for number, key in enumerate(self.keys) if key_group(key) == group]

    def block_bytes(self, number: int) -> int:
        """Bytes of the block of a key."""
        return self.geometry.aligned_bytes(key_group(self.keys[number]))


def _kv_layout(shape: Shape) -> KVLayout:
    return KVLayout(tuple(GroupLayout((TensorRef(0, size),)) for size in shape.block_bytes))
