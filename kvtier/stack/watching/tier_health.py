"""Whether a lower tier is used, by its breakers and by its I/O that is stuck."""

from __future__ import annotations

from kvtier.control.tiers.breaker import Breaker, BreakerState
from kvtier.control.tiers.lower_tier import LowerTier
from kvtier.control.tiers.shared_tier import SharedTier

_WORST_FIRST = (BreakerState.HELD_BACK, BreakerState.OPEN, BreakerState.HALF_OPEN)


def breakers(lower: LowerTier) -> dict[str, Breaker]:
    """A tier's breakers by what they refuse: `load`, `store`, and `lookup` of a shared tier."""
    found = {"load": lower.load_breaker, "store": lower.store_breaker}
    if isinstance(lower.index, SharedTier) and not lower.held_back:
        found["lookup"] = lower.index.lookup_breaker
    return found


def breakers_text(lower: LowerTier) -> str:
    """The state of all breakers of a tier, or that of each: `load closed, store closed, lookup open`."""
    if lower.stuck and not lower.held_back:
        return f"{BreakerState.OPEN}: I/O is stuck"
    states = {what: breaker.state.value for what, breaker in breakers(lower).items()}
    return states["load"] if len(set(states.values())) == 1 else ", ".join(map(" ".join, states.items()))


def tier_state(lower: LowerTier) -> BreakerState:
    """The worst of a tier's breakers: held back, open, half-open, closed. I/O that is stuck counts as open."""
    if lower.stuck and not lower.held_back:
        return BreakerState.OPEN
    states = {breaker.state for breaker in breakers(lower).values()}
    return next((state for state in _WORST_FIRST if state in states), BreakerState.CLOSED)
