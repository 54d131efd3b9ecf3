"""Planning for serving loops that embed kvtier: how much of a prompt is a hit, what to load, and what to store when.

Pure and synchronous; an engine's loop calls it and hands the transfers it plans to the stack.
"""

from kvtier.planner.loads import GroupLoad, blocks_to_load, plan_load
from kvtier.planner.prefix import Presence, hit_limit, prefix_unit, usable_prefix, usable_prefixes
from kvtier.planner.stores import StoreMode, StorePlan, StorePlanner

__all__ = ["GroupLoad", "blocks_to_load", "plan_load"]
__all__ += ["Presence", "hit_limit", "prefix_unit", "usable_prefix", "usable_prefixes"]
__all__ += ["StoreMode", "StorePlan", "StorePlanner"]
