"""Hints of applications in the control plane: retain, prefetch, demote, release; touches pins, never data."""
