"""What a seed decides before anything runs: the layout, the tiers, the number of processes and how each ends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random

from kvtier.stack.assembly import StackSettings
from kvtier.types.geometry import Geometry, GroupKind, GroupLayout, KVLayout, TensorRef
from kvtier.types.keys import OffloadKey, make_key
from simulator.requests import draw_prompts

PAGE_BYTES = 4096
GPU_BLOCKS = 48
FILES_OWN_BYTES = 160 << 10


class Ending(StrEnum):
    """How a process ends."""

    CLOSE = "close"
    POWER_LOSS = "power loss"
    DEATH = "process death"


@dataclass(frozen=True, slots=True)
class SeedPlan:
    """The fixed part of a seed. `fs` are the options of the fs tier, `endings` has one entry for each process.

    `prompts` are those of the requests that are announced; none unless a policy follows requests. `hinted` are the keys
    of which hints are said; none in two of three seeds.
    """

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
    prompts: tuple[tuple[OffloadKey, ...], ...] = ()
    hinted: tuple[OffloadKey, ...] = ()

    @property
    def shares_root(self) -> bool:
        """True for one file a block, where placement is the backend's own."""
        return self.fs["type"] == "shared_fs"

    @property
    def policies(self) -> set[str]:
        """What evicts in its tiers."""
        return {self.cpu_policy, str(self.fs.get("policy", self.cpu_policy))}

    @property
    def roots(self) -> list[str]:
        roots = self.fs.get("roots", [self.fs.get("root")])
        assert isinstance(roots, list)
        return roots


def draw_seed_plan(rng: Random, disk_layout: str = "slab") -> SeedPlan:
    """A small stack over one of the filesystem tiers, a few keys, one to three processes."""
    layout = _layout(rng)
    files = disk_layout == "files"
    roots = [f"/simulated/root{i}" for i in range(1 if files else rng.choice((1, 1, 2)))]
    share, region = (_files_bytes(rng, layout), 1 << 20) if files else _sizes(rng, layout, len(roots))
    fs: dict[str, object] = {
        "capacity": share * len(roots),
        "min_free_bytes": 0,
        "direct": "off",
        "io_depth": rng.choice((1, 2, 8)),
        "policy": rng.choice(("lru", "arc")),  # drawn for either type, so that both have the seeds they always had
        "write_policy": rng.choice(("write_through", "on_evict")),
        "inflight_bytes": rng.choice((1, 64 << 10, 64 << 20)),
        "job_timeout_seconds": rng.choice((0.3, 1.0, 5.0)),
        "close_timeout_seconds": rng.choice((0.5, 5.0)),
    }
    if files:
        del fs["policy"]
        fs |= {"type": "shared_fs", "root": roots[0]}
    else:
        fs |= {"type": "fs", "roots": roots, "region_bytes": region}
    settings = StackSettings(
        load_timeout_seconds=rng.choice((0.05, 1.0, 10.0)),
        store_timeout_seconds=rng.choice((0.05, 1.0, 10.0)),
        lookup_timeout_seconds=1.0,
        close_timeout_seconds=rng.choice((0.1, 2.0, 10.0)),
        tier_close_seconds=60.0,
        events_max=rng.choice((0, 1000)),
    )
    hashes = [rng.randbytes(rng.choice((4, 16, 32))) + bytes((i,)) for i in range(rng.choice((4, 8, 12)))]
    keys = tuple(make_key(each, group) for group in range(len(layout.groups)) for each in hashes)
    endings = [rng.choice(tuple(Ending)) for _ in range(rng.choice((1, 1, 2, 3)))]
    return SeedPlan(
        layout=layout,
        rows=rng.choice((1, 2, 3, 4, 6)),
        cpu_policy=rng.choice(("lru", "arc")),
        watermark=rng.choice((0.0, 0.0, 0.3)),
        fs=fs,
        share_bytes=share,
        settings=settings,
        keys=keys,
        endings=tuple(endings),
        tasks=rng.randint(1, 3),
        actions=rng.randint(4, 10),
    )


def with_requests(plan: SeedPlan, rng: Random) -> SeedPlan:
    """Every third plan with policy `reuse` in its CPU tier, its disk or both."""
    if rng.random() > 1 / 3:
        return plan
    cpu, disk = rng.choice(((True, False), (False, True), (True, True))) if not plan.shares_root else (True, False)
    fs = plan.fs | ({"policy": "reuse"} if disk else {})
    prompts = draw_prompts(rng, plan.keys) if rng.random() < 0.8 else ()
    return replace(plan, cpu_policy="reuse" if cpu else plan.cpu_policy, fs=fs, prompts=prompts)


def with_hints(plan: SeedPlan, rng: Random) -> SeedPlan:
    """Every third plan with hints of all its keys."""
    return replace(plan, hinted=plan.keys) if rng.random() < 1 / 3 else plan


def _layout(rng: Random) -> KVLayout:
    groups = []
    for tensor in range(rng.choice((1, 1, 2, 3))):
        size = rng.choice((512, 1000, 2048, 4096, 5000))
        kind = rng.choice((GroupKind.FULL, GroupKind.SLIDING_WINDOW))
        window = 64 if kind is GroupKind.SLIDING_WINDOW else 0
        groups.append(GroupLayout((TensorRef(tensor, size),), kind=kind, window_tokens=window))
    return KVLayout(tuple(groups), world_size=rng.choice((1, 1, 2)), block_size_factor=rng.choice((1, 1, 2, 3)))


def _sizes(rng: Random, layout: KVLayout, roots: int) -> tuple[int, int]:
    """(bytes of a root, bytes of a region): few regions of few slots, just enough that every group has a place."""
    geometry = Geometry(layout, PAGE_BYTES)
    slots = [PAGE_BYTES + geometry.aligned_bytes(group) for group in range(geometry.num_groups)]
    region = PAGE_BYTES + max(slots) * rng.randint(1, 3)
    regions = -(-len(set(slots)) // roots) + rng.randint(0, 3)
    return (region * regions + 15 * PAGE_BYTES) // PAGE_BYTES * PAGE_BYTES, region


def _files_bytes(rng: Random, layout: KVLayout) -> int:
    """Bytes of a root of one file a block: what it needs for itself, and a few blocks."""
    geometry = Geometry(layout, PAGE_BYTES)
    largest = PAGE_BYTES + max(geometry.aligned_bytes(group) for group in range(geometry.num_groups))
    return FILES_OWN_BYTES + largest * rng.randint(2, 10)
