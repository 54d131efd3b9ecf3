"""The setup of a replay: the source of requests, the KV layout and the stack, made from the options."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kvtier.config import StackConfig, find_tier, load_stack, open_stack, parse_stack
from kvtier.config.plan import plan_tier
from kvtier.errors import ConfigError
from kvtier.options import OwnedTierOptions, TierOptions, folders_of, in_folders
from kvtier.stack import TierStack
from kvtier.stack.learned.installed_policies import find_policy
from kvtier.tier.registry import discover
from kvtier.tools.replay.workload import make_workload
from kvtier.traces.read import TimeUnit, read_trace
from kvtier.traces.requests import RequestSource
from kvtier.types.geometry import Geometry, GroupKind, GroupLayout, KVLayout
from kvtier.types.keys import CPU, FS, Medium
from kvtier.types.namespace import Namespace

if TYPE_CHECKING:
    import torch

WorkloadName = Literal["chat", "agentic", "hybrid"]

CONTENT_VERSION = "1"
HYBRID_FACTOR = 4
HYBRID_WINDOW_TOKENS = 200
BLOCK_BYTES = {"chat": 64 << 10, "agentic": 64 << 10, "hybrid": 16 << 10, "trace": 64 << 10}
DEFAULT_STACK = """
tiers:
  - type: gpu
  - {type: cpu, cpu_bytes_to_use: 2GiB}
  - {type: fs, roots: [/a/temporary/folder], capacity: 8GiB}
"""
DEFAULT_BLOCKS = {"chat": (768, 4096), "agentic": (2048, 8192), "hybrid": (384, 2048), "trace": (2000, 16000)}
CPU_BYTES_MAX = 2 << 30
FS_BYTES_MAX = 8 << 30


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The options of a replay. None stands for the value of the stack, the source or the workload."""

    stack: Path | None = None
    service: str | None = None
    trace: Path | None = None
    workload: WorkloadName | None = None
    requests: int | None = None
    block_bytes: int | None = None
    block_tokens: int | None = None
    time_unit: TimeUnit | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = 0
    gpu_blocks: int | None = None
    cpu_blocks: int | None = None
    fs_blocks: int | None = None
    fs_root: Path | None = None
    server: Literal["embedded"] | None = None
    server_blocks: int | None = None
    policy: str | None = None
    store_mode: Literal["eager", "lazy"] = "eager"
    concurrency: int = 1
    backlog: int = 0
    metrics_port: int | None = None

    @property
    def kind(self) -> str:
        """`trace` or the workload's name."""
        return "trace" if self.trace is not None else self.workload or "chat"

    @property
    def temporary(self) -> bool:
        """True for tiers that are made for this replay alone, in sizes of a trial, and are gone after it."""
        return self.stack is None or self.server is not None


OF_THE_STACK = (*("stack", "cpu_blocks", "fs_blocks", "fs_root", "server", "server_blocks", "policy", "metrics_port"),)
"""Options that a service answers by its own stack file."""


def make_source(options: ReplayOptions) -> RequestSource:
    """The requests of the options. Raises ConfigError for options that exclude each other and for a bad trace."""
    if options.service is not None:
        for name in OF_THE_STACK:
            if getattr(options, name) is not None:
                option = "STACK.yaml" if name == "stack" else f"--{name.replace('_', '-')}"
                raise ConfigError("is the service's own: it goes without --service only", option)
    if options.trace is None:
        if options.block_tokens is not None:
            raise ConfigError("goes with --trace only; a workload brings its own", "--block-tokens")
        if options.time_unit is not None:
            raise ConfigError("goes with --trace only", "--time-unit")
        return make_workload(options.kind, options.seed, options.requests)
    if options.workload is not None:
        raise ConfigError("choose one of --trace and --workload", "--trace")
    return read_trace(options.trace, options.requests, options.block_tokens, options.time_unit)


def make_layout(options: ReplayOptions, block_tokens: int, factor: int | None) -> KVLayout:
    """The engine's KV layout. `block_bytes` are those of one GPU block of the full-attention group.

    `hybrid` has a full-attention group of two tensors and a sliding-window group with pages of three eighths the size,
    four GPU blocks to an offloaded block unless the stack sets another factor.
    """
    size = options.block_bytes or BLOCK_BYTES[options.kind]
    if options.kind != "hybrid":
        return KVLayout.of_pages(size, block_size=block_tokens, block_size_factor=factor or 1)
    if size < 8:
        raise ConfigError(f"a hybrid layout needs at least 8 bytes, got {size}", "--block-bytes")
    full = GroupLayout.of_pages((size - size // 4, size // 4), block_size=block_tokens)
    window = GroupLayout.of_pages(
        size * 3 // 8,
        block_size=block_tokens,
        first_tensor=2,
        kind=GroupKind.SLIDING_WINDOW,
        window_tokens=HYBRID_WINDOW_TOKENS,
    )
    return KVLayout((full, window), block_size_factor=factor or HYBRID_FACTOR)


def read_config(options: ReplayOptions, scratch: Path) -> StackConfig:
    """The stack of the options, or a GPU, CPU and filesystem stack. What is temporary has its disks in `scratch`, and
    `fit` sets its sizes. It records nothing, serves no figures, and keeps what it learns as `_state_folder` says."""
    stack = parse_stack(DEFAULT_STACK) if options.stack is None else load_stack(options.stack)
    config = stack.model_copy(update={"record": None, "stats_socket": ""})
    if options.temporary:
        placed = [in_folders(tier, [str(scratch / tier.label)]) if folders_of(tier) else tier for tier in config.tiers]
        config = config.model_copy(update={"tiers": tuple(placed)})
    root = options.fs_root
    if root is not None:
        config = _change(config, FS, "--fs-root", lambda tier: in_folders(tier, [str(root.absolute())]))
    config = config.model_copy(update={"state_dir": _state_folder(stack, config, root or scratch)})
    if options.policy is not None:
        try:
            find_policy(options.policy)
        except ConfigError as error:
            raise ConfigError(error.reason, "--policy") from None
        tiers = tuple(tier.with_known(policy=options.policy) for tier in config.tiers)
        config = config.model_copy(update={"tiers": tiers})
    return config


def _state_folder(stack: StackConfig, placed: StackConfig, trial: Path) -> str:
    """The stack's own `state_dir` while the replay holds a root of it: what is written there counts, and no engine has
    the stack open. Otherwise a folder of the trial."""
    at_home = [tier for tier in placed.tiers if isinstance(tier, OwnedTierOptions) and folders_of(tier)]
    return stack.state_dir if any(tier in stack.tiers for tier in at_home) else str(trial.absolute())


def fit(config: StackConfig, options: ReplayOptions, geometry: Geometry) -> StackConfig:
    """The stack with the capacities that the options give in blocks; a temporary one has defaults of its own."""
    cpu_blocks, fs_blocks, row = options.cpu_blocks, options.fs_blocks, geometry.row_bytes
    if options.temporary:
        defaults = DEFAULT_BLOCKS[options.kind]
        cpu_blocks = cpu_blocks or max(16, min(defaults[0], CPU_BYTES_MAX // row))
        if fs_blocks is None and find_tier(config, FS):
            fs_blocks = max(64, min(defaults[1], FS_BYTES_MAX // row))
    if cpu_blocks is not None:
        config = _change(config, CPU, "--cpu-blocks", lambda tier: tier.with_capacity(cpu_blocks * row))
    if fs_blocks is not None:
        config = _change(config, FS, "--fs-blocks", lambda tier: with_slots(tier, geometry, fs_blocks))
    return config


def make_namespace(layout: KVLayout) -> Namespace:
    """Blocks of one layout and content mean the same in every run."""
    extra = {"content": CONTENT_VERSION}
    return Namespace(layout, model="kvtier-replay", dtype="uint8", hash_algorithm="xxh3-128 chain", extra=extra)


def make_stack(config: StackConfig, layout: KVLayout, kv_caches: Sequence[torch.Tensor]) -> TierStack:
    """The stack, not yet open."""
    return open_stack(config, make_namespace(layout), kv_caches)


def with_slots(tier: TierOptions, geometry: Geometry, blocks: int) -> TierOptions:
    """The tier with the smallest capacity that holds at least `blocks` blocks."""
    backend = discover().get(tier.type)

    def held(capacity: int) -> int:
        plan, problems = plan_tier(backend(tier.with_capacity(capacity)), geometry, geometry.alignment, probe=False)
        return 0 if problems else plan.num_blocks or 0

    least = blocks * geometry.row_bytes
    capacities = range(least, 4 * least + (1 << 30), 4096)
    found = bisect_left(capacities, blocks, key=held)
    if found == len(capacities):
        raise ConfigError(f"no capacity holds {blocks} blocks of this layout", "--fs-blocks")
    return tier.with_capacity(capacities[found])


def _change(
    config: StackConfig, medium: Medium, option: str, change: Callable[[TierOptions], TierOptions]
) -> StackConfig:
    """The stack with its first tier of a medium replaced."""
    old = find_tier(config, medium)
    if old is None:
        raise ConfigError(f"the stack has no {medium} tier", option)
    tiers = tuple(change(tier) if tier is old else tier for tier in config.tiers)
    return config.model_copy(update={"tiers": tiers})
