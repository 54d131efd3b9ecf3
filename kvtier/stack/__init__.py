"""The tier stack: drivers that run the control plane's jobs on the backends."""

from kvtier.stack.assembly import StackParts, StackSettings
from kvtier.stack.engine_stack import EngineStack
from kvtier.stack.shutdown import CloseReport
from kvtier.stack.tier_stack import TierStack
from kvtier.stack.watching.stats import StackStats, TierStats

__all__ = ["CloseReport", "EngineStack", "StackParts", "StackSettings", "StackStats", "TierStack", "TierStats"]
