"""Plans of an embedder's loop: usable prefix, loads, stores; pure and synchronous; its loop calls it, no stack does."""

from kvtier.planner.prefix import (
    GroupLoad,
    Presence,
    blocks_to_load,
    hit_limit,
    plan_load,
    prefix_unit,
    usable_prefix,
    usable_prefixes,
)
from kvtier.planner.stores import StoreMode, StorePlan, StorePlanner

__all__ = ["GroupLoad", "blocks_to_load", "plan_load"]
__all__ += ["Presence", "hit_limit", "prefix_unit", "usable_prefix", "usable_prefixes"]
__all__ += ["StoreMode", "StorePlan", "StorePlanner"]
