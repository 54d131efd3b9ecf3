"""The tier stack: drivers of the control plane over the backends; the only room that touches both.

A process loads the driver that it uses.
"""

from typing import TYPE_CHECKING

from kvtier.stack.assembly import StackParts, StackSettings
from kvtier.stack.shutdown import CloseReport
from kvtier.stack.watching.stats import StackStats, TierStats

if TYPE_CHECKING:
    from kvtier.stack.engine_stack import EngineStack
    from kvtier.stack.tier_stack import TierStack
else:

    def __getattr__(name: str) -> object:
        if name == "EngineStack":
            from kvtier.stack.engine_stack import EngineStack as driver
        elif name == "TierStack":
            from kvtier.stack.tier_stack import TierStack as driver
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals().setdefault(name, driver)


__all__ = ["CloseReport", "EngineStack", "StackParts", "StackSettings", "StackStats", "TierStack", "TierStats"]
