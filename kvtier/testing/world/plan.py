"""What a seed decides before anything runs: the model's layout, the tiers, how many lives and how each ends."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from random import Random

from kvtier.geometry import Geometry, GroupKind, GroupLayout, KVLayout, TensorRef
from kvtier.keys import OffloadKey, make_key
from kvtier.stack.assembly import StackSettings

PAGE_BYTES = 4096
GPU_BLOCKS = 48
FILES_OWN_BYTES = 160 << 10


class Ending(StrEnum):
    """How a life ends."""

    CLOSE = "close"
    POWER_LOSS = "power loss"
    DEATH = "process death"


@dataclass(frozen=True, slots=True)
class Plan:
    """The fixed part of a scenario. `fs` are the options of the filesystem tier, `endings` one for each life."""

    layout: KVLayout
    rows: int
    cpu_policy: str
    watermark: float
    fs: dict[str, object]
    share_bytes: int
    settings: StackSettings
    keys: tuple[OffloadKey, ...]
    endings: tuple[Ending, ...]
    tasks: int
    actions: int

    @property
    def shares_root(self) -> bool:
        """True for the layout of one file a block, whose placement is the backend's own."""
        return self.fs["layout"] == "files"

    @property
    def roots(self) -> list[str]:
        roots = self.fs["roots"]
        assert isinstance(roots, list)
        return roots


def draw_plan(dice: Random, disk_layout: str = "slab") -> Plan:
    """A small stack over one of the backend's layouts, a few keys, one to three lives."""
    layout = _layout(dice)
    files = disk_layout == "files"
    roots = [f"/simulated/root{i}" for i in range(1 if files else dice.choice((1, 1, 2)))]
    share, region = (_files_bytes(dice, layout), 1 << 20) if files else _sizes(dice, layout, len(roots))
    fs: dict[str, object] = {
        "type": "fs",
        "layout": disk_layout,
        "roots": roots,
        "capacity": share * len(roots),
        "region_bytes": region,
        "min_free_bytes": 0,
        "direct": "off",
        "io_depth": dice.choice((1, 2, 8)),
        "policy": dice.choice(("lru", "arc")),
        "write_policy": dice.choice(("write_through", "on_evict")),
        "inflight_bytes": dice.choice((1, 64 << 10, 64 << 20)),
        "job_timeout_seconds": dice.choice((0.3, 1.0, 5.0)),
        "close_timeout_seconds": dice.choice((0.5, 5.0)),
    }
    settings = StackSettings(
        load_seconds=dice.choice((0.05, 1.0, 10.0)),
        store_seconds=dice.choice((0.05, 1.0, 10.0)),
        lookup_seconds=1.0,
        close_seconds=dice.choice((0.1, 2.0, 10.0)),
        tier_close_seconds=60.0,
        events_max=dice.choice((0, 1000)),
    )
    hashes = [dice.randbytes(dice.choice((4, 16, 32))) + bytes((i,)) for i in range(dice.choice((4, 8, 12)))]
    keys = tuple(make_key(each, group) for group in range(len(layout.groups)) for each in hashes)
    endings = [dice.choice(tuple(Ending)) for _ in range(dice.choice((1, 1, 2, 3)))]
    return Plan(
        layout=layout,
        rows=dice.choice((1, 2, 3, 4, 6)),
        cpu_policy=dice.choice(("lru", "arc")),
        watermark=dice.choice((0.0, 0.0, 0.3)),
        fs=fs,
        share_bytes=share,
        settings=settings,
        keys=keys,
        endings=tuple(endings),
        tasks=dice.randint(1, 3),
        actions=dice.randint(4, 10),
    )


def _layout(dice: Random) -> KVLayout:
    groups = []
    for tensor in range(dice.choice((1, 1, 2, 3))):
        size = dice.choice((512, 1000, 2048, 4096, 5000))
        kind = dice.choice((GroupKind.FULL, GroupKind.SLIDING_WINDOW))
        window = 64 if kind is GroupKind.SLIDING_WINDOW else 0
        groups.append(GroupLayout((TensorRef(tensor, size),), kind=kind, window_tokens=window))
    return KVLayout(tuple(groups), world_size=dice.choice((1, 1, 2)), block_size_factor=dice.choice((1, 1, 2, 3)))


def _sizes(dice: Random, layout: KVLayout, roots: int) -> tuple[int, int]:
    """(bytes of a root, bytes of a region): few regions of few slots, just enough that every group has a place."""
    geometry = Geometry(layout, PAGE_BYTES)
    slots = [PAGE_BYTES + geometry.aligned_bytes(group) for group in range(geometry.num_groups)]
    region = PAGE_BYTES + max(slots) * dice.randint(1, 3)
    regions = -(-len(set(slots)) // roots) + dice.randint(0, 3)
    return (region * regions + 15 * PAGE_BYTES) // PAGE_BYTES * PAGE_BYTES, region


def _files_bytes(dice: Random, layout: KVLayout) -> int:
    """Bytes of a root of one file a block: what it needs for itself, and a few blocks."""
    geometry = Geometry(layout, PAGE_BYTES)
    largest = PAGE_BYTES + max(geometry.aligned_bytes(group) for group in range(geometry.num_groups))
    return FILES_OWN_BYTES + largest * dice.randint(2, 10)
