"""What a replay runs on: the source of requests, the KV layout and the stack, from what the user asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from kvtier.config import StackConfig, build_tiers, load_stack, parse_stack
from kvtier.config.plan import Probed, plan_stack
from kvtier.errors import ConfigError
from kvtier.geometry import Geometry, GroupKind, GroupLayout, KVLayout, TensorRef
from kvtier.keys import CPU, FS, Medium
from kvtier.namespace import Namespace
from kvtier.options import TierOptions
from kvtier.registry import discover
from kvtier.replay.requests import RequestSource
from kvtier.replay.trace import Trace
from kvtier.replay.workload import PROFILES, Workload

WorkloadName = Literal["chat", "agentic", "hybrid"]

CONTENT_VERSION = "1"
HYBRID_FACTOR = 4
HYBRID_WINDOW_TOKENS = 200
BLOCK_BYTES = {"chat": 64 << 10, "agentic": 64 << 10, "hybrid": 16 << 10, "trace": 64 << 10}
DEFAULT_BLOCKS = {"chat": (768, 4096), "agentic": (2048, 8192), "hybrid": (384, 2048), "trace": (2000, 16000)}
CPU_BYTES_MAX = 2 << 30
FS_BYTES_MAX = 8 << 30
REGION_SLOTS = (16, 64)
CAPACITY_MAX = 1 << 60


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What can be asked of a replay. None means: as the stack, the source or the workload has it."""

    stack: Path | None = None
    trace: Path | None = None
    workload: WorkloadName | None = None
    requests: int | None = None
    block_bytes: int | None = None
    block_tokens: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = 0
    gpu_blocks: int | None = None
    cpu_blocks: int | None = None
    fs_blocks: int | None = None
    fs_root: Path | None = None
    policy: str | None = None
    store_mode: Literal["eager", "lazy"] = "eager"
    concurrency: int = 1
    backlog: int = 0

    @property
    def kind(self) -> str:
        """`trace` or the workload's name."""
        return "trace" if self.trace is not None else self.workload or "chat"


def make_source(options: ReplayOptions) -> RequestSource:
    """The requests asked for. Raises ConfigError for options that exclude each other and for a bad trace."""
    if options.trace is None:
        if options.block_tokens is not None:
            raise ConfigError("goes with --trace only; a workload brings its own", "--block-tokens")
        return Workload(PROFILES[options.kind], options.seed, options.requests)
    if options.workload is not None:
        raise ConfigError("choose one of --trace and --workload", "--trace")
    return Trace.read(options.trace, options.requests, options.block_tokens)


def make_layout(options: ReplayOptions, block_tokens: int, factor: int | None) -> KVLayout:
    """The engine's KV layout. `block_bytes` are those of one GPU block of the full-attention group.

    `hybrid` has a full-attention group of two tensors and a sliding-window group with pages of three eighths the size,
    four GPU blocks to an offloaded block unless the stack says otherwise.
    """
    size = options.block_bytes or BLOCK_BYTES[options.kind]
    if options.kind != "hybrid":
        return KVLayout((GroupLayout((TensorRef(0, size),), block_tokens),), block_size_factor=factor or 1)
    if size < 8:
        raise ConfigError(f"a hybrid layout needs at least 8 bytes, got {size}", "--block-bytes")
    full = GroupLayout((TensorRef(0, size - size // 4), TensorRef(1, size // 4)), block_tokens)
    window = GroupLayout(
        (TensorRef(2, size * 3 // 8),), block_tokens, GroupKind.SLIDING_WINDOW, window_tokens=HYBRID_WINDOW_TOKENS
    )
    return KVLayout((full, window), block_size_factor=factor or HYBRID_FACTOR)


def read_config(options: ReplayOptions, scratch: Path) -> StackConfig:
    """The stack asked for, or a GPU, CPU and filesystem stack in `scratch`; sizes of the latter come with `fit`."""
    if options.stack is not None:
        config = load_stack(options.stack)
    else:
        tiers = [
            {"type": "gpu"},
            {"type": "cpu", "cpu_bytes_to_use": CPU_BYTES_MAX},
            {"type": "fs", "roots": [str(scratch / "fs")], "capacity": FS_BYTES_MAX},
        ]
        config = parse_stack(yaml.safe_dump({"tiers": tiers}))
    if options.fs_root is not None:
        config = _update(config, FS, "--fs-root", {"roots": [str(options.fs_root.absolute())]})
    if options.policy is not None:
        updated = [
            tier.model_copy(update={"policy": options.policy}) if "policy" in type(tier).model_fields else tier
            for tier in config.tiers
        ]
        config = config.model_copy(update={"tiers": tuple(updated)})
    return config


def fit(config: StackConfig, options: ReplayOptions, geometry: Geometry) -> StackConfig:
    """The stack with the capacities asked for in blocks; the default stack gets its own defaults."""
    cpu_blocks, fs_blocks, row = options.cpu_blocks, options.fs_blocks, geometry.row_bytes
    if options.stack is None:
        defaults = DEFAULT_BLOCKS[options.kind]
        cpu_blocks = cpu_blocks or max(16, min(defaults[0], CPU_BYTES_MAX // row))
        fs_blocks = fs_blocks or max(64, min(defaults[1], FS_BYTES_MAX // row))
    if cpu_blocks is not None:
        config = _update(config, CPU, "--cpu-blocks", {"cpu_bytes_to_use": cpu_blocks * row})
    if fs_blocks is not None:
        config = _fit_fs(config, geometry, fs_blocks)
    return config


def make_namespace(config: StackConfig, layout: KVLayout) -> Namespace:
    """The namespace of replays: blocks of one layout and content mean the same in every run."""
    return Namespace(
        layout=layout,
        model="kvtier-replay",
        dtype="uint8",
        hash_algorithm="xxh3-128 chain",
        tag=config.namespace,
        extra={"content": CONTENT_VERSION},
    )


def _fit_fs(config: StackConfig, geometry: Geometry, blocks: int) -> StackConfig:
    """The smallest capacity whose slots are at least `blocks`, in regions small enough to come close to it."""
    tier = _tier(config, FS, "--fs-blocks")
    update: dict[str, object] = {}
    if "region_bytes" in type(tier).model_fields and getattr(tier, "region_bytes", None) is None:
        row = geometry.row_bytes
        fewest, most = REGION_SLOTS
        slots = next((count for count in range(most, fewest, -1) if blocks % count == 0), fewest)
        update["region_bytes"] = 2 * 4096 + min(slots, blocks) * (row + 2 * 4096)

    def with_capacity(capacity: int) -> StackConfig:
        return _update(config, FS, "--fs-blocks", update | {"capacity": capacity})

    low, high = 1, 1 << 20
    while _fs_blocks(with_capacity(high), geometry) < blocks:
        low, high = high, high * 2
        if high > CAPACITY_MAX:
            raise ConfigError(f"no capacity holds {blocks} blocks of this layout", "--fs-blocks")
    while low + 1 < high:
        middle = (low + high) // 2
        enough = _fs_blocks(with_capacity(middle), geometry) >= blocks
        low, high = (low, middle) if enough else (middle, high)
    return with_capacity(high)


def _fs_blocks(config: StackConfig, geometry: Geometry) -> int:
    tiers = build_tiers(config)
    probed = Probed((geometry.alignment,) * len(tiers), look=False)
    plan, problems = plan_stack(config, tiers, geometry.layout, probed)
    held = [tier.num_blocks or 0 for tier in plan.tiers if tier.medium == FS]
    return 0 if problems else sum(held)


def _tier(config: StackConfig, medium: Medium, option: str) -> TierOptions:
    backends = discover()
    for tier in config.tiers:
        if backends.get(tier.type).medium == medium:
            return tier
    raise ConfigError(f"the stack has no {medium} tier", option)


def _update(config: StackConfig, medium: Medium, option: str, values: dict[str, object]) -> StackConfig:
    """The stack with some options of its first tier of a medium replaced."""
    old = _tier(config, medium, option)
    new = old.model_copy(update=values)
    return config.model_copy(update={"tiers": tuple(new if tier is old else tier for tier in config.tiers)})
