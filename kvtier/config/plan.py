"""What a stack means for a KV layout: arithmetic over its options, and what its backends say of themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from kvtier.config.model import StackConfig, tier_name
from kvtier.errors import ConfigError
from kvtier.geometry import Geometry, KVLayout, stack_alignment
from kvtier.keys import CPU, GPU, Medium
from kvtier.loadstore import LoadStore, SlotSpace
from kvtier.options import INDEX_BYTES_PER_SLOT, TierOptions
from kvtier.registry import Preview, Previews


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """What one KV cache group means in rows. `waste` is the share of a row that its blocks leave unused."""

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
    """What one tier means. None: the engine decides it (GPU) or only opening tells.

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
    policy: str
    write_policy: str
    io_engine: str
    mode: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StackPlan:
    """What a stack means for a layout. `alignment` is the least common multiple of the tiers'; `num_copies` are the
    workers with a slice of their own in a row."""

    alignment: int
    row_bytes: int
    world_size: int
    num_copies: int
    block_size_factor: int
    groups: tuple[GroupPlan, ...]
    tiers: tuple[TierPlan, ...]


@dataclass(frozen=True, slots=True)
class Probed:
    """What was asked of the machine before the arithmetic: each tier's alignment, and whether previews may look."""

    alignments: tuple[int, ...]
    look: bool

    @staticmethod
    def floors(tiers: Sequence[LoadStore]) -> Probed:
        """Nothing was asked: each class's floor."""
        return Probed(tuple(tier.BLOCK_SIZE_ALIGNMENT for tier in tiers), look=False)


def plan_stack(
    config: StackConfig, tiers: Sequence[LoadStore], layout: KVLayout, probed: Probed
) -> tuple[StackPlan, list[ConfigError]]:
    """The plan, and everything that would keep the stack from opening. `tiers` are those of `build_tiers(config)`.

    Opens nothing. Looks at the machine only through backends that preview, and only if `probed.look`.
    """
    geometry = Geometry(layout, stack_alignment(probed.alignments))
    problems: list[ConfigError] = []
    plans = []
    for index, (options, tier) in enumerate(zip(config.tiers, tiers, strict=True)):
        preview = tier.preview(geometry, probed.look) if isinstance(tier, Previews) else Preview()
        problems += [ConfigError(problem, f"tiers[{index}]") for problem in preview.problems]
        plan = _tier_plan(options, tier, geometry, preview, probed.alignments[index])
        key, capacity = _budget(options, tier.medium)
        if plan.num_blocks == 0 and not preview.problems:
            problems.append(ConfigError(_too_small(capacity or 0, geometry), f"tiers[{index}].{key}"))
        plans.append(plan)
    groups = tuple(_group_plan(geometry, group) for group in range(geometry.num_groups))
    workers = (geometry.world_size, geometry.num_copies)
    plan_of_all = StackPlan(geometry.alignment, geometry.row_bytes, *workers, geometry.factor, groups, tuple(plans))
    return plan_of_all, problems


def _budget(options: TierOptions, medium: Medium) -> tuple[str, int | None]:
    key = "cpu_bytes_to_use" if medium == CPU else "capacity"
    value = getattr(options, key, None)
    return key, value if isinstance(value, int) else None


def _too_small(capacity: int, geometry: Geometry) -> str:
    return (
        f"{capacity} bytes hold no block: one needs {geometry.row_bytes} bytes (alignment {geometry.alignment}, "
        f"{geometry.world_size} worker(s), {geometry.factor} GPU block(s) each); give it more"
    )


def _group_plan(geometry: Geometry, group: int) -> GroupPlan:
    return GroupPlan(
        kind=geometry.layout.groups[group].kind.value,
        tokens_per_block=geometry.tokens_per_offloaded_block(group),
        page_bytes=geometry.page_bytes(group),
        kv_bytes_per_block=geometry.kv_bytes_per_block(group),
        kv_bytes_per_offloaded_block=geometry.kv_bytes_per_offloaded_block(group),
        aligned_bytes=geometry.aligned_bytes(group),
        padding_bytes=geometry.padding_bytes(group),
        waste=geometry.padding_bytes(group) / geometry.row_bytes,
    )


def _tier_plan(options: TierOptions, tier: LoadStore, geometry: Geometry, preview: Preview, alignment: int) -> TierPlan:
    capacity = _budget(options, tier.medium)[1] if preview.capacity_bytes is None else preview.capacity_bytes
    num_blocks = tokens = slots = None
    if preview.space is not None and tier.medium != CPU:
        num_blocks, tokens = _mixture(_slots_by_group(preview.space), geometry)
        slots = preview.space.num_slot_ids
    elif capacity is not None and tier.medium != GPU:
        slots = capacity // geometry.row_bytes
        num_blocks, tokens = _mixture([Fraction(slots)] * geometry.num_groups, geometry)
        num_blocks = slots
    return TierPlan(
        name=tier_name(options),
        type=options.type,
        medium=tier.medium,
        alignment=alignment,
        capacity_bytes=capacity,
        num_blocks=num_blocks,
        tokens=tokens,
        index_bytes=None if slots is None else slots * INDEX_BYTES_PER_SLOT,
        policy=str(getattr(options, "policy", "")),
        write_policy=str(getattr(options, "write_policy", "")),
        io_engine=str(getattr(options, "io_engine", "")),
        mode=preview.mode,
        notes=preview.notes,
    )


def _slots_by_group(space: SlotSpace) -> list[Fraction]:
    """How many slots the whole space would hold of each group alone, whole slots in each region."""
    return [Fraction(space.num_regions * (space.region_bytes // size)) for size in space.slot_bytes]


def _mixture(slots: Sequence[Fraction], geometry: Geometry) -> tuple[int, int]:
    """(blocks, tokens) held when every group keeps every token; `slots[g]` is what fits of group g alone."""
    if not all(slots):
        return 0, 0
    per_token = [Fraction(1, geometry.tokens_per_offloaded_block(group)) for group in range(geometry.num_groups)]
    tokens = 1 / sum((share / fit for share, fit in zip(per_token, slots, strict=True)), Fraction(0))
    return int(tokens * sum(per_token)), int(tokens)
