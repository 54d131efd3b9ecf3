"""What is done before the first fork: everything that victims use is imported, run a few times and left in peace."""

from __future__ import annotations

import asyncio
import gc
import random
import shutil
from pathlib import Path

from .board import Board
from .files_life import FilesLife
from .life import Life, Plan, Target
from .oracle import Oracle
from .slab_life import SlabLife
from .victim import Signals
from .world import Tools, World

_WORLDS = 5
_BATCHES = 8

LIVES: dict[str, type[Life]] = {"slab": SlabLife, "files": FilesLife}


def warm_up(layout: str, folder: Path, tools: Tools, signals: Signals) -> None:
    """Live some lives in this very process, then collect garbage once and never again.

    Children find imported and compiled what they need, and share it with their parent for as long as nobody writes.
    """
    rng = random.Random(0)
    for _ in range(_WORLDS):
        home = folder / "warming"
        home.mkdir(mode=0o700)
        world = World(layout, home, rng, tools)
        board, oracle = Board(world.board_shape), Oracle(world)
        for seed in range(2):
            board.clear()
            life = LIVES[layout](world, board, Plan(Target.CLOSE, seed, 0, _BATCHES), signals.write)
            asyncio.run(life.run())
            oracle.absorb(board)
        shutil.rmtree(home)
    signals.drain()
    gc.collect()
    gc.freeze()
    gc.disable()
