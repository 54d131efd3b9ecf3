"""`module_path` for a server under test: kvtier's adapter on disks that do not answer while a file is there."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

from kvtier.integrations.lmcache import KVTierL2Adapter
from kvtier_fs.tier import FSBackend

__all__ = ["KVTierL2Adapter"]
FROZEN = os.environ["KVTIER_TEST_FROZEN"]


def _freezing(usual: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    async def move(tier: Any, job: Any) -> Any:
        # Another process thaws the disk: there is nothing to be woken by.
        while os.path.exists(FROZEN):  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.05)
        return await usual(tier, job)

    return move


setattr(FSBackend, "load", _freezing(FSBackend.load))  # noqa: B010  # a method is no place to assign to, for mypy
setattr(FSBackend, "store", _freezing(FSBackend.store))  # noqa: B010
