"""The tier stack: drives the control plane over the backends; the only room that touches both.

`TierStack` is loaded at its first use: parts and figures are needed without it.
"""

from typing import TYPE_CHECKING

from kvtier.stack.assembly import StackParts, StackSettings
from kvtier.stack.shutdown import CloseReport
from kvtier.stack.watching.stats import StackStats, TierStats

if TYPE_CHECKING:
    from kvtier.stack.tier_stack import TierStack
else:

    def __getattr__(name: str) -> object:
        if name != "TierStack":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from kvtier.stack.tier_stack import TierStack

        return globals().setdefault(name, TierStack)


__all__ = ["CloseReport", "StackParts", "StackSettings", "StackStats", "TierStack", "TierStats"]
