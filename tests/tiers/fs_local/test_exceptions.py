"""A step that raises, whichever it is: jobs end, loads are right, close leaves nothing behind."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from support_fs import Tier, flat, keys, open_tier, options

from kvtier.testing.trace import leaving_no_trace
from kvtier_fs.io.loop_engine import LoopEngine
from kvtier_fs.io.threads import ThreadsEngine
from kvtier_fs.io.uring import UringEngine, probe_uring
from kvtier_fs.local.opening import Hooks
from kvtier_fs.local.root_queue import RootQueue

ENGINES = [
    "threads",
    pytest.param("io_uring", marks=pytest.mark.skipif(bool(probe_uring()), reason="this machine offers no io_uring")),
]
ENGINE_CLASSES: dict[str, type[LoopEngine]] = {"threads": ThreadsEngine, "io_uring": UringEngine}
STEPS = [
    "_fill",
    "_begin",
    "_requests",
    "_piece",
    "_piece_ended",
    "_record",
    "_check",
    "_verify",
    "_on_verified",
    "_end_judged",
]
ENDS_SECONDS = 20.0
NAMES = keys(12)


class Fault:
    """Raises once, at visit number `visit` of a method."""

    def __init__(self, visit: int) -> None:
        self.visit = visit
        self.visits = 0

    def install(self, patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        step = getattr(owner, name)

        def raising(*args, **kwargs):
            self.visits += 1
            if self.visits == self.visit:
                raise LookupError(f"{name} at visit {self.visit}")
            return step(*args, **kwargs)

        patch.setattr(owner, name, raising)


async def moved(tier: Tier) -> None:
    """Store some blocks and load them: each has an outcome, and no load brings wrong bytes."""
    jobs = [NAMES[at : at + 4] for at in range(0, len(NAMES), 4)]
    async with asyncio.timeout(ENDS_SECONDS):
        for number, names in enumerate(jobs):
            formats = [] if number else [tier.format_region(0, 0)]
            flat(await tier.backend.store(tier.store_job(names, formats)))
        for names in jobs:
            outcomes = flat(await tier.backend.load(tier.load_job(names)))
            for row, (key, outcome) in enumerate(zip(names, outcomes, strict=True)):
                assert not outcome.ok or tier.holds(row, key, tier.directory[key][1]), "wrong bytes"


async def life(root: Path, engine: str, checked_here_bytes: int) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    settings = options(root, io_engine=engine, capacity=64 << 20, close_timeout_seconds=5.0)
    async with open_tier(settings, hooks=Hooks(checked_here_bytes=checked_here_bytes)) as tier:
        await moved(tier)


@pytest.mark.parametrize("engine", ENGINES)
def test_jobs_end_although_a_step_raises(tmp_path, monkeypatch, seed, dial, engine):
    rng = random.Random(seed)
    places = [(RootQueue, name) for name in STEPS]
    places += [(ENGINE_CLASSES[engine], "_pump")] * 3
    raised = 0
    for number in range(dial(100, 12)):
        owner, name = rng.choice(places)
        fault, root, here = Fault(rng.randint(1, 3)), tmp_path / f"root{number}", rng.choice([0, 1 << 20])
        with leaving_no_trace():
            with monkeypatch.context() as patch:
                fault.install(patch, owner, name)
                asyncio.run(life(root, engine, here))
            asyncio.run(life(root, engine, here))
        raised += fault.visits >= fault.visit
    assert raised >= 3
