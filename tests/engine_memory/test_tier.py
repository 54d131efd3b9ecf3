"""A tier below an engine's memory that does not open in time, or that an exception stopped: every job ends."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtier.control.jobs import PresenceQuery
from kvtier.engines.engine_memory import tier as module
from kvtier.engines.engine_memory.memory import PagedMemory
from kvtier.engines.engine_memory.options import EngineMemoryOptions
from kvtier.engines.engine_memory.plane import EngineMemoryPlane
from kvtier.engines.engine_memory.tier import EngineMemoryTier
from kvtier.engines.engine_memory.transfers import EngineTransfer
from kvtier.errors import ResourceError, UsageError
from kvtier.options import SharedTierOptions
from kvtier.stack import StackSettings
from kvtier.stack.dispatcher import Dispatcher
from kvtier.testing.memory import MemoryOptions, MemoryTier, SharedMemoryTier
from kvtier.tier.contract import LookupResult
from kvtier.types.arrays import int_array
from kvtier.types.geometry import KVLayout
from kvtier.types.jobs import JobKind
from kvtier.types.keys import make_key
from kvtier.types.namespace import Namespace

ROW = 4096
NAMESPACE = Namespace(KVLayout.of_pages(ROW))
ENDS_SECONDS = 10.0
KEYS = [make_key(number.to_bytes(16, "big"), 0) for number in range(4)]


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
    monkeypatch.setattr(module, "StackSettings", partial(StackSettings, open_timeout_seconds=0.05))
    memory = PagedMemory.of_rows(memoryview(np.zeros((8, ROW), dtype=np.uint8)), 1)
    try:
        with pytest.raises(ResourceError, match=r"tier below did not open within 0\.05 s"):
            EngineMemoryTier(
                Options(type="memory", name="below"), NAMESPACE, memory, "below", logging.getLogger("test")
            )
    finally:
        Frozen.answer.set()
    assert Frozen.closed.wait(20)


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineMemoryTier]:
    monkeypatch.setattr(module, "discover", lambda: SimpleNamespace(get=lambda name: MemoryTier))
    memory = PagedMemory.of_rows(memoryview(np.ones((8, ROW), dtype=np.uint8)), 1)
    options = Options(type="memory", name="below", job_timeout_seconds=1.0)
    tier = EngineMemoryTier(options, NAMESPACE, memory, "below", logging.getLogger("test"))
    yield tier
    tier.close()
    assert not tier.thread.alive


def transfer(job_id: int, kind: JobKind = JobKind.STORE) -> EngineTransfer:
    return EngineTransfer(job_id, kind, KEYS, int_array(range(len(KEYS))), "request", time.monotonic())


def ended(tier: EngineMemoryTier, job_id: int) -> EngineTransfer:
    """The job, once it is returned."""
    until = time.monotonic() + ENDS_SECONDS
    while time.monotonic() < until:
        for each in tier.finished():
            if each.job_id == job_id:
                return each
        time.sleep(0.002)
    raise TimeoutError(f"job {job_id} did not end")


PLANE = ("submit", "finish", "take_jobs", "take_queries", "take_ended", "relieve", "_conclude", "end_step", "deliver")
STEPS = [
    *((EngineMemoryPlane, name, True) for name in PLANE),
    *((Dispatcher, name, True) for name in ("_start", "_begin", "_report")),
    *((Dispatcher, name, False) for name in ("submit", "_conclude", "_flush")),
]
"""Where an exception is raised, and whether the tier is told; if not, its job ends after its deadline."""


@pytest.mark.parametrize(("owner", "name", "told"), STEPS)
def test_every_job_ends_when_one_step_raises(owner, name, told, tier, monkeypatch):
    usual, raised = getattr(owner, name), []

    def raising(*args: Any) -> Any:
        if raised:
            return usual(*args)
        raised.append(1)
        raise ArithmeticError(name)

    monkeypatch.setattr(owner, name, raising)
    for number, kind in enumerate((JobKind.STORE, JobKind.LOAD)):
        tier.submit(transfer(number, kind))
        tier.end_step()
        assert len(ended(tier, number)._outcomes) == len(KEYS)
    assert raised
    tier.submit(transfer(9, JobKind.LOAD))
    assert not ended(tier, 9).good
    assert tier._failed == told
    assert tier.lookup(KEYS[0], "request") is LookupResult.MISS
    assert not tier.finished()


class Hanging(MemoryTier):
    """A tier whose stores do not end before they are cancelled."""

    async def store(self, job):
        await asyncio.Event().wait()


def test_the_log_says_that_it_opens_is_reset_and_what_closing_lost(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(module, "discover", lambda: SimpleNamespace(get=lambda name: Hanging))
    memory = PagedMemory.of_rows(memoryview(np.ones((8, ROW), dtype=np.uint8)), 1)
    options = Options(type="memory", name="below", drain_timeout_seconds=0.5)
    tier = EngineMemoryTier(options, NAMESPACE, memory, "below", logging.getLogger("test"))
    tier.reset()
    tier.submit(transfer(1))
    tier.close()
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("event=")]
    assert [line.split(" ")[0] for line in lines] == ["event=tier_open", "event=reset", "event=closed"]
    assert lines[0].startswith("event=tier_open tier=below type=memory mode=")
    assert "epoch=1 durable=yes" in lines[1]
    assert f"dropped_blocks={len(KEYS)} " in lines[2]


def test_exceptions_are_counted_in_its_figures(tier, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(EngineMemoryPlane, "relieve", lambda plane, now: 1 / 0)
        assert not tier.finished()
    assert tier.stats().errors == 1


def test_a_failed_plane_finds_nothing_and_says_so_once(tier, monkeypatch):
    tier.submit(transfer(1))
    assert ended(tier, 1).ok
    assert tier.lookup(KEYS[0], "request") is LookupResult.HIT
    tier.plane.take_changes()
    with monkeypatch.context() as patched:
        patched.setattr(EngineMemoryPlane, "relieve", lambda plane, now: 1 / 0)
        assert not tier.finished()
    assert tier.lookup(KEYS[0], "request") is LookupResult.MISS
    assert [(removed, set(names)) for removed, names in tier.plane.take_changes()] == [(True, set(KEYS))]
    assert not tier.plane.take_changes()
    tier.submit(transfer(2, JobKind.LOAD))
    with pytest.raises(UsageError, match="job 2 is in flight"):
        tier.submit(transfer(2, JobKind.LOAD))
    assert not ended(tier, 2).good


def test_a_job_ends_whose_loop_ended_just_now(tier, monkeypatch):
    def gone(*_: Any) -> None:
        raise RuntimeError("Event loop is closed")

    with monkeypatch.context() as patched:
        patched.setattr(tier.thread, "call_soon", gone)
        tier.submit(transfer(1))
    assert not ended(tier, 1).good


def test_a_job_whose_delivery_was_lost_ends_after_its_deadline(tier, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(tier, "_deliver", lambda batch: None)
        patched.setattr(tier._dispatcher, "_deliver", lambda batch: None)
        tier.submit(transfer(1))
        assert not ended(tier, 1).good
    tier.submit(transfer(2))
    ended(tier, 2)


def test_how_long_is_believed_what_a_shared_tier_holds_stands_in_its_options(monkeypatch):
    class SharedOptions(EngineMemoryOptions, SharedTierOptions, MemoryOptions):
        """A shared tier in memory, below an engine's rows."""

    monkeypatch.setattr(module, "discover", lambda: SimpleNamespace(get=lambda name: SharedMemoryTier))
    memory = PagedMemory.of_rows(memoryview(np.ones((8, ROW), dtype=np.uint8)), 1)
    options = SharedOptions(type="memory", name="below", hit_hint_seconds=7.0, miss_hint_seconds=3.0)
    tier = EngineMemoryTier(options, NAMESPACE, memory, "below", logging.getLogger("test"))
    try:
        setup = tier.plane.lower.spec
        assert (setup.hit_hint_seconds, setup.miss_hint_seconds) == (7.0, 3.0)
    finally:
        tier.close()


def test_lookups_that_are_never_answered_do_not_pile_up(tier, monkeypatch):
    monkeypatch.setattr("kvtier.stack.lookups.LOOKUPS_MAX", 4)

    async def ask() -> int:
        tier._staged.backend.lookup = lambda names: asyncio.Event().wait()
        tier._start([], [PresenceQuery(1, (name,)) for name in KEYS * 5])
        await asyncio.sleep(0)
        return len(tier._lookups.tasks)

    monkeypatch.setattr("kvtier.stack.assembly.AnswersLookups", object)
    assert tier.thread.run(ask, ENDS_SECONDS) == 4
