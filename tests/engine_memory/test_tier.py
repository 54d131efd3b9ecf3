"""A tier below an engine's memory that does not open in time."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from kvtier.engine_memory import tier as module
from kvtier.engine_memory.options import EngineMemoryOptions
from kvtier.engine_memory.staging import EngineRows
from kvtier.engine_memory.tier import EngineMemoryTier, rows_geometry
from kvtier.errors import ResourceError
from kvtier.stack import StackSettings
from kvtier.testing.memory import MemoryOptions, MemoryTier
from kvtier.types.namespace import Namespace

ROW = 4096


class Options(EngineMemoryOptions, MemoryOptions):
    """A tier in memory, below an engine's rows."""


class Frozen(MemoryTier):
    """A tier whose opening ends when its disk answers, and not when it is cancelled."""

    answer = threading.Event()
    closed = threading.Event()

    async def open(self, context):
        while not self.answer.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        return await super().open(context)

    async def close(self):
        await super().close()
        self.closed.set()


def test_a_tier_that_opens_too_late_is_an_error_and_is_closed_then(monkeypatch):
    monkeypatch.setattr(module, "discover", lambda: SimpleNamespace(get=lambda name: Frozen))
    monkeypatch.setattr(module, "StackSettings", partial(StackSettings, open_seconds=0.05))
    rows = EngineRows(memoryview(np.zeros((8, ROW), dtype=np.uint8)))
    namespace = Namespace(rows_geometry(1, ROW, 1).layout)
    try:
        with pytest.raises(ResourceError, match=r"tier below did not open within 0\.05 s"):
            EngineMemoryTier(Options(type="memory", name="below"), namespace, rows, "below", logging.getLogger("test"))
    finally:
        Frozen.answer.set()
    assert Frozen.closed.wait(20)
