"""The tier stack: drivers of the control plane over the backends; the only room that touches both."""

from kvtier.stack.assembly import StackParts, StackSettings
from kvtier.stack.engine_stack import EngineStack
from kvtier.stack.shutdown import CloseReport
from kvtier.stack.tier_stack import TierStack
from kvtier.stack.watching.stats import StackStats, TierStats

__all__ = ["CloseReport", "EngineStack", "StackParts", "StackSettings", "StackStats", "TierStack", "TierStats"]
