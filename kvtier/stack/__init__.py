"""The tier stack: drivers that run the control plane's jobs on the backends."""

from kvtier.stack.assembly import StackParts, StackSettings
from kvtier.stack.closing import CloseReport
from kvtier.stack.enginestack import EngineStack
from kvtier.stack.stats import StackStats, TierStats
from kvtier.stack.tierstack import TierStack

__all__ = ["CloseReport", "EngineStack", "StackParts", "StackSettings", "StackStats", "TierStack", "TierStats"]
