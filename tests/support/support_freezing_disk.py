"""A disk, in a server under test, that does not answer while a file is there: another process freezes and thaws it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

FROZEN_FILE = "KVTIER_TEST_FROZEN"
"""The variable of the environment that names the file."""


def let_freeze(backend: Any) -> None:
    """From here on no load or store of this class of tiers ends while the file is there."""
    file = os.environ[FROZEN_FILE]

    def freezing(usual: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        async def move(tier: Any, job: Any) -> Any:
            # Another process thaws the disk: there is nothing to be woken by.
            while os.path.exists(file):  # noqa: ASYNC110, ASYNC240
                await asyncio.sleep(0.05)
            return await usual(tier, job)

        return move

    backend.load, backend.store = freezing(backend.load), freezing(backend.store)
