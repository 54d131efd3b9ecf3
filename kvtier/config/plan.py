"""The plan of a stack for a KV layout: arithmetic over its options, and the dry runs of its backends."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from kvtier.errors import ConfigError
from kvtier.options import INDEX_BYTES_PER_SLOT, LowerTierOptions, SharedTierOptions, TierOptions
from kvtier.stack.distinct_folders import folder_problems
from kvtier.tier.contract import LoadStore
from kvtier.tier.registry import DryRun, DryRuns
from kvtier.types.geometry import Geometry, KVLayout, stack_alignment
from kvtier.types.keys import CPU, GPU, Medium


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A KV cache group in rows. `waste` is the share of a row that its blocks leave unused."""

    kind: str
    tokens_per_block: int
    page_bytes: int
    kv_bytes_per_block: int
    kv_bytes_per_offloaded_block: int
    aligned_bytes: int
    padding_bytes: int
    waste: float


@dataclass(frozen=True, slots=True)
class TierPlan:
    """A tier in blocks and bytes. None: the engine decides it (GPU), or it is known only after opening.

    `num_blocks` counts offloaded blocks and `tokens` tokens, when every group keeps every token; where slots have the
    size of their group, both are for that mixture of groups.
    """

    name: str
    type: str
    medium: Medium
    alignment: int
    capacity_bytes: int | None
    num_blocks: int | None
    tokens: int | None
    index_bytes: int | None
    policy: str = ""
    write_policy: str = ""
    io_engine: str = ""
    mode: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StackPlan:
    """The plan of a stack for a layout. `alignment` is the least common multiple of the tiers'; `num_copies` are the
    workers with a slice of their own in a row."""

    alignment: int
    row_bytes: int
    world_size: int
    num_copies: int
    block_size_factor: int
    groups: tuple[GroupPlan, ...]
    tiers: tuple[TierPlan, ...]


def plan_stack(
    tiers: Sequence[LoadStore], layout: KVLayout, alignments: Sequence[int] | None = None, probe: bool = False
) -> tuple[StackPlan, list[ConfigError]]:
    """The plan, and everything that would keep the stack from opening. `tiers` are those of `build_tiers`.

    `alignments` are those that the tiers' devices need; the floors of the tiers' classes when left out. Opens nothing.
    Looks at the machine only with `probe`: at the tiers' folders, and through the dry runs of backends.
    """
    if alignments is None:
        alignments = [tier.BLOCK_SIZE_ALIGNMENT for tier in tiers]
    geometry = Geometry(layout, stack_alignment(alignments))
    plans = []
    problems = folder_problems([(f"tiers[{index}]", tier.options) for index, tier in enumerate(tiers)], probe)
    for index, (tier, alignment) in enumerate(zip(tiers, alignments, strict=True)):
        plan, found = plan_tier(tier, geometry, alignment, probe, f"tiers[{index}]")
        plans.append(plan)
        problems += found
    groups = tuple(_group_plan(geometry, group) for group in range(geometry.num_groups))
    workers = (geometry.world_size, geometry.num_copies)
    whole = StackPlan(geometry.alignment, geometry.row_bytes, *workers, geometry.factor, groups, tuple(plans))
    return whole, problems


def plan_tier(
    tier: LoadStore, geometry: Geometry, alignment: int, probe: bool, at: str = ""
) -> tuple[TierPlan, list[ConfigError]]:
    """The plan of one tier, and what would keep it from opening. `at` is the path of the tier in its file."""
    options = tier.options
    dry_run = tier.dry_run(geometry, probe) if isinstance(tier, DryRuns) else DryRun()
    problems = [_problem(problem, at) for problem in dry_run.problems]
    capacity = options.capacity_bytes if dry_run.capacity_bytes is None else dry_run.capacity_bytes
    num_blocks = tokens = slots = None
    if dry_run.space is not None and tier.medium != CPU:
        space = dry_run.space
        slots = space.num_slot_ids
        num_blocks, tokens = _mixture(
            [space.num_regions * (space.region_bytes // size) for size in space.slot_bytes], geometry
        )
    elif capacity is not None and tier.medium != GPU:
        slots = capacity // geometry.row_bytes
        num_blocks, tokens = _mixture([slots] * geometry.num_groups, geometry)
    if num_blocks == 0 and not problems:
        problems.append(ConfigError(geometry.too_small(options.capacity_bytes or 0), f"{at}.{options.CAPACITY_KEY}"))
    shown = options.model_dump(include={"policy", "write_policy", "io_engine"})
    plan = TierPlan(
        name=options.label,
        type=options.type,
        medium=tier.medium,
        alignment=alignment,
        capacity_bytes=capacity,
        num_blocks=num_blocks,
        tokens=tokens,
        index_bytes=_index_bytes(options, slots),
        mode=dry_run.mode,
        notes=dry_run.notes,
        **shown,
    )
    return plan, problems


def _index_bytes(options: TierOptions, slots: int | None) -> int | None:
    """The memory of a tier's index: of its directory, which a shared tier has not, and of the first uses where the tier
    has an admission."""
    admission = options.admission_bytes if isinstance(options, LowerTierOptions) else 0
    indexed = None if isinstance(options, SharedTierOptions) else slots
    return (indexed or 0) * INDEX_BYTES_PER_SLOT + admission if indexed is not None or admission else None


def _problem(problem: str | ConfigError, at: str) -> ConfigError:
    """A problem of a tier under the path of the key that it is about, as far as that is known."""
    return problem.below(at) if isinstance(problem, ConfigError) else ConfigError(problem, at)


def _group_plan(geometry: Geometry, group: int) -> GroupPlan:
    return GroupPlan(
        geometry.layout.groups[group].kind.value,
        geometry.tokens_per_offloaded_block(group),
        geometry.page_bytes(group),
        geometry.kv_bytes_per_block(group),
        geometry.kv_bytes_per_offloaded_block(group),
        geometry.aligned_bytes(group),
        geometry.padding_bytes(group),
        waste=geometry.padding_bytes(group) / geometry.row_bytes,
    )


def _mixture(slots: Sequence[int], geometry: Geometry) -> tuple[int, int]:
    """(blocks, tokens) held when every group keeps every token; `slots[g]` is what fits of group g alone."""
    if not all(slots):
        return 0, 0
    per_token = [Fraction(1, geometry.tokens_per_offloaded_block(group)) for group in range(geometry.num_groups)]
    tokens = 1 / sum((share / fit for share, fit in zip(per_token, slots, strict=True)), Fraction(0))
    return int(tokens * sum(per_token)), int(tokens)
