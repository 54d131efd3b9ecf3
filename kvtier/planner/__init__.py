"""Plans of embedders' loops: the usable prefix, what to load, what to store; pure values, touches no stack.

Pure and synchronous; an engine's loop calls it and hands the transfers it plans to the stack.
"""

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
