"""Hints of applications in the control plane: retain, prefetch, demote, release; touches pins, never data."""

from kvtier.control.hints.following import HintLimits, Hints

__all__ = ["HintLimits", "Hints"]
