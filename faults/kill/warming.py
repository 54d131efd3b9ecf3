"""What is done before the first fork: everything that victims use is imported and run a few times."""

from __future__ import annotations

import asyncio
import gc
import random
import shutil
from pathlib import Path

from .files_life import FilesLife
from .life import Life, Plan, Target
from .oracle import Oracle
from .shared_log import SharedLog
from .slab_life import SlabLife
from .victim import Signals
from .world import Tools, World

_WORLDS = 5
_BATCHES = 8

LIVES: dict[str, type[Life]] = {"slab": SlabLife, "files": FilesLife}


def warm_up(layout: str, folder: Path, tools: Tools, signals: Signals) -> None:
    """Run some lives in this process, then collect garbage once and never again.

    Children find imported and compiled what they need, and share it with their parent until a page is written.
    """
    rng = random.Random(0)
    for _ in range(_WORLDS):
        home = folder / "warming"
        home.mkdir(mode=0o700)
        world = World(layout, home, rng, tools)
        log, oracle = SharedLog(world.log_shape), Oracle(world)
        for seed in range(2):
            log.clear()
            life = LIVES[layout](world, log, Plan(Target.CLOSE, seed, 0, _BATCHES), signals.write)
            asyncio.run(life.run())
            oracle.absorb(log)
        shutil.rmtree(home)
    signals.drain()
    gc.collect()
    gc.freeze()
    gc.disable()
