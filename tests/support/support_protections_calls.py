"""The switch for the checks of what callers hand in: see `support_protections` for what such switches are."""

from __future__ import annotations

import pytest

from kvtier.control.plane import lookups
from kvtier.engines.engine_memory import notifying, tier
from kvtier.stack import engine_calls, jobs, request, tier_stack
from kvtier.types import checks

MODULES = (engine_calls, jobs, request, tier_stack, lookups, tier, notifying)


def without_checked_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments are what they are."""
    for module in MODULES:
        for name in [name for name in vars(module) if name.startswith("check_") and hasattr(checks, name)]:
            monkeypatch.setattr(module, name, lambda *_: None)
