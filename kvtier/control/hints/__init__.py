"""What applications ask of the control plane beside loads and stores: to retain, to prefetch, to demote, to release."""

from kvtier.control.hints.following import HintLimits, Hints

__all__ = ["HintLimits", "Hints"]
