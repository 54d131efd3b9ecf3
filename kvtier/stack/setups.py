"""What the control plane must know of each tier, from the tier's options, what it opened with, and the layout."""

from __future__ import annotations

from dataclasses import replace

from kvtier.control.tiers.lower_tier import TierSpec
from kvtier.control.tiers.shared_tier import ASKED_AT_ONCE
from kvtier.options import LowerTierOptions, SharedTierOptions
from kvtier.stack.learned.installed_policies import find_policy
from kvtier.tier.contract import LoadStore, Opened
from kvtier.types.geometry import Geometry, GroupKind
from kvtier.types.keys import GroupIndex

UNBOUNDED_BYTES = 1 << 62


def inflight_bytes(tier: LoadStore) -> int:
    """Bytes of transfers that may be in flight to a tier at once."""
    options = tier.options
    return options.inflight_bytes if isinstance(options, LowerTierOptions) else UNBOUNDED_BYTES


def tier_spec(tier: LoadStore, opened: Opened, geometry: Geometry, lookup_seconds: float) -> TierSpec:
    """What the control plane must know of a tier that offers what is `opened`."""
    options = tier.options
    name, eviction = options.label, options.eviction_policy()
    policy, token_bytes = find_policy(eviction), _token_bytes(opened, geometry)
    spec = TierSpec(
        name,
        tier.medium,
        opened,
        policy,
        token_bytes=token_bytes,
        kind=options.type,
        eviction=eviction,
        retained_bytes_max=options.retained_bytes_max(opened.capacity_bytes),
    )
    if not isinstance(options, LowerTierOptions):
        return spec
    spec = replace(
        spec,
        write_policy=options.write_policy,
        inflight_blocks=max(1, options.inflight_bytes // geometry.row_bytes),
        timeout_seconds=options.job_timeout_seconds,
        lookup_timeout_seconds=lookup_seconds,
        admit=options.admit,
        write_bytes_per_day=options.daily_writes,
        block_bytes=max(opened.space.slot_bytes) if opened.space is not None else geometry.row_bytes,
    )
    probed_from = 0 if tier.PROBE_PREFIX else ASKED_AT_ONCE
    return replace(with_hints(spec, options, chains(geometry)), probed_from=probed_from)


def _token_bytes(opened: Opened, geometry: Geometry) -> float:
    """The bytes that the blocks of every group take up for one of their tokens."""
    groups = range(geometry.num_groups)
    sizes = opened.space.slot_bytes if opened.space is not None else list(map(geometry.aligned_bytes, groups))
    return sum(sizes[group] / geometry.tokens_per_offloaded_block(group) for group in groups)


def with_hints(
    spec: TierSpec, options: LowerTierOptions, probed_groups: frozenset[GroupIndex] = frozenset()
) -> TierSpec:
    """The spec with how long is believed what a shared tier holds, and how that is found out."""
    if not isinstance(options, SharedTierOptions):
        return spec
    hit, miss = options.hit_hint_seconds, options.miss_hint_seconds
    return replace(spec, hit_hint_seconds=hit, miss_hint_seconds=miss, probed_groups=probed_groups)


def chains(geometry: Geometry) -> frozenset[GroupIndex]:
    """The groups of which every block needs all those before it: the others keep a window of a prompt, or its end."""
    kinds = enumerate(group.kind for group in geometry.layout.groups)
    return frozenset(GroupIndex(index) for index, kind in kinds if kind is GroupKind.FULL)
